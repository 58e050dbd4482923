"""Models in folders as Hugging Face writes them: ``config.json`` beside safetensors files. No pickle."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from omniload.base.errors import ConfigError, IntegrityError, StateError, system_refusals
from omniload.base.reading import read_kept_file
from omniload.base.state import JsonObject
from trainer_integration.export.mixtral import (
    from_mixtral,
    mixtral_config,
    model_config,
    to_mixtral,
)
from trainer_integration.moe.model import MoETransformer
from trainer_integration.vision.model import VisionLanguageModel

__all__ = ["read_mixtral", "write_mixtral"]

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_BYTES = 16 << 20


@system_refusals("the exported model")
def write_mixtral(model: MoETransformer, folder: Path, *, longest: int) -> None:
    """Write a whole model so that ``MixtralForCausalLM.from_pretrained(folder)`` reads it.

    Args:
        model: One that no ranks share.
        folder: A new one, or an empty one.
        longest: Tokens of the longest context it was trained on.

    Raises:
        ConfigError: Mixtral cannot compute what it does.
        StateError: The folder holds files already.
    """
    assert model.peers.size == 1, "the experts of other ranks would be missing"
    if isinstance(model, VisionLanguageModel):
        raise ConfigError(
            "the run was trained on images, and Mixtral has no encoder for them; load its checkpoint into a "
            "trainer_integration.vision model"
        )
    config = mixtral_config(model.config, longest=longest)
    folder.mkdir(parents=True, exist_ok=True)
    if held := sorted(path.name for path in folder.iterdir()):
        raise StateError(f"{folder} holds {held[:3]}; give a new folder")
    tensors = to_mixtral(model.state_dict(), model.config)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def read_mixtral(folder: Path) -> MoETransformer:
    """Return the model in a folder that Hugging Face wrote, in one file or several, in float32.

    Raises:
        ConfigError: It is of another family, or uses what the included model has not.
        IntegrityError: A file is not what its kind is.
        StateError: A file or a weight is missing.
    """
    config = model_config(_json_of(folder / _CONFIG))
    model = MoETransformer(config)
    state = from_mixtral(_tensors_of(folder), config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model


def _tensors_of(folder: Path) -> dict[str, Tensor]:
    names = [_WEIGHTS]
    if (folder / _INDEX).exists():
        listed = _json_of(folder / _INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in listed.values()
        ):
            raise IntegrityError(
                f"{folder / _INDEX}: weight_map does not name files of this folder"
            )
        names = sorted({str(name) for name in listed.values()})
    found: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            found |= load_file(folder / name)
        except FileNotFoundError:
            raise StateError(f"{folder} has no {name}; give the folder of a whole model") from None
        except SafetensorError as error:
            raise IntegrityError(f"{folder / name} is no safetensors file: {error}") from error
    return found


def _json_of(path: Path) -> JsonObject:
    try:
        content = json.loads(
            read_kept_file(path, most_bytes=_MOST_BYTES, what="a model's description")
        )
    except FileNotFoundError:
        raise StateError(f"{path.parent} has no {path.name}; give the folder of a model") from None
    except ValueError as error:
        raise IntegrityError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise IntegrityError(f"{path} holds no object; give the folder of a model")
    return content
