"""The size of a source: exact record counts, and tokens estimated from a bounded sample.

Shape suffixes:
    R  records of a unit
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.schema.records import ShuffleConfig
from omniload.source.distinct.drawn_before import drawn_before
from omniload.source.distinct.mask import DistinctRecords, distinct_records
from omniload.source.formats.format import Format
from omniload.source.formats.opening import open_format
from omniload.source.kept_profile import KeptProfile, keep
from omniload.source.parsing.image_cells import ENCODED
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import ShardCache
from omniload.source.survey.spread import Differences, Spread, evenly
from omniload.source.transforms.opening import open_pipeline
from omniload.source.transforms.pipeline import Pipeline

__all__ = ["SourceProfile", "profile"]

_UNIT_TEXT_BYTES = 1 << 20
_UNIT_TOKENS = 1 << 20
_UNITS_OF_RARE = 256
"""Units to look at where few records give a sample."""
_OUTLIES = 2.0
"""Ratio to the median from which a unit gets its own sample, because a document in it is far longer than others."""
_FEWEST = 2
"""Fewest places for an estimate of their differences."""
_STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
_STUDENT_OF_MORE = 2.57
"""Student's t by the places minus one: with few places, this many standard errors cover 19 of 20 cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProfile:
    """The content of a source."""

    name: str
    """Name in the mix file."""
    records: int
    """Number of records, counted."""
    shards: int
    """Number of files."""
    size_bytes: int
    """Size of the files as stored."""
    sampled_records: int
    """Number of records that the estimates are based on."""
    tokens_per_record: float
    """Mean tokens of a record, estimated; one that gives no sample, is of another split or is left out counts as 0."""
    samples_per_record: float = 1.0
    """Part of the records that give a sample, estimated likewise."""
    varies: float = 0.0
    """Standard deviation of the tokens of sampled records, divided by their mean."""
    behind: float = 0.0
    """Share of the records that ``drawn_before`` leaves out of the first epoch."""
    bad_records: int
    """Sampled records that could not be decoded."""
    longest_tokens: int
    """Tokens of the longest sampled record."""
    units: int = 1
    """Units that have records."""
    between: float = 0.0
    """Share of the variance of records' tokens between the sampled places; near 1 if files are sorted."""
    along: float = 0.0
    """Share of it that depends on the place of a record within these places; near 1 if each place is sorted alike."""
    tokens_error: float | None = None
    """Half width of the 19-in-20 interval of the tokens, relative to the tokens.

    It follows from the differences between the sampled places and their records. 0 if all records were sampled;
    ``None`` for a single place, which allows no estimate.
    """
    block_bytes: int
    """Upper estimate of the memory of the largest decoded block while reading."""
    preprocess_s_per_token: float = 0.0
    """Processor seconds of decoding and tokenising one token, from the sample."""

    @property
    def tokens(self) -> int:
        """Estimated tokens of the source."""
        return round(self.records * self.tokens_per_record)

    @property
    def differences(self) -> Differences:
        """Known differences of lengths."""
        return Differences(units=self.units, between=self.between, along=self.along)

    @property
    def exact(self) -> bool:
        """Whether every record was sampled."""
        return self.sampled_records == self.records


