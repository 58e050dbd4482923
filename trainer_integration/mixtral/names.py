"""The included model's weights under the names of Hugging Face's Mixtral, and back.

The two compute the same function of the same weights; only names and the packing of matrices differ:
queries, keys and values are one matrix here, and so are an expert's ``w1`` and ``w3``.

Shape suffixes:
    E  experts        V  vocabulary        D  width
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from omniload.base.errors import StateError
from trainer_integration.moe.config import MoEConfig

__all__ = ["from_mixtral", "to_mixtral"]

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")
_ALIKE = {
    "norm1.weight_D": "input_layernorm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "norm2.weight_D": "post_attention_layernorm.weight",
    "router.weight_ED": "block_sparse_moe.gate.weight",
}
_TOP = {
    "embedding_VD": "model.embed_tokens.weight",
    "norm.weight_D": "model.norm.weight",
    "output_VD": "lm_head.weight",
}


def to_mixtral(state: Mapping[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """Return weights by Mixtral's names.

    Args:
        state: Weights of the whole model, by their names here.
        config: The model.
    """
    heads = [
        n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in _TOP:
            found[_TOP[name]] = tensor
            continue
        match = _LAYER.fullmatch(name)
        assert match is not None, f"{name} is no weight of a model that Mixtral can be"
        at, rest = f"model.layers.{match[1]}.", match[2]
        if rest in _ALIKE:
            found[at + _ALIKE[rest]] = tensor
        elif rest == "attention.qkv.weight":
            for letter, part in zip("qkv", torch.split(tensor, heads), strict=True):
                found[f"{at}self_attn.{letter}_proj.weight"] = part
        else:
            for expert, matrix in enumerate(tensor):
                into = f"{at}block_sparse_moe.experts.{expert}."
                if rest == "experts.fc2_EDF":
                    found[into + "w2.weight"] = matrix
                else:
                    found[into + "w1.weight"], found[into + "w3.weight"] = matrix.chunk(2)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_mixtral(tensors: Mapping[str, Tensor], config: MoEConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with their names here, one after the other: the inverse of ``to_mixtral``.

    Args:
        tensors: Weights by Mixtral's names; each is asked for once, as it is needed.
        config: The model.

    Raises:
        StateError: One is missing, or has another shape than ``config`` says.
    """
    reader = _Reader(tensors)
    dim, hidden, width = config.dim, config.hidden, config.head_dim
    yield "embedding_VD", reader.take(_TOP["embedding_VD"], config.vocab_size, dim)
    for layer in range(config.num_layers):
        at, into = f"model.layers.{layer}.", f"blocks.{layer}."
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = [
            reader.take(f"{at}self_attn.{letter}_proj.weight", size * width, dim)
            for letter, size in zip("qkv", sizes, strict=True)
        ]
        yield into + "attention.qkv.weight", torch.cat(qkv)
        for name, theirs in _ALIKE.items():
            shape = {
                "attention.output.weight": (dim, dim),
                "router.weight_ED": (config.num_experts, dim),
            }
            yield into + name, reader.take(at + theirs, *shape.get(name, (dim,)))
        experts = [f"{at}block_sparse_moe.experts.{e}." for e in range(config.num_experts)]
        fc13 = [
            torch.cat([reader.take(f"{e}{w}.weight", hidden, dim) for w in ("w1", "w3")])
            for e in experts
        ]
        yield into + "experts.fc13_EXD", torch.stack(fc13)
        fc2 = [reader.take(e + "w2.weight", dim, hidden) for e in experts]
        yield into + "experts.fc2_EDF", torch.stack(fc2)
    yield "norm.weight_D", reader.take(_TOP["norm.weight_D"], dim)
    if not config.tied_embeddings:
        yield "output_VD", reader.take(_TOP["output_VD"], config.vocab_size, dim)


class _Reader:
    """Weights, each checked as it is taken."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise StateError(f"there is no weight {name}; give the folder of a whole Mixtral")
        if tuple(tensor.shape) != shape:
            raise StateError(
                f"weight {name} has shape {tuple(tensor.shape)} and config.json says {shape}; give files that "
                "belong together"
            )
        return tensor
