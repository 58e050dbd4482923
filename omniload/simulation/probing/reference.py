"""A small plane whose processor time is known but for its messages: light sources, one rank, one constructor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
_CORPUS_TOKENS, _GROUP_ROWS = 2 << 20, 500
_MOST_SOURCES = 32
_TOKENS = 8 << 10
"""Of a step, a row at least: messages are most of what it takes."""
_LENGTHS_OF_A_SOURCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What of a job is kept: messages are as finely divided as the job's."""

    lengths: tuple[int, ...]
    """Tokens of samples, over and over."""
    sources: int
    row_length: int
    tokens: int
    """Of a step."""

    @classmethod
    def of(cls, job: Job, profile: Profile) -> "Reference":
        """Return that of a job; sources beyond some are left out."""
        length = job.spec.mix.pack.length
        return cls(
            lengths=lengths_of(profile, length),
            sources=min(_MOST_SOURCES, len(job.originals)),
            row_length=length,
            tokens=max(1, _TOKENS // length) * length,
        )

    def written(self, folder: Path) -> PlaneSpec:
        """Write what is read, and return the plane that reads it."""
        _write_samples(folder / "samples.parquet", self.lengths)
        source = {"type": "parquet", "path": "samples.parquet", "tokens": "tokens"}
        names = [f"s{number:02}" for number in range(self.sources)]
        content: dict[str, Any] = {
            "version": 1,
            "seed": 1,
            "sources": dict.fromkeys(names, source),
            "mix": {
                "stop": "never",
                "stages": [{"from_step": 0, "weights": dict.fromkeys(names, 1)}],
            },
            "pack": {"length": self.row_length},
            "batch": {"tokens": self.tokens, "micro_tokens": self.tokens},
            "loader": {"readers": dict.fromkeys(names, 1)},
            "runtime": {"kind": "ray", "loaders": 1, "constructors": 1},
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


def _write_samples(path: Path, lengths: Sequence[int]) -> None:
    """Write samples of tokens of which the n-th comes about 1/n as often as the first."""
    repeats = max(1, _CORPUS_TOKENS // sum(lengths))
    lengths_N = np.tile(np.asarray(lengths, np.int32), repeats)
    offsets = np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int32)))
    rng = np.random.default_rng(0)
    tokens = (_VOCABULARY ** rng.random(int(offsets[-1]), np.float32)).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(tokens))
    pq.write_table(
        pa.table({"tokens": column}), path, row_group_size=_GROUP_ROWS, compression="zstd"
    )
