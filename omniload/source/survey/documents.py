"""The documents of a source: lengths and hashes of a sample or of all, and a histogram of lengths.

Lengths take bounded memory: they are counted in fine bins, from which quantiles are read.

Shape suffixes:
    U  units        R  records of a unit        N  surveyed documents        B  bins
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.columns import IMAGES
from omniload.mix.schema.records import Overlong
from omniload.source.distinct.drawn_before import drawn_before
from omniload.source.distinct.mask import DistinctRecords, distinct_records
from omniload.source.formats.format import Format, Records
from omniload.source.formats.opening import open_format
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import ShardCache
from omniload.source.survey.duplicates import hashes_of
from omniload.source.survey.spread import evenly
from omniload.source.survey.tag_shares import tags_counted
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.opening import open_pipeline
from omniload.source.transforms.pipeline import Pipeline

__all__ = ["LengthHistogram", "Looked", "Survey", "open_survey", "said_of_longer", "trained_on"]

_MOST_UNITS = 16
"""Most units that a sample is taken from, because each of them is decoded completely."""
_READ_TOGETHER = 4096
"""Documents that are tokenised at once."""
_BINS_A_DOUBLING = 16
"""Bins per doubling of length, so that a quantile is at most a 16th of a doubling, 5 %, too high."""
_DOUBLINGS = 32
# Lengths are integers, so bins of less than a token coincide.
_EDGES_B = np.unique(
    np.floor(2.0 ** (np.arange(_DOUBLINGS * _BINS_A_DOUBLING) / _BINS_A_DOUBLING)).astype(np.int64)
)
"""First length of each bin; short lengths have a bin each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Some documents of a source."""

    unit: int
    """Unit of the documents."""
    lengths_N: NDArray[np.int64]
    """Trained tokens of each document, before packing; 0 for a record that gives none, or that is left out.
    Documents with tokens come in their order."""
    hashes_N: NDArray[np.uint64]
    """Hash of the token ids of each document with tokens."""
    bad: int
    """Records among the documents that could not be decoded."""
    tags: Mapping[str, Ragged]
    """Tags of the first documents, without records that are left out. See ``tags_counted``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A source that is open for one survey."""

    records: int
    """Number of records, counted."""
    units: int
    """Units that have records."""
    wanted: int
    """Documents that will be surveyed."""
    behind: float
    """Share of the first epoch that another loader, or an earlier run, has drawn already; from 0 to below 1."""
    _format: Format
    _pipeline: Pipeline
    _distinct: DistinctRecords | None
    _rows: tuple[tuple[int, NDArray[np.int64]], ...]
    _tags: tuple[str, ...]

    def looked(self) -> Iterator[Looked]:
        """Yield the documents, some thousands at a time.

        Raises:
            OmniloadError: A unit cannot be read. A record that cannot be decoded is only counted.
        """
        for unit, rows_R in self._rows:
            records = self._format.read_unit(unit)
            # A new array at each access, so changes do not affect the unit.
            usable_B = records.usable_B
            if self._distinct is not None:
                usable_B &= self._distinct.of_unit(unit)
            for start in range(0, len(rows_R), _READ_TOGETHER):
                rows = rows_R[start : start + _READ_TOGETHER]
                # Some thousands at a time, because tokenising converts texts to Python strings.
                yield self._made(unit, records, rows, rows[usable_B[rows]])

    def _made(
        self, unit: int, records: Records, rows_R: NDArray[np.int64], usable_N: NDArray[np.int64]
    ) -> Looked:
        made = self._pipeline.of_records(records, usable_N)
        bad = int(np.count_nonzero(records.bad_B[rows_R]))
        if made.bad_N is not None:
            bad += int(np.count_nonzero(made.bad_N))
        lengths_N = made.tokens.lengths_N
        given = np.flatnonzero(lengths_N)
        # As in the plan, these count as records without tokens; bad records are counted separately.
        left_out = np.count_nonzero(~records.bad_B[rows_R]) - len(usable_N)
        return Looked(
            unit=unit,
            lengths_N=np.concatenate((lengths_N, np.zeros(left_out, np.int64))),
            hashes_N=_hashes_of(made, given),
            bad=bad,
            # Taken by record, because each document is made of one record, at the same place.
            tags={tag: records.others[tag].take(usable_N) for tag in self._tags},
        )


def _hashes_of(made: Samples, given: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of each sample: of its tokens and its images, whose tokens are the same for all images."""
    hashes = hashes_of(made.tokens.take(given))
    if (images := made.others.get(IMAGES)) is None:
        return hashes
    both = np.stack((hashes, hashes_of(images.take(given))), axis=1)
    return hashes_of(Ragged(values_V=both.reshape(-1), offsets=np.arange(len(both) + 1) * 2))


