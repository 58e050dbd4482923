"""The included model's weights under the names of Hugging Face's Mixtral, and back.

The two compute the same function of the same weights; only names and the packing of matrices differ:
queries, keys and values are one matrix here, and so are an expert's ``w1`` and ``w3``.

Shape suffixes:
    E  experts        V  vocabulary        D  width
"""

import json
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import Json, JsonObject
from trainer_integration.moe.config import MoEConfig

__all__ = ["from_mixtral", "mixtral_config", "model_config", "require_shape", "to_mixtral"]

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")
_ALIKE = {
    "norm1.weight_D": "input_layernorm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "norm2.weight_D": "post_attention_layernorm.weight",
    "router.weight_ED": "block_sparse_moe.gate.weight",
}
_SHAPE = {
    *("vocab_size", "dim", "hidden", "num_layers", "num_heads", "num_kv_heads", "num_experts"),
    *("top_k", "norm_epsilon", "rope_theta", "tied_embeddings"),
}
"""What decides which function the weights compute; the rest of a model's settings is about its training."""
_TOP = {
    "embedding_VD": "model.embed_tokens.weight",
    "norm.weight_D": "model.norm.weight",
    "output_VD": "lm_head.weight",
}


def mixtral_config(
    config: MoEConfig, *, longest: int, end_of_document: int | None = None
) -> JsonObject:
    """Return what ``config.json`` of the exported model holds.

    Args:
        config: The model.
        longest: Tokens of the longest context it was trained on, for those who ask.
        end_of_document: Token at which generation ends; unsaid, transformers would end at token 2, whatever it is.

    Raises:
        ConfigError: Mixtral cannot compute what the model does.
    """
    _require_mixtral(config)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": longest,
        "sliding_window": None,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": end_of_document,
    }


def model_config(content: Mapping[str, Json]) -> MoEConfig:
    """Return the model that a ``config.json`` of a Mixtral describes.

    Raises:
        ConfigError: It is of another family, or uses what the included model has not.
    """
    if content.get("model_type") != "mixtral":
        raise ConfigError(
            f"model_type is {content.get('model_type')!r}; only mixtral can be imported"
        )
    heads, dim = content.get("num_attention_heads"), content.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(dim, int) or heads < 1:
        raise ConfigError(
            f"num_attention_heads is {heads!r}, hidden_size {dim!r}; both are whole numbers"
        )
    if content.get("sliding_window") is not None:
        raise ConfigError(
            f"sliding_window is {content['sliding_window']!r}; the included model attends to whole documents"
        )
    if content.get("head_dim") not in (None, dim // heads):
        raise ConfigError(
            f"head_dim is {content['head_dim']!r}; here it is hidden_size / heads, {dim // heads}"
        )
    rope = content.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else content.get("rope_theta", 1e6)
    if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"rope_type is {rope['rope_type']!r}; the included model has the default one only"
        )
    found = MoEConfig.model_validate(
        {
            "vocab_size": content.get("vocab_size"),
            "dim": dim,
            "hidden": content.get("intermediate_size"),
            "num_layers": content.get("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": content.get("num_key_value_heads", heads),
            "num_experts": content.get("num_local_experts"),
            "top_k": content.get("num_experts_per_tok"),
            "norm_epsilon": content.get("rms_norm_eps"),
            "rope_theta": theta,
            "tied_embeddings": content.get("tie_word_embeddings", False),
        }
    )
    _require_mixtral(found)
    return found


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


def require_shape(config: MoEConfig, content: Mapping[str, Json]) -> None:
    """Refuse weights of another function than the model of a run computes.

    Args:
        config: The model of the run.
        content: Of the folder's ``config.json``.

    Raises:
        ConfigError: Naming every value that differs, as the training file is to give it.
    """
    found = model_config(content)
    own, theirs = (each.model_dump(include=_SHAPE) for each in (config, found))
    differ = [
        f"{name} {json.dumps(value)} (the run has {json.dumps(own[name])})"
        for name, value in theirs.items()
        if value != own[name]
    ]
    if differ:
        raise ConfigError(
            f"the weights are of a model with {', '.join(differ)}; give the run the values of the weights"
        )


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


def _require_mixtral(config: MoEConfig) -> None:
    if config.top_k == 1:
        raise ConfigError(
            "top_k is 1: the included model weighs a single expert by its probability, Mixtral by 1; choose 2 or more"
        )
    if config.bias_rate or config.capacity_factor is not None:
        raise ConfigError(
            f"bias_rate is {config.bias_rate}, capacity_factor {config.capacity_factor}: Mixtral has neither a bias "
            "nor dropped choices, so it would compute something else"
        )
