"""How large a source is: exact record counts, and tokens estimated from a bounded sample.

Shape suffixes:
    R  records of a unit
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.mix.config import SourceConfig, TokenizerConfig
from omniload.source.distinct.mask import DistinctRecords, distinct_records
from omniload.source.formats.format import Format
from omniload.source.formats.opening import open_format
from omniload.source.index import IndexCache
from omniload.source.kept_profile import KeptProfile, keep
from omniload.source.parsing.image_cells import ENCODED
from omniload.source.stores.shard_cache import ShardCache
from omniload.source.transforms.opening import open_pipeline
from omniload.source.transforms.pipeline import Pipeline

__all__ = ["SourceProfile", "evenly", "profile"]

_UNIT_TEXT_BYTES = 1 << 20
_UNIT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProfile:
    """What a source holds."""

    name: str
    """Name in the mix file."""
    records: int
    """Records, counted."""
    shards: int
    """Files."""
    size_bytes: int
    """Bytes of the files, as stored."""
    sampled_records: int
    """Records that the estimates rest on."""
    tokens_per_record: float
    """Mean tokens of a record, estimated; one that gives no sample, is of another split or is left out counts as 0."""
    bad_records: int
    """Records of the sample that could not be decoded."""
    longest_tokens: int
    """Longest sampled record."""
    block_bytes: int
    """Memory of the largest block that is held decoded while reading, estimated from above."""
    preprocess_s_per_token: float = 0.0
    """Processor seconds of decoding and tokenising, as sampled."""

    @property
    def tokens(self) -> int:
        """Tokens of the source, estimated."""
        return round(self.records * self.tokens_per_record)

    @property
    def exact(self) -> bool:
        """Whether every record was sampled."""
        return self.sampled_records == self.records


def profile(  # noqa: PLR0913 -- what the file says, and how much of it
    name: str,
    config: SourceConfig,
    *,
    tokenizer: TokenizerConfig | None,
    base_dir: Path,
    cache_dir: Path | None = None,
    shard_cache: ShardCache | None = None,
    units: int = 4,
) -> SourceProfile:
    """Measure a source: its records exactly, its tokens from a few units.

    Units are taken evenly over the source, and records evenly over a unit, at most about
    a megabyte of text a unit; no randomness, so the same files give the same answer.

    Args:
        name: Its name in the mix file.
        config: What the file says of it.
        tokenizer: Tokenizer of the mix; needed when the source holds text.
        base_dir: Folder that relative paths start at.
        cache_dir: Folder that keeps the index, and what was measured for later starts.
        shard_cache: Where shards of stores are kept on this node; ``None`` reads them from their stores.
        units: Most units to decode.

    Raises:
        OmniloadError: As for ``open_source``; a record that cannot be decoded is counted.
    """
    cache = IndexCache(folder=cache_dir, source=name) if cache_dir else None
    opened = open_format(name, config, base_dir=base_dir, cache=cache, shard_cache=shard_cache)
    rows_U = opened.format.units().rows_U
    filled = np.flatnonzero(rows_U)
    if not len(filled):
        raise ConfigError(
            f"sources.{name}: {', '.join(config.paths)} holds no record; remove the source or add data"
        )
    pipeline = open_pipeline(name, config, tokenizer, base_dir)
    distinct = distinct_records(name, config, opened.format, opened.files, cache)
    chosen = filled[evenly(len(filled), units)]
    sampled = [_sample(opened.format, unit, pipeline, distinct) for unit in chosen.tolist()]
    lengths = np.concatenate([sample.lengths for sample in sampled])
    # A unit speaks for as many records as it holds, however many of them were tokenised.
    means = [float(sample.lengths.mean()) for sample in sampled]
    bytes_per_record = sum(s.decoded_bytes for s in sampled) / int(rows_U[chosen].sum())
    block_units = config.shuffle.units_together(len(filled))
    made = SourceProfile(
        name=name,
        records=int(rows_U.sum()),
        shards=len(opened.files),
        size_bytes=sum(file.size_bytes for file in opened.files),
        sampled_records=len(lengths),
        tokens_per_record=float(np.average(means, weights=rows_U[chosen])) * config.share_drawn,
        bad_records=sum(sample.bad for sample in sampled),
        longest_tokens=int(lengths.max(initial=0)),
        # From above: the shuffle may have the largest units meet in one block.
        block_bytes=round(int(np.sort(rows_U)[-block_units:].sum()) * bytes_per_record),
        # The first unit pays for what is loaded once, so the cheapest one speaks for all.
        preprocess_s_per_token=min(1.0, *(sample.preprocess_s_per_token for sample in sampled)),
    )
    _keep(made, cache_dir)
    return made


def _keep(made: SourceProfile, cache_dir: Path | None) -> None:
    if cache_dir is not None:
        costs = KeptProfile(
            preprocess_s_per_token=made.preprocess_s_per_token, block_bytes=made.block_bytes
        )
        keep(cache_dir, made.name, costs)


def evenly(count: int, wanted: int) -> NDArray[np.int64]:
    """Return at most ``wanted`` numbers below ``count``, in the middle of equal parts."""
    wanted = min(count, max(1, wanted))
    return (np.arange(wanted) * 2 + 1) * count // (2 * wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """Tokens of sampled records of a unit, how many of them are bad, and what the unit costs."""

    lengths: NDArray[np.int64]
    bad: int
    decoded_bytes: int
    preprocess_s_per_token: float


def _sample(
    record_format: Format, unit: int, pipeline: Pipeline, distinct: DistinctRecords | None
) -> _Sample:
    # What lies before the unit is another unit's work.
    record_format.reach(unit)
    began_s = time.thread_time()  # decoding and tokenising are work; waiting for a store is none
    records = record_format.read_unit(unit)
    decode_s = time.thread_time() - began_s
    column = records.column
    limit = _UNIT_TEXT_BYTES if pipeline.takes_text else _UNIT_TOKENS
    # Images are decoded with their text: their bytes count as its do.
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
    # All records of the unit were decoded, and a part of them was transformed.
    decode_s *= len(rows) / len(column)
    return _Sample(
        lengths=lengths,
        preprocess_s_per_token=(decode_s + transform_s) / tokens,
        bad=int(np.count_nonzero(bad_R)),
        decoded_bytes=sum(
            each.values_V.nbytes + each.offsets.nbytes
            for each in (column, *records.others.values())
        ),
    )
