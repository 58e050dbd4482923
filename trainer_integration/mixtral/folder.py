"""Models in folders in Hugging Face's format: ``config.json`` and safetensors files. No pickle.

The included model and Hugging Face's Mixtral compute the same function of the same weights. Only the names and the
packing of matrices differ: here, queries, keys and values are one matrix, and so are an expert's ``w1`` and ``w3``.

Shape suffixes:
    E  experts        V  vocabulary        D  width
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from omniload.base.errors import ConfigError, StateError, system_refusals
from omniload.mix.config import BpeTokenizer, TokenizerConfig
from omniload.mix.schema.tokenizers import TiktokenTokenizer
from omniload.source.byte_pairs.files import read_tokenizer
from trainer_integration.mixtral.config import (
    CONFIG,
    WEIGHTS,
    mixtral_config,
    model_config,
    names_of,
    opened_file,
    read_config,
)
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.model import MoETransformer
from trainer_integration.vision.model import VisionLanguageModel

__all__ = [
    "from_mixtral",
    "read_mixtral",
    "to_mixtral",
    "weights_of",
    "write_mixtral",
    "write_tokenizer",
]

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


@system_refusals("the exported model")
def write_mixtral(
    model: MoETransformer,
    folder: Path,
    *,
    longest: int,
    begin_of_document: int | None = None,
    end_of_document: int | None = None,
) -> None:
    """Write a whole model so that ``MixtralForCausalLM.from_pretrained(folder)`` reads it.

    Args:
        model: A model that is not divided among ranks.
        folder: A new folder, or an empty one.
        longest: Tokens of the longest context it was trained on.
        begin_of_document: Token that begins a document; ``None`` if there is none.
        end_of_document: Token that ends a document, at which ``generate`` stops; ``None`` if there is none.

    Raises:
        ConfigError: Mixtral cannot compute the model's function.
        StateError: The folder contains files already.
    """
    assert model.peers.size == 1, "the experts of other ranks would be missing"
    if isinstance(model, VisionLanguageModel):
        raise ConfigError(
            "the run was trained on images, and Mixtral has no encoder for them; load its checkpoint into a "
            "trainer_integration.vision model"
        )
    config = mixtral_config(
        model.config,
        longest=longest,
        begin_of_document=begin_of_document,
        end_of_document=end_of_document,
    )
    folder.mkdir(parents=True, exist_ok=True)
    if held := sorted(path.name for path in folder.iterdir()):
        raise StateError(f"{folder} holds {held[:3]}; give a new folder")
    tensors = to_mixtral(model.state_dict(), model.config)
    # transformers 4 refuses a file whose metadata does not name the framework.
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).touch()
    # The library restricts the file to its owner, but access to the folder is decided as for every other file.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


@system_refusals("the exported model")
def write_tokenizer(config: TokenizerConfig, base_dir: Path, folder: Path) -> None:
    """Write the tokenizer next to the model, so that ``AutoTokenizer.from_pretrained(folder)`` reads it.

    Nothing is written for a tokenizer without a file, whose token ids are bytes. A file of ranks is written as a
    ``tokenizer.json``.

    Raises:
        ConfigError: Its file does not exist any more, or is of ranks for which a ``tokenizer.json`` would give other
            ids.
    """
    match config:
        case BpeTokenizer():
            content = read_tokenizer(base_dir / config.path)
        case TiktokenTokenizer():
            from omniload.source.byte_pairs.encodings import tokenizer_json  # noqa: PLC0415 -- an extra

            try:
                content = tokenizer_json(config, base_dir)
            except ConfigError as error:
                error.add_note(f"{folder} holds the model, without a tokenizer")
                raise
        case _:
            return
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": config.end_of_document}
    if config.begin_of_document is not None:
        about["bos_token"] = config.begin_of_document
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2), encoding="utf-8")


def read_mixtral(folder: Path) -> MoETransformer:
    """Return the model in a folder that Hugging Face wrote, in one file or several, in float32.

    Raises:
        ConfigError: It is of another family, or uses a feature that the included model lacks.
        IntegrityError: A file is not of its format.
        StateError: A file or a weight is missing.
    """
    model = MoETransformer(model_config(read_config(folder)))
    model.take_weights(weights_of(folder, model.config))
    return model


def weights_of(folder: Path, config: MoEConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a folder under their names here, one in memory at a time, in the folder's type.

    Raises:
        IntegrityError: A file is not of its format.
        StateError: A file or a weight is missing, or has another shape.
    """
    with _opened(folder) as tensors:
        yield from from_mixtral(tensors, config)


class _Stored(Mapping[str, Tensor]):
    """Weights in files, each read when it is asked for."""

    def __init__(self, files: Mapping[str, safe_open]) -> None:
        """Take the open file of each weight, by its name."""
        self._files = files

    @override
    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return found

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    @override
    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _opened(folder: Path) -> Iterator[_Stored]:
    files: dict[str, safe_open] = {}
    with ExitStack() as opened:
        for name in names_of(folder):
            file = opened.enter_context(opened_file(folder, name, "pt"))
            # All files stay open, because a weight is read when it is asked for, and a layer may span several files.
            files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]
        yield _Stored(files)


def to_mixtral(state: Mapping[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """Return weights under Mixtral's names.

    Args:
        state: Weights of the whole model, under their names here.
        config: The model.
    """
    # In their order in the one matrix: queries, keys, values.
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
                    # One product for both here, in this order: ``w1`` is the gate, ``w3`` the gated part.
                    found[into + "w1.weight"], found[into + "w3.weight"] = matrix.chunk(2)
    # safetensors refuses tensors that are not contiguous, as a part of a matrix may be.
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_mixtral(tensors: Mapping[str, Tensor], config: MoEConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under their names here, one after another: the inverse of ``to_mixtral``.

    Args:
        tensors: Weights under Mixtral's names; each is asked for once, when it is needed.
        config: The model.

    Raises:
        StateError: A weight is missing, or has another shape than in ``config``.
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
        # Checked against config.json: files of two models of one family would load together, and compute nonsense.
        if tuple(tensor.shape) != shape:
            raise StateError(
                f"weight {name} has shape {tuple(tensor.shape)} and config.json says {shape}; give files that "
                "belong together"
            )
        return tensor
