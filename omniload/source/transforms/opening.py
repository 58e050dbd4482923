"""From what a mix file says of a source to what makes its records samples."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.mix.columns import NO_COLUMNS
from omniload.mix.config import SourceConfig, TokenizerConfig
from omniload.mix.schema.transforms import (
    ChatTransform,
    ClampTransform,
    FilterTransform,
    ImagesTransform,
    MapTransform,
    MiddleTransform,
    PreferenceTransform,
    TransformConfig,
    encoding_of,
    is_of_text,
)
from omniload.source.byte_pairs.files import folder_of
from omniload.source.columns import as_binary, take, text_array
from omniload.source.formats.format import Records
from omniload.source.tokenize import Tokenizer, open_tokenizer
from omniload.source.transforms.conversations import ChatEncoder, PreferenceEncoder
from omniload.source.transforms.images import ImageEncoder
from omniload.source.transforms.mapping import MapFunction, spread
from omniload.source.transforms.middle import MiddleFiller
from omniload.source.transforms.samples import (
    Encoder,
    PlainEncoder,
    Samples,
    clamped,
    cut_to_rows,
    filtered,
)
from omniload.source.transforms.template import ChatTemplate, TemplateFiles, read_template

__all__ = ["Pipeline", "open_pipeline"]


class Pipeline:
    """Makes records samples: an encoder where they are text, then transforms in the order of the file."""

    def __init__(
        self,
        encoder: Encoder | ImageEncoder | None,
        transforms: Sequence[TransformConfig],
        digest: str = "",
        row_length: int | None = None,
    ) -> None:
        self._encoder, self._transforms = encoder, transforms
        first = encoding_of(transforms)
        self._images = first if isinstance(first, ImagesTransform) else None
        self._fillers: dict[MiddleTransform, MiddleFiller] = {}
        self._functions: tuple[MapFunction | None, ...] = (None,) * len(transforms)
        self._row_length = row_length
        self.digest = digest
        """Digest of the files and libraries that transforms depend on, and whose functions they call; empty where they
        depend on nothing."""

    @property
    def takes_text(self) -> bool:
        """Whether records are text."""
        return self._encoder is not None

    def with_fillers(self, fillers: Mapping[MiddleTransform, MiddleFiller]) -> Self:
        """Return the pipeline with what its transforms of type ``fim`` are done by."""
        self._fillers.update(fillers)
        return self

    def with_functions(self, functions: Sequence[MapFunction | None]) -> Self:
        """Return the pipeline with the functions of its transforms of type ``map``, ``None`` for the others."""
        self._functions = tuple(functions)
        called = [each.identity for each in self._functions if each is not None]
        self.digest = ", ".join((*([self.digest] if self.digest else []), *called))
        return self

    def of_texts(
        self,
        texts: pa.Array,
        others: Mapping[str, Ragged] = NO_COLUMNS,
        positions_N: NDArray[np.int64] | None = None,
    ) -> Samples:
        """Return the samples of records of text, which have further columns ``others``; see ``of``."""
        return self.of(self.encoded(texts, others), positions_N)

    def encoded(self, texts: pa.Array, others: Mapping[str, Ragged] = NO_COLUMNS) -> Samples:
        """Return the samples of records of text before any transform of tokens: they depend on the text alone."""
        count, rows_K = len(texts), None
        for config, function in zip(self._transforms, self._functions, strict=True):
            if function is not None and is_of_text(config):
                texts, left = function.of_texts(texts)
                if left is not None:
                    rows_K = left if rows_K is None else rows_K[left]
        if rows_K is None:
            return self._encoded(texts, others)
        others = {name: column.take(rows_K) for name, column in others.items()}
        return spread(self._encoded(texts, others), rows_K, count)

    def _encoded(self, texts: pa.Array, others: Mapping[str, Ragged]) -> Samples:
        assert self._encoder is not None, "records of this source are token ids"
        if isinstance(self._encoder, ImageEncoder):
            return self._encoder.encode(texts, others)
        made = self._encoder.encode(texts)
        return replace(made, others={**others, **made.others}) if others else made

    def of_records(self, records: Records, rows_N: NDArray[np.int64]) -> Samples:
        """Return the samples of some records of a unit, with what is needed to make them alone."""
        column = records.column
        taken = take(as_binary(column), rows_N, column.values_V.dtype)
        if not self.takes_text:
            return self.of(Samples(tokens=taken))
        needed = records.others if isinstance(self._encoder, ImageEncoder) else NO_COLUMNS
        others = {
            name: take(as_binary(other), rows_N, other.values_V.dtype)
            for name, other in needed.items()
        }
        return self.of_texts(text_array(taken), others)

    def of(self, samples: Samples, positions_N: NDArray[np.int64] | None = None) -> Samples:
        """Return the samples of records that are token ids.

        Args:
            samples: The records.
            positions_N: Where they stand in the source; ``None`` for an estimate, to which that is all one.
        """
        for config, function in zip(self._transforms, self._functions, strict=True):
            match config:
                case ClampTransform():
                    samples = clamped(samples, config, self._images)
                case FilterTransform():
                    samples = filtered(samples, config, self._images)
                case MiddleTransform():
                    places_N = (
                        np.arange(len(samples.tokens)) if positions_N is None else positions_N
                    )
                    samples = self._fillers[config].of(samples, places_N)
                case MapTransform(of="tokens"):
                    assert function is not None, "it was opened"
                    samples = function.of_samples(samples)
                case ChatTransform() | PreferenceTransform() | ImagesTransform() | MapTransform():
                    pass  # the encoder, or before it
        return samples

    def cut(self, samples: Samples) -> tuple[Samples, NDArray[np.int64], NDArray[np.int32]] | None:
        """Return samples with images cut to rows, as ``cut_to_rows`` does; ``None`` where nothing is cut."""
        if self._row_length is None or self._images is None:
            return None
        return cut_to_rows(samples, self._row_length, self._images)


def open_pipeline(
    name: str,
    config: SourceConfig,
    tokenizer: TokenizerConfig | None,
    base_dir: Path,
    row_length: int | None = None,
    seed: int = 0,
) -> Pipeline:
    """Open the tokenizer, and the files that transforms read.

    Args:
        name: Name of the source.
        config: What the mix file says of it.
        tokenizer: Tokenizer of the mix.
        base_dir: Folder that relative paths start at.
        row_length: Tokens of a row, which samples with images are cut to; ``None`` leaves them whole.
        seed: Seed of the mix; all one to an estimate.

    Raises:
        ConfigError: There is no tokenizer for text, or a file is missing or damaged, or a token or a function is
            unknown.
    """
    pipeline = _opened(name, config, tokenizer, base_dir, row_length)
    if any(isinstance(each, MapTransform) for each in config.transforms):
        pipeline = pipeline.with_functions(
            [
                MapFunction(name, each) if isinstance(each, MapTransform) else None
                for each in config.transforms
            ]
        )
    filling = [each for each in config.transforms if isinstance(each, MiddleTransform)]
    opened = open_tokenizer(tokenizer, base_dir) if tokenizer is not None and filling else None
    return pipeline.with_fillers(
        {each: _filler(name, config, each, opened, seed) for each in filling}
    )


def _opened(
    name: str,
    config: SourceConfig,
    tokenizer: TokenizerConfig | None,
    base_dir: Path,
    row_length: int | None,
) -> Pipeline:
    if not config.holds_text:
        return Pipeline(None, config.transforms)
    if tokenizer is None:
        raise ConfigError(f"sources.{name} holds text and there is no tokenizer; add a tokenizer")
    opened = open_tokenizer(tokenizer, base_dir)
    first = encoding_of(config.transforms)
    if isinstance(first, ImagesTransform):
        images = ImageEncoder(first, opened, row_length)
        digest = hashlib.blake2b(images.library.encode(), digest_size=6).hexdigest()
        return Pipeline(images, config.transforms, digest, row_length)
    folder = base_dir, folder_of(tokenizer, base_dir)
    if isinstance(first, PreferenceTransform):
        return _of_pairs(name, config, first, opened, folder=folder)
    if isinstance(first, ChatTransform):
        return _of_chat(name, config, first, opened, folder=folder)
    return Pipeline(PlainEncoder(opened), config.transforms)


def _of_chat(
    name: str,
    config: SourceConfig,
    chat: ChatTransform,
    opened: Tokenizer,
    *,
    folder: tuple[Path, Path],
) -> Pipeline:
    template, digest = _template_of(name, chat, folder)
    return Pipeline(ChatEncoder(template, opened, chat.loss), config.transforms, digest)


def _of_pairs(
    name: str,
    config: SourceConfig,
    pairs: PreferenceTransform,
    opened: Tokenizer,
    *,
    folder: tuple[Path, Path],
) -> Pipeline:
    chosen: str = getattr(config, "column", None) or getattr(config, "text")  # noqa: B009 -- by type of source
    if pairs.form == "text":
        return Pipeline(PreferenceEncoder(pairs, chosen, None, opened), config.transforms)
    template, digest = _template_of(name, pairs, folder)
    return Pipeline(PreferenceEncoder(pairs, chosen, template, opened), config.transforms, digest)


def _template_of(
    name: str, config: ChatTransform | PreferenceTransform, folder: tuple[Path, Path]
) -> tuple[ChatTemplate, str]:
    """Return the template that a transform names, compiled, and its digest."""
    base_dir, beside = folder
    try:
        files = read_template(base_dir / config.template if config.template else None, beside)
        return ChatTemplate(files, date=config.date), _digest_of(files)
    except ConfigError as error:
        error.add_note(f"transforms of sources.{name}")
        raise


def _filler(
    name: str,
    config: SourceConfig,
    transform: MiddleTransform,
    tokenizer: Tokenizer | None,
    seed: int,
) -> MiddleFiller:
    """Find the tokens of a transform in the vocabulary.

    Raises:
        ConfigError: One is not there.
    """
    marks = []
    size = 0 if tokenizer is None else tokenizer.vocab_size
    for key in ("prefix", "suffix", "middle"):
        mark: str | int = getattr(transform, key)
        found = (
            mark if isinstance(mark, int) else None if tokenizer is None else tokenizer.id_of(mark)
        )
        if found is None or (tokenizer is not None and found >= size):
            has = (
                "there is no tokenizer" if tokenizer is None else f"the tokenizer has {size} others"
            )
            raise ConfigError(
                f"sources.{name}.transforms: fim: {key} is {mark!r}, and {has}; name a token of the vocabulary, "
                "or its id"
            )
        marks.append(found)
    end = getattr(config, "end_of_document", None)
    if end is None and tokenizer is not None:
        end = tokenizer.end_of_document_id
    return MiddleFiller(
        rate=transform.rate,
        spm=transform.spm,
        marks=marks,
        end=end,
        key=MiddleFiller.key_of(seed, name),
    )


def _digest_of(files: TemplateFiles) -> str:
    tokens = "\0".join(f"{key}={value}" for key, value in sorted(files.tokens.items()))
    return hashlib.blake2b(f"{files.source}\0{tokens}".encode(), digest_size=6).hexdigest()
