"""What documents a source holds: their lengths and hashes, of a stated number of them or of all.

Shape suffixes:
    U  units        R  records of a unit        N  documents looked at
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.mix.config import SourceConfig, TokenizerConfig
from omniload.source.distinct.mask import DistinctRecords, distinct_records
from omniload.source.estimate import evenly
from omniload.source.formats.format import Format, Records
from omniload.source.formats.opening import open_format
from omniload.source.index import IndexCache
from omniload.source.survey.duplicates import hashes_of
from omniload.source.transforms.opening import open_pipeline
from omniload.source.transforms.pipeline import Pipeline

__all__ = ["Looked", "Survey", "open_survey"]

_MOST_UNITS = 16
"""Units that a sample is taken from: each is decoded whole."""
_READ_TOGETHER = 4096
"""Documents that are tokenised at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Some documents of a source."""

    lengths_N: NDArray[np.int64]
    """Tokens of each as it is trained on, before packing; 0 for a record that gives none, or that is left out."""
    hashes_N: NDArray[np.uint64]
    """Hash of the token ids of each that gives some."""
    bad: int
    """Records among them that could not be decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A source that is open to be looked at, once."""

    records: int
    """Records, counted."""
    wanted: int
    """Documents that will be looked at."""
    _format: Format
    _pipeline: Pipeline
    _distinct: DistinctRecords | None
    _rows: tuple[tuple[int, NDArray[np.int64]], ...]

    def looked(self) -> Iterator[Looked]:
        """Look at the documents, some thousands at a time.

        Raises:
            OmniloadError: A unit cannot be read; a record that cannot be decoded is counted.
        """
        for unit, rows_R in self._rows:
            records = self._format.read_unit(unit)
            usable_B = records.usable_B
            if self._distinct is not None:
                usable_B &= self._distinct.of_unit(unit)
            for start in range(0, len(rows_R), _READ_TOGETHER):
                rows = rows_R[start : start + _READ_TOGETHER]
                yield self._made(records, rows, rows[usable_B[rows]])

    def _made(
        self, records: Records, rows_R: NDArray[np.int64], usable_N: NDArray[np.int64]
    ) -> Looked:
        made = self._pipeline.of_records(records, usable_N)
        bad = int(np.count_nonzero(records.bad_B[rows_R]))
        if made.bad_N is not None:
            bad += int(np.count_nonzero(made.bad_N))
        lengths_N = made.tokens.lengths_N
        given = np.flatnonzero(lengths_N)
        left_out = np.count_nonzero(~records.bad_B[rows_R]) - len(usable_N)
        return Looked(
            lengths_N=np.concatenate((lengths_N, np.zeros(left_out, np.int64))),
            hashes_N=hashes_of(made.tokens.take(given)),
            bad=bad,
        )


def open_survey(
    name: str,
    config: SourceConfig,
    *,
    tokenizer: TokenizerConfig | None,
    base_dir: Path,
    cache_dir: Path | None = None,
    sample: int | None,
) -> Survey:
    """Open a source to look at its documents.

    Args:
        name: Its name in the mix file.
        config: What the file says of it.
        tokenizer: Tokenizer of the mix; needed when the source holds text.
        base_dir: Folder that relative paths start at.
        cache_dir: Folder that keeps the index.
        sample: Documents to look at, evenly over at most 16 units; ``None`` for all.

    Raises:
        OmniloadError: As for ``open_source``.
    """
    cache = IndexCache(folder=cache_dir, source=name) if cache_dir else None
    opened = open_format(name, config, base_dir=base_dir, cache=cache)
    rows_U = opened.format.units().rows_U
    if not rows_U.any():
        raise ConfigError(
            f"sources.{name}: {', '.join(config.paths)} holds no record; remove the source or add data"
        )
    rows = tuple(_chosen(rows_U, sample))
    return Survey(
        records=int(rows_U.sum()),
        wanted=sum(len(each) for _, each in rows),
        _format=opened.format,
        _pipeline=open_pipeline(name, config, tokenizer, base_dir),
        _distinct=distinct_records(name, config, opened.format, opened.files, cache),
        _rows=rows,
    )


def _chosen(
    rows_U: NDArray[np.int64], sample: int | None
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield units and the records of each to look at; the same for the same files."""
    filled = np.flatnonzero(rows_U)
    total = int(rows_U.sum())
    if sample is None or sample >= total:
        for unit in filled.tolist():
            yield unit, np.arange(rows_U[unit])
        return
    # Units of large numbers of records are chosen more often: each document has the same chance.
    ends = np.cumsum(rows_U)
    num_units = min(_MOST_UNITS, sample, len(filled))
    units = np.unique(np.searchsorted(ends, evenly(total, num_units), side="right"))
    ends_of_units = np.cumsum(rows_U[units])
    picked = evenly(int(ends_of_units[-1]), sample)
    starts = ends_of_units - rows_U[units]
    for unit, start, end in zip(units.tolist(), starts, ends_of_units, strict=True):
        yield unit, picked[(picked >= start) & (picked < end)] - start