def open_survey(
    spec: SourceSpec, *, shard_cache: ShardCache | None = None, sample: int | None
) -> Survey:
    """Open a source to survey its documents.

    Args:
        spec: The source.
        shard_cache: Cache of remote shards on this node; ``None`` reads shards from their stores.
        sample: Documents to survey, evenly over at most 16 units; ``None`` for all.

    Raises:
        OmniloadError: As for ``open_source``.
    """
    opened = open_format(spec, shard_cache=shard_cache)
    records = opened.require_records(spec)
    rows_U = opened.format.units().rows_U
    before = drawn_before(spec, opened.format.units(), opened.files)
    rows = tuple(_chosen(rows_U, sample))
    return Survey(
        records=records,
        units=int(np.count_nonzero(rows_U)),
        wanted=sum(len(each) for _, each in rows),
        behind=0.0 if before is None else before.records / records,
        _format=opened.format,
        _pipeline=open_pipeline(spec.uncut),
        _distinct=distinct_records(spec, opened.format, opened.files),
        _rows=rows,
        _tags=tags_counted(spec.config.columns_read),
    )


def _chosen(
    rows_U: NDArray[np.int64], sample: int | None
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield units with the records of each to survey; the same for the same files."""
    filled = np.flatnonzero(rows_U)
    total = int(rows_U.sum())
    if sample is None or sample >= total:
        for unit in filled.tolist():
            yield unit, np.arange(rows_U[unit])
        return
    # Units with more records are chosen more often, so that each document has the same chance.
    ends = np.cumsum(rows_U)
    num_units = min(_MOST_UNITS, sample, len(filled))
    # Two places may be in one unit, which is read once.
    units = np.unique(np.searchsorted(ends, evenly(total, num_units), side="right"))
    ends_of_units = np.cumsum(rows_U[units])
    picked = evenly(int(ends_of_units[-1]), sample)
    starts = ends_of_units - rows_U[units]
    for unit, start, end in zip(units.tolist(), starts, ends_of_units, strict=True):
        yield unit, picked[(picked >= start) & (picked < end)] - start


class LengthHistogram:
    """Counts documents by length; documents without tokens are counted separately."""

    def __init__(self) -> None:
        self.documents = 0
        """Documents with at least one token."""
        self.empty = 0
        """Records without tokens."""
        self.tokens = 0
        self.longest = 0
        self._counts_B = np.zeros(len(_EDGES_B), np.int64)

    def add(self, lengths_N: NDArray[np.int64]) -> None:
        """Add lengths, each at least 0."""
        given = lengths_N[lengths_N > 0]
        self.empty += len(lengths_N) - len(given)
        self.documents += len(given)
        self.tokens += int(given.sum())
        self.longest = max(self.longest, int(given.max(initial=0)))
        bins = np.searchsorted(_EDGES_B, given, side="right") - 1
        self._counts_B += np.bincount(bins, minlength=len(_EDGES_B))

    @property
    def mean(self) -> float:
        """Mean tokens of a record, including records without tokens."""
        return self.tokens / max(self.documents + self.empty, 1)

    def quantile(self, part: float) -> int:
        """Return a length that ``part`` of the documents do not exceed; at most 5 % above the least such length."""
        if not self.documents:
            return 0
        at = int(np.searchsorted(np.cumsum(self._counts_B), part * self.documents))
        last = int(_EDGES_B[at + 1]) - 1 if at + 1 < len(_EDGES_B) else self.longest
        # The end of a bin may exceed every added length.
        return min(last, self.longest)

    def by_doubling(self) -> list[int]:
        """Return the number of documents with 1 token, 2 to 3, 4 to 7 and so on, up to the longest."""
        doubling_B = np.floor(np.log2(_EDGES_B)).astype(np.int64)
        counts = np.bincount(doubling_B, weights=self._counts_B).astype(np.int64)
        return [int(count) for count in counts[: self.longest.bit_length()]]


def said_of_longer(count: int, documents: str, length: int, overlong: Overlong = "refuse") -> str:
    """Say how many documents end a run or are left out by ``overlong``; empty for none, or if ``overlong`` cuts."""
    said = f"{count:,} of {documents} are longer than pack.length {length:,}, and overlong is {overlong}: "
    if not count or overlong not in ("drop", "refuse"):
        return ""
    if overlong == "drop":
        return f"{said}they are left out; use longer rows, or overlong: split where they may be cut"
    remedy = "leave them out (overlong: drop, or a filter by max_tokens), or use longer rows"
    return f"{said}the run ends once it would draw one; {remedy}"


def trained_on(lengths_N: NDArray[np.int64], length: int, overlong: Overlong) -> NDArray[np.int64]:
    """Return the trained tokens of each document with rows of ``length``, by the policy for overlong documents."""
    if overlong == "truncate":
        return np.minimum(lengths_N, length)
    if overlong == "drop":
        return np.where(lengths_N > length, 0, lengths_N)
    return lengths_N
