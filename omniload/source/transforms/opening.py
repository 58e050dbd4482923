"""From what a mix file says of a source to what makes its records samples."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from omniload.base.errors import ConfigError
from omniload.mix.config import SourceConfig, TokenizerConfig
from omniload.mix.schema.transforms import (
    ChatTransform,
    ClampTransform,
    FilterTransform,
    TransformConfig,
)
from omniload.source.tokenize import folder_of, open_tokenizer
from omniload.source.transforms.chat import ChatEncoder
from omniload.source.transforms.lengths import clamped, filtered
from omniload.source.transforms.samples import Encoder, PlainEncoder, Samples
from omniload.source.transforms.template import ChatTemplate, TemplateFiles, read_template

__all__ = ["Pipeline", "open_pipeline"]


class Pipeline:
    """Makes records samples: an encoder where they are text, then transforms in the order of the file."""

    def __init__(
        self, encoder: Encoder | None, transforms: Sequence[TransformConfig], digest: str = ""
    ) -> None:
        self._encoder, self._transforms = encoder, transforms
        self.digest = digest
        """Digest of the files that transforms read; empty where they read none."""

    @property
    def takes_text(self) -> bool:
        """Whether records are text."""
        return self._encoder is not None

    def of_texts(self, texts: pa.Array) -> Samples:
        """Return the samples of records of text."""
        assert self._encoder is not None, "records of this source are token ids"
        return self.of(self._encoder.encode(texts))

    def of(self, samples: Samples) -> Samples:
        """Return the samples of records that are token ids."""
        for config in self._transforms:
            match config:
                case ClampTransform():
                    samples = clamped(samples, config)
                case FilterTransform():
                    samples = filtered(samples, config)
                case ChatTransform():
                    pass  # the encoder
        return samples


def open_pipeline(
    name: str, config: SourceConfig, tokenizer: TokenizerConfig | None, base_dir: Path
) -> Pipeline:
    """Open the tokenizer, and the files that transforms read.

    Raises:
        ConfigError: There is no tokenizer for text, or a file is missing or damaged.
    """
    if not config.holds_text:
        return Pipeline(None, config.transforms)
    if tokenizer is None:
        raise ConfigError(f"sources.{name} holds text and there is no tokenizer; add a tokenizer")
    opened = open_tokenizer(tokenizer, base_dir)
    chat = config.transforms[0] if config.transforms else None
    if not isinstance(chat, ChatTransform):
        return Pipeline(PlainEncoder(opened), config.transforms)
    try:
        files = read_template(
            base_dir / chat.template if chat.template else None, folder_of(tokenizer, base_dir)
        )
        template = ChatTemplate(files, date=chat.date)
    except ConfigError as error:
        error.add_note(f"transforms of sources.{name}")
        raise
    encoder = ChatEncoder(template, opened, chat.loss)
    return Pipeline(encoder, config.transforms, _digest_of(files))


def _digest_of(files: TemplateFiles) -> str:
    tokens = "\0".join(f"{key}={value}" for key, value in sorted(files.tokens.items()))
    return hashlib.blake2b(f"{files.source}\0{tokens}".encode(), digest_size=6).hexdigest()
