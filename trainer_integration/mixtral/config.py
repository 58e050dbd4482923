"""A Mixtral's ``config.json`` and the files next to it, read without torch to check a job before it starts."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omniload.base.config import checked
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.reading import read_kept_file
from omniload.base.state import Json, JsonObject
from trainer_integration.moe.config import MoEConfig

if TYPE_CHECKING:
    from safetensors import safe_open

__all__ = [
    "CONFIG",
    "WEIGHTS",
    "mixtral_config",
    "model_config",
    "names_of",
    "opened_file",
    "read_config",
    "require_shape",
    "require_weights",
]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""Files of a folder."""
_INDEX, _SUFFIX = "model.safetensors.index.json", ".safetensors"
_MOST_BYTES = 16 << 20
_SHAPE = {
    *("vocab_size", "dim", "hidden", "num_layers", "num_heads", "num_kv_heads", "num_experts"),
    *("top_k", "norm_epsilon", "rope_theta", "tied_embeddings"),
}
"""Settings that decide which function the weights compute; a model's other settings concern its training."""


def mixtral_config(
    config: MoEConfig,
    *,
    longest: int,
    begin_of_document: int | None = None,
    end_of_document: int | None = None,
) -> JsonObject:
    """Return the content of ``config.json`` for the exported model.

    Args:
        config: The model.
        longest: Tokens of the longest context it was trained on, for information.
        begin_of_document: Token with which generation without a prompt begins.
        end_of_document: Token at which generation ends; without it, transformers would end at token 2, whatever it is.

    Raises:
        ConfigError: Mixtral cannot compute the model's function.
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
        # Parameters have this type, whatever type the layers compute in.
        "torch_dtype": "float32",
        # Without these, transformers takes tokens 1 and 2, which are Mistral's.
        "bos_token_id": begin_of_document,
        "eos_token_id": end_of_document,
    }


def model_config(content: Mapping[str, Json]) -> MoEConfig:
    """Return the model that a ``config.json`` of a Mixtral describes.

    Raises:
        ConfigError: It is of another family, or uses a feature that the included model lacks.
    """
    if content.get("model_type") != "mixtral":
        raise ConfigError(
            f"model_type is {content.get('model_type')!r}; only mixtral can be imported"
        )
    heads, dim = content.get("num_attention_heads"), content.get("hidden_size")
    # Checked before one is divided by the other, because a file of unknown origin may contain anything.
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
    # transformers' default for a Mixtral without this value is 1e6.
    theta = rope.get("rope_theta") if isinstance(rope, dict) else content.get("rope_theta", 1e6)
    if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"rope_type is {rope['rope_type']!r}; the included model has the default one only"
        )
    found = checked(
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
        },
        MoEConfig,
        name=CONFIG,
    )
    _require_mixtral(found)
    return found


def require_shape(config: MoEConfig, content: Mapping[str, Json]) -> None:
    """Refuse weights of another function than the run's model computes.

    Args:
        config: The model of the run.
        content: Content of the folder's ``config.json``.

    Raises:
        ConfigError: The message names every value that differs, as the training file must give it.
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


def require_weights(folder: Path, config: MoEConfig) -> None:
    """Refuse a folder that a run of this model cannot begin with, by its ``config.json``, before any rank starts.

    Raises:
        ConfigError: The weights are of a model of another shape; names each value.
        IntegrityError: A file is not of its format.
        StateError: A file is missing.
    """
    require_shape(config, read_config(folder))
    for name in names_of(folder):
        with opened_file(folder, name, "np"):
            pass  # its header states its length, which is compared with its size


@contextmanager
def opened_file(folder: Path, name: str, framework: Literal["np", "pt"]) -> "Iterator[safe_open]":
    """Open one of the files that contain the weights, to return arrays of numpy or tensors of torch.

    Raises:
        IntegrityError: It is no safetensors file, or truncated.
        StateError: It is missing.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- not needed by a user who only asks for help

    try:
        opened = safe_open(folder / name, framework=framework)
    except FileNotFoundError:
        raise StateError(f"{folder} has no {name}; give the folder of a whole model") from None
    except SafetensorError as error:
        raise IntegrityError(f"{folder / name} is no safetensors file: {error}") from error
    with opened as file:
        yield file


def read_config(folder: Path) -> JsonObject:
    """Return the content of a folder's ``config.json``.

    Raises:
        IntegrityError: It is no JSON object.
        StateError: It is missing.
    """
    return _json_of(folder / CONFIG)


def names_of(folder: Path) -> list[str]:
    """Return the names of the files that contain the weights."""
    names = [WEIGHTS]
    if (folder / _INDEX).exists():
        listed = _json_of(folder / _INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(
            # Not a path: the map comes from a folder of unknown origin, and must not lead to another folder.
            isinstance(name, str) and Path(name).name == name and name.endswith(_SUFFIX)
            for name in listed.values()
        ):
            raise IntegrityError(
                f"{folder / _INDEX}: weight_map does not name files of this folder"
            )
        # Each file once, because the map names a file for every weight in it.
        names = sorted({str(name) for name in listed.values()})
    return names


def _json_of(path: Path) -> JsonObject:
    try:
        content = json.loads(
            read_kept_file(path, most_bytes=_MOST_BYTES, what="a model's description")
        )
    except FileNotFoundError:
        raise StateError(f"{path.parent} has no {path.name}; give the folder of a model") from None
    except (ValueError, RecursionError) as error:  # for thousands of nested lists
        raise IntegrityError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise IntegrityError(f"{path} holds no object; give the folder of a model")
    return content


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
