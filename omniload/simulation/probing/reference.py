"""A small plane whose processor time is known but for its messages: light sources, one rank, one constructor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omniload.actors.plane import PlaneSpec
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.job import Job
from omniload.simulation.profile import Profile

__all__ = ["Reference", "lengths_of"]

_VOCABULARY = 32_000
_CORPUS_TOKENS, _MOST_GROUP_ROWS = 2 << 20, 500
_MOST_SOURCES = 32
_FEW_TOKENS, _MANY_TOKENS = 8 << 10, 64 << 10
"""Of a step, a row at least: of few, messages are most of what it takes, of many their bytes tell."""
_FEW_STEPS = 8
"""Of a window of which batches tell that are not there."""
_LENGTHS_OF_A_SOURCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What of a job is kept: messages are as finely divided as the job's."""

    lengths: tuple[int, ...]
    """Tokens of samples, over and over."""
    sources: int
    group_rows: int
    """Samples of a unit, by which blocks are as long as the job's."""
    row_length: int
    tokens: int
    """Of a step."""
    steps_ahead: int = 0
    """Twice the steps of a window; 0 has as many as fit."""

    @classmethod
    def few(cls, job: Job, profile: Profile) -> "Reference":
        """Return that of a job, of few tokens a step."""
        return cls._of(job, profile, _FEW_TOKENS)

    @classmethod
    def short(cls, job: Job, profile: Profile) -> "Reference":
        """Return the same with fewer steps a window, and so fewer batches a message."""
        return replace(cls.few(job, profile), steps_ahead=2 * _FEW_STEPS)

    @classmethod
    def many(cls, job: Job, profile: Profile) -> "Reference":
        """Return that of a job, of many tokens a step."""
        return cls._of(job, profile, _MANY_TOKENS)

    @classmethod
    def _of(cls, job: Job, profile: Profile, tokens: int) -> "Reference":
        """Return one of so many tokens a step, or a row; sources beyond some are left out."""
        length = job.spec.mix.pack.length
        return cls(
            lengths=lengths_of(profile, length),
            sources=min(_MOST_SOURCES, len(job.originals)),
            group_rows=_group_rows(profile),
            row_length=length,
            tokens=max(1, tokens // length) * length,
        )

    def written(self, folder: Path) -> PlaneSpec:
        """Write what is read, and return the plane that reads it."""
        _write_samples(folder / "samples.parquet", self.lengths, self.group_rows)
        source = {"type": "parquet", "path": "samples.parquet", "tokens": "tokens"}
        names = [f"s{number:02}" for number in range(self.sources)]
        content: dict[str, Any] = {
            "version": 1,
            "seed": 1,
            "sources": dict.fromkeys(names, source),
            "mix": {
                "stop": "never",
                # Else all sources come to their next block in the same step.
                "stages": [{"from_step": 0, "weights": {n: 16 + k for k, n in enumerate(names)}}],
            },
            "pack": {"length": self.row_length},
            "batch": {"tokens": self.tokens, "micro_tokens": self.tokens},
            "loader": {"readers": dict.fromkeys(names, 1)},
            "runtime": {
                "kind": "ray",
                "loaders": 1,
                "constructors": 1,
                "prefetch_steps": self.steps_ahead,
            },
        }
        return PlaneSpec(
            mix=MixConfig.model_validate(content),
            base_dir=folder,
            tree=ClientPlaceTree.of(dp=1),
            cache_dir=folder,
        )


def lengths_of(profile: Profile, most: int) -> tuple[int, ...]:
    """Return tokens of samples of every source, those of more than ``most`` cut."""
    found = [costs.lengths[:_LENGTHS_OF_A_SOURCE] for costs in profile.sources.values()]
    return tuple(min(length, most) for lengths in found for length in lengths)


def _group_rows(profile: Profile) -> int:
    rows = [costs.block_positions // costs.block_units for costs in profile.sources.values()]
    return max(1, min(_MOST_GROUP_ROWS, round(median(rows))))


def _write_samples(path: Path, lengths: Sequence[int], group_rows: int) -> None:
    """Write samples of tokens of which the n-th comes about 1/n as often as the first."""
    repeats = max(1, _CORPUS_TOKENS // sum(lengths))
    lengths_N = np.tile(np.asarray(lengths, np.int32), repeats)
    offsets = np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int32)))
    rng = np.random.default_rng(0)
    tokens = (_VOCABULARY ** rng.random(int(offsets[-1]), np.float32)).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(tokens))
    pq.write_table(
        pa.table({"tokens": column}), path, row_group_size=group_rows, compression="zstd"
    )