def profile(
    spec: SourceSpec, *, shard_cache: ShardCache | None = None, units: int = 4
) -> SourceProfile:
    """Measure a source: its records exactly, and its tokens from a few units.

    Units are taken evenly, with one far larger than others, and records evenly over each; no randomness. What was
    sampled speaks for bytes where the format counts them and there are no images, and else for records. Where those
    give no sample, as under conditions that few records meet, up to 256 units are looked at.

    Args:
        spec: The source; what was measured is kept with its index, for later starts.
        shard_cache: Where shards of stores are kept on this node; ``None`` reads them from their stores.
        units: Most units to decode where they give a sample.

    Raises:
        OmniloadError: As for ``open_source``.
    """
    name, config = spec.name, spec.config
    opened = open_format(spec, shard_cache=shard_cache)
    records = opened.require_records(spec)
    rows_U = opened.format.units().rows_U
    filled = np.flatnonzero(rows_U)
    before = drawn_before(spec, opened.format.units(), opened.files)
    pipeline = open_pipeline(spec.uncut)
    distinct = distinct_records(spec, opened.format, opened.files)
    extents_U = None if pipeline.takes_images else _extents_U(opened.format)

    def sample(wanted: int) -> tuple[NDArray[np.int64], list[_Sample]]:
        at = _chosen(filled, extents_U, wanted)
        return at, [_sample(opened.format, unit, pipeline, distinct) for unit in at.tolist()]

    chosen, sampled = sample(units)
    if not any(each.lengths.any() for each in sampled):
        chosen, sampled = sample(max(units, _UNITS_OF_RARE))
    lengths = np.concatenate([each.lengths for each in sampled])
    tokens, error = _estimated(sampled, rows_U, extents_U, chosen)
    spread = Spread.of([sample.lengths for sample in sampled])
    files = opened.files
    made = SourceProfile(
        name=name,
        records=records,
        shards=len(files),
        size_bytes=sum(file.size_bytes for file in files),
        sampled_records=len(lengths),
        tokens_per_record=tokens / records * config.share_drawn,
        samples_per_record=float((lengths > 0).mean()) * config.share_drawn,
        varies=float(lengths.std()) / max(float(lengths.mean()), 1e-9),
        behind=0.0 if before is None else before.records / records,
        units=len(filled),
        between=spread.between,
        along=spread.along,
        tokens_error=0.0 if len(lengths) == records else error,
        bad_records=sum(each.bad for each in sampled),
        longest_tokens=int(lengths.max(initial=0)),
        block_bytes=_block_bytes(sampled, rows_U, chosen, config.shuffle, len(filled)),
        preprocess_s_per_token=min(1.0, *(s.preprocess_s_per_token for s in sampled)),
    )
    _keep(made, spec.cache_dir)
    return made


def _keep(made: SourceProfile, cache_dir: Path | None) -> None:
    if cache_dir is not None:
        costs = KeptProfile(
            preprocess_s_per_token=made.preprocess_s_per_token, block_bytes=made.block_bytes
        )
        keep(cache_dir, made.name, costs)


def _block_bytes(
    sampled: Sequence["_Sample"],
    rows_U: NDArray[np.int64],
    chosen: NDArray[np.int64],
    shuffle: ShuffleConfig,
    filled: int,
) -> int:
    """Return an upper estimate of a block's decoded bytes, because the shuffle may put the largest units together."""
    # A unit in which no record meets the conditions may not be decoded at all, and a block of others is larger.
    given_C = np.asarray([bool(sample.lengths.any()) for sample in sampled])
    given_C |= not given_C.any()
    decoded_C = np.asarray([sample.decoded_bytes for sample in sampled])
    bytes_per_record = int(decoded_C[given_C].sum()) / int(rows_U[chosen][given_C].sum())
    return round(int(np.sort(rows_U)[-shuffle.units_together(filled) :].sum()) * bytes_per_record)


def _extents_U(record_format: Format) -> NDArray[np.int64] | None:
    """Return the bytes of each unit, ``[U]``; ``None`` if the units of the format are no ranges of bytes."""
    units = record_format.units()
    return units.stops_U - units.starts_U if record_format.units_are_bytes else None


def _chosen(
    filled: NDArray[np.int64], extents_U: NDArray[np.int64] | None, wanted: int
) -> NDArray[np.int64]:
    """Return the units to sample: evenly chosen, plus one that has far more bytes than others."""
    chosen = filled[evenly(len(filled), wanted)]
    if extents_U is None:
        return chosen
    largest = int(filled[extents_U[filled].argmax()])
    outlies = extents_U[largest] > _OUTLIES * np.median(extents_U[filled])
    return np.unique([*chosen, largest]) if outlies else chosen


def _estimated(
    sampled: Sequence["_Sample"],
    rows_U: NDArray[np.int64],
    extents_U: NDArray[np.int64] | None,
    chosen: NDArray[np.int64],
) -> tuple[float, float | None]:
    """Return the estimated tokens of all units, and ``SourceProfile.tokens_error``."""
    tokens_C, rows_C = np.asarray([each.tokens for each in sampled]), rows_U[chosen]
    if extents_U is None:
        sizes_C, rest = rows_C.astype(np.float64), float(rows_U.sum() - rows_C.sum())
    else:
        sizes_C = np.asarray([float(each.text_bytes) for each in sampled])
        # Bytes of a record apart from its text: keys, quotes, other fields.
        beside = (float(extents_U[chosen].sum()) - sizes_C.sum()) / rows_C.sum()
        left = float(extents_U.sum() - extents_U[chosen].sum())
        rest = max(0.0, left - beside * float(rows_U.sum() - rows_C.sum()))
        # A unit that is far larger than others represents only itself.
        alike = extents_U[chosen] <= _OUTLIES * np.median(extents_U[chosen])
        tokens, tokens_C, sizes_C = tokens_C.sum(), tokens_C[alike], sizes_C[alike]
        if not sizes_C.sum():
            return float(tokens), None if rest else 0.0
        rate = tokens_C.sum() / sizes_C.sum()
        whole = float(tokens + rate * rest)
        return whole, _error_of(tokens_C, sizes_C, rest, whole)
    rate = tokens_C.sum() / sizes_C.sum()
    whole = float(tokens_C.sum() + rate * rest)
    error = _error_of(tokens_C, sizes_C, rest, whole)
    if error is None:
        return whole, None
    # A few places may agree by chance, so the error is at least that of as many records, which vary like these.
    lengths, records = np.concatenate([each.lengths for each in sampled]), int(rows_U.sum())
    part = 1 - len(lengths) / records
    of_records = float(lengths.std(ddof=1)) / math.sqrt(len(lengths)) * part * records / whole
    return whole, max(error, of_records)


