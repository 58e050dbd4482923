"""Models in folders as Hugging Face writes them: ``config.json`` beside safetensors files. No pickle."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from omniload.base.errors import ConfigError, StateError, system_refusals
from omniload.mix.config import BpeTokenizer, TokenizerConfig
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
from trainer_integration.mixtral.names import from_mixtral, to_mixtral
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.model import MoETransformer
from trainer_integration.vision.model import VisionLanguageModel

__all__ = ["read_mixtral", "weights_of", "write_mixtral", "write_tokenizer"]


@system_refusals("the exported model")
def write_mixtral(
    model: MoETransformer, folder: Path, *, longest: int, end_of_document: int | None = None
) -> None:
    """Write a whole model so that ``MixtralForCausalLM.from_pretrained(folder)`` reads it.

    Args:
        model: One that no ranks share.
        folder: A new one, or an empty one.
        longest: Tokens of the longest context it was trained on.
        end_of_document: Token that ends a document, at which ``generate`` stops; ``None`` where none does.

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
    config = mixtral_config(model.config, longest=longest, end_of_document=end_of_document)
    folder.mkdir(parents=True, exist_ok=True)
    if held := sorted(path.name for path in folder.iterdir()):
        raise StateError(f"{folder} holds {held[:3]}; give a new folder")
    tensors = to_mixtral(model.state_dict(), model.config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).touch()
    # The library keeps the file to its owner; who may read the folder is decided as for every other file.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


@system_refusals("the exported model")
def write_tokenizer(config: TokenizerConfig, base_dir: Path, folder: Path) -> None:
    """Put the tokenizer beside the model, so that ``AutoTokenizer.from_pretrained(folder)`` reads it.

    Nothing is written of a tokenizer that has no file, bytes being their own token ids, nor of a file of ranks,
    which that reads for some models alone.

    Raises:
        ConfigError: Its file is no longer there.
    """
    if not isinstance(config, BpeTokenizer):
        return
    content = read_tokenizer(base_dir / config.path)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": config.end_of_document}
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2), encoding="utf-8")


def read_mixtral(folder: Path) -> MoETransformer:
    """Return the model in a folder that Hugging Face wrote, in one file or several, in float32.

    Raises:
        ConfigError: It is of another family, or uses what the included model has not.
        IntegrityError: A file is not what its kind is.
        StateError: A file or a weight is missing.
    """
    model = MoETransformer(model_config(read_config(folder)))
    model.take_weights(weights_of(folder, model.config))
    return model


def weights_of(folder: Path, config: MoEConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a folder with their names here: one is in memory at a time, as the folder has its type.

    Raises:
        IntegrityError: A file is not what its kind is.
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
            files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]
        yield _Stored(files)
