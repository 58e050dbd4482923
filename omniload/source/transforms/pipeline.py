"""From records to samples: an encoder where they are text, then transforms in the order of the mix file.

Shape suffixes:
    N  records, each a sample or none        K  records that a function of text kept
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.columns import NO_COLUMNS
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
from omniload.source.columns import as_binary, take, text_array
from omniload.source.formats.format import Records
from omniload.source.transforms.images import ImageEncoder
from omniload.source.transforms.mapping import MapFunction, spread
from omniload.source.transforms.middle import MiddleFiller
from omniload.source.transforms.samples import (
    Encoder,
    Samples,
    clamped,
    cut_to_rows,
    filtered,
)

__all__ = ["Pipeline"]


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
                    # Each function sees what the one before it left: its rows are rows of those.
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
        # Lengths are asked for: of further columns images alone decide them.
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