def _error_of(
    tokens_C: NDArray[np.float64], sizes_C: NDArray[np.float64], rest: float, whole: float
) -> float | None:
    """Return the relative half width of a ratio estimate (Cochran, "Sampling Techniques", 6.4)."""
    count = len(tokens_C)
    if count < _FEWEST or not whole:
        return None
    off_C = tokens_C - tokens_C.sum() / sizes_C.sum() * sizes_C
    spread = float(np.sqrt((off_C**2).sum() / (count - 1) / count)) / float(sizes_C.mean())
    return _STUDENT.get(count - 1, _STUDENT_OF_MORE) / 2 * spread * rest / whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """Tokens of sampled records of a unit, the number of bad ones, and the cost of the unit."""

    lengths: NDArray[np.int64]
    tokens: float
    """Estimated tokens of all records of the unit."""
    text_bytes: int
    """Decoded bytes of all records of the unit."""
    bad: int
    decoded_bytes: int
    preprocess_s_per_token: float


def _sample(
    record_format: Format, unit: int, pipeline: Pipeline, distinct: DistinctRecords | None
) -> _Sample:
    # The data before the unit is the work of another unit.
    record_format.reach(unit)
    began_s = time.thread_time()  # waiting for a store is no work, unlike decoding and tokenising
    records = record_format.read_unit(unit)
    decode_s = time.thread_time() - began_s
    column = records.column
    limit = _UNIT_TEXT_BYTES if pipeline.takes_text else _UNIT_TOKENS
    # Images are decoded with their text, so their bytes count as well.
    encoded = records.others.get(ENCODED)
    values = len(column.values_V) + (0 if encoded is None else len(encoded.values_V))
    mean = max(1.0, values / len(column))
    rows = evenly(len(column), int(limit / mean))
    bad_R = records.bad_B[rows]
    usable_B = records.usable_B
    if distinct is not None:
        usable_B &= distinct.of_unit(unit)
    good = np.flatnonzero(usable_B[rows])
    samples = pipeline.of_records(records, rows[good])
    lengths = np.zeros(len(rows), np.int64)
    lengths[good] = samples.tokens.lengths_N
    if samples.bad_N is not None:
        bad_R[good] = samples.bad_N
    tokens = max(1, int(lengths.sum()))
    transform_s = time.thread_time() - began_s - decode_s
    # All records of the unit were decoded, but only a part of them was transformed.
    decode_s *= len(rows) / len(column)
    return _Sample(
        lengths=lengths,
        tokens=_tokens_of_unit(
            lengths,
            column,
            rows,
            by_bytes=pipeline.takes_text and not pipeline.takes_images,
        ),
        text_bytes=len(column.values_V),
        preprocess_s_per_token=(decode_s + transform_s) / tokens,
        bad=int(np.count_nonzero(bad_R)),
        decoded_bytes=sum(
            each.values_V.nbytes + each.offsets.nbytes
            for each in (column, *records.others.values())
        ),
    )


def _tokens_of_unit(
    lengths: NDArray[np.int64], column: Ragged, rows: NDArray[np.int64], *, by_bytes: bool
) -> float:
    """Return the tokens of a unit from sampled records, scaled by bytes of text or by the number of records."""
    sampled_bytes = int(column.lengths_N[rows].sum())
    part = (
        sampled_bytes / len(column.values_V)
        if by_bytes and sampled_bytes
        else len(rows) / len(column)
    )
    return float(lengths.sum()) / part
