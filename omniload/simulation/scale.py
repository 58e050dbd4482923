"""Mixes of another size than their file's: larger for a simulated job, smaller for measured planes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.job import Job, constructors_of
from omniload.simulation.profile import Profile

__all__ = ["Reference", "lengths_of", "original_of", "with_sources", "with_tokens"]

_MARK = "."
_VOCABULARY = 32_000
_CORPUS_TOKENS = 2 << 20
"""Tokens of a corpus of many blocks, so that a plane does not soon return to a block that it has decoded."""
_BLOCK_TOKENS = 1 << 20
"""Tokens of a corpus of one block per source: the blocks of all sources together fit the memory of a loader."""
_MOST_GROUP_ROWS, _MOST_UNITS = 500, 256
_MOST_SOURCES = 32
_FEW_TOKENS = 8 << 10
"""Tokens of a small step, or a row for each rank if that is more; messages are most of its cost."""
_MORE = 8
"""Ratio of the tokens of a large step to a small one; in a large step, the bytes of messages cost as well."""
_MOST_RANKS = 8
"""Most ranks of the one constructor. With more, its messages would mostly be the ranks' requests, which cost the
least."""
_MOST_FEW = 64 << 10
"""Most tokens of a small step; with long rows it has fewer ranks."""
_FEW_STEPS = 8
"""Steps of a short window. Its messages carry fewer batches, which shows the cost of each batch in a message."""
_LENGTHS_OF_A_SOURCE = 512
"""Lengths taken from each source of the profile."""
_IN_ONE = 1 << 30
"""Samples per unit that puts all of a file in one unit."""


def original_of(name: str, mix: MixConfig) -> str:
    """Return the source of which a source of ``with_sources`` is a copy, or the source itself."""
    return name if name in mix.sources else name.rpartition(_MARK)[0]


def with_sources(mix: MixConfig, count: int) -> MixConfig:
    """Return a mix of ``count`` sources: each is copied equally often, give or take one, and shares its weight.

    Raises:
        ConfigError: There are more sources already, or the mix gives amounts in place of weights.
    """
    names = mix.names
    if count < len(names):
        raise ConfigError(
            f"--sources is {count}, and the mix has {len(names)} already; give {len(names)} or more"
        )
    if mix.mix.amounts is not None:
        raise ConfigError(
            f"--sources is {count}, and the mix gives amounts, which copies of a source cannot share; give it stages "
            "of weights in their place to simulate more sources"
        )
    copies = {
        name: _copies_of(name, names, (count - place + len(names) - 1) // len(names))
        for place, name in enumerate(names)
    }
    content: dict[str, Any] = mix.declared()
    content["sources"] = {
        copy: {**content["sources"][name], "max_fraction": None, "max_repetition": None}
        for name in names
        for copy in copies[name]
    }
    # Copies would not be covered by the caps of groups.
    content["mix"].pop("group_caps", None)
    readers = content["loader"]["readers"]
    # Each copy has as many readers, because it stands for a source as large as the first.
    content["loader"]["readers"] = {
        copy: number for name, number in readers.items() for copy in copies[name]
    }
    for stage in content["mix"]["stages"]:
        stage["weights"] = {
            copy: weight / len(copies[name])
            for name, weight in stage["weights"].items()
            for copy in copies[name]
        }
    return MixConfig.model_validate(content)


def _copies_of(name: str, names: Sequence[str], count: int) -> list[str]:
    """Return the names of a source and its copies."""
    numbered = (f"{name}{_MARK}{number}" for number in itertools.count(2))
    # A source of the file may have the name of a copy, ``web.2`` next to ``web``; each name must be unique.
    free = (each for each in numbered if each not in names)
    return [name, *itertools.islice(free, count - 1)]


def with_tokens(mix: MixConfig, tokens: int) -> MixConfig:
    """Return a mix whose steps have ``tokens`` tokens, rounded up to whole rows.

    Raises:
        ConfigError: The tokens are fewer than a row.
    """
    length = mix.pack.length
    rows = max(1, -(-tokens // length))
    content = mix.declared()
    content["batch"]["tokens"] = rows * length
    content["batch"]["micro_tokens"] = min(content["batch"]["micro_tokens"], rows * length)
    # The steps ahead stay those of the file, because they follow from its tokens if it does not set them.
    content["runtime"]["prefetch_steps"] = mix.runtime.prefetch_steps
    return MixConfig.model_validate(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A small plane on which messages are measured; they are divided as finely as those of the job."""

    lengths: tuple[int, ...]
    """Tokens of its samples, repeated until the corpus is full."""
    sources: int
    group_rows: int
    """Samples of a unit. With as many as in the job, blocks have the same length."""
    row_length: int
    ranks: int
    """Ranks of its one constructor, so that their share of the messages is the same as for a constructor of the job."""
    tokens: int
    """Tokens of a step, over all ranks."""
    steps_ahead: int = 0
    """Steps built ahead, twice those of a window; 0 for as many as fit."""
    has_blocks: bool = False
    """Whether blocks are decoded throughout; otherwise each source is one block, decoded as the plane fills."""

    @classmethod
    def few(cls, job: Job, profile: Profile) -> "Reference":
        """Return the plane of small steps for a job; the numbers of sources and ranks are capped."""
        length = job.spec.mix.pack.length
        # The largest constructor of the job, not an average one, because the others wait for it.
        of_constructor = max(len(its) for _, its in constructors_of(job))
        ranks = max(1, min(_MOST_RANKS, of_constructor, _MOST_FEW // length))
        return cls(
            lengths=lengths_of(profile, length),
            sources=min(_MOST_SOURCES, len(job.originals)),
            group_rows=_group_rows(profile),
            row_length=length,
            ranks=ranks,
            tokens=max(1, _FEW_TOKENS // (ranks * length)) * ranks * length,
        )

    @classmethod
    def short(cls, job: Job, profile: Profile) -> "Reference":
        """Return the plane of small steps and short windows, whose messages have fewer batches."""
        return replace(cls.few(job, profile), steps_ahead=2 * _FEW_STEPS)

    @classmethod
    def many(cls, job: Job, profile: Profile) -> "Reference":
        """Return the plane of large steps for a job."""
        few = cls.few(job, profile)
        # Only this plane has blocks: small steps decode a handful per turn, in a number that depends on chance, and
        # each block costs as much as dozens of messages.
        return replace(few, tokens=_MORE * few.tokens, has_blocks=True)

    def written(self, folder: Path) -> PlaneSpec:
        """Write the corpus into a folder, and return the plane that reads it."""
        path = folder / "samples.parquet"
        if self.has_blocks:
            _write_samples(path, self.lengths, self.group_rows)
        else:
            # Taken evenly from all lengths, because the lengths of one source are adjacent.
            some = self.lengths[:: -(-sum(self.lengths) // _BLOCK_TOKENS)]
            _write_samples(path, some, _IN_ONE, tokens=_BLOCK_TOKENS)
        source = {"type": "parquet", "path": "samples.parquet", "tokens": "tokens"}
        names = [f"s{number:02}" for number in range(self.sources)]
        content: dict[str, Any] = {
            "version": 1,
            "seed": 1,
            "sources": dict.fromkeys(names, source),
            "mix": {
                "stop": "never",
                # Otherwise all sources would reach their next block in the same step.
                "stages": [{"from_step": 0, "weights": {n: 16 + k for k, n in enumerate(names)}}],
            },
            "pack": {"length": self.row_length},
            "batch": {"tokens": self.tokens, "micro_tokens": self.tokens // self.ranks},
            # Otherwise the number would follow from costs kept in the folder, which do not exist the first time.
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
            tree=ClientPlaceTree.of(dp=self.ranks),
            cache_dir=folder,
        )


def lengths_of(profile: Profile, most: int) -> tuple[int, ...]:
    """Return the tokens of samples of every source, each cut to ``most``."""
    found = [costs.lengths[:_LENGTHS_OF_A_SOURCE] for costs in profile.sources.values()]
    return tuple(min(length, most) for lengths in found for length in lengths)


def _group_rows(profile: Profile) -> int:
    rows = [costs.block_positions // costs.block_units for costs in profile.sources.values()]
    return max(1, min(_MOST_GROUP_ROWS, round(median(rows))))


def _write_samples(
    path: Path, lengths: Sequence[int], group_rows: int, *, tokens: int = _CORPUS_TOKENS
) -> None:
    """Write samples of about this many tokens, in which the n-th token is about 1/n as frequent as the first."""
    # By default long enough that a plane does not soon return to a block that it has decoded.
    repeats = max(1, tokens // sum(lengths))
    lengths_N = np.tile(np.asarray(lengths, np.int32), repeats)
    offsets = np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int32)))
    # Unlike evenly drawn ids, these compress and decode about as text does.
    rng = np.random.default_rng(0)
    ids = (_VOCABULARY ** rng.random(int(offsets[-1]), np.float32)).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids))
    # A block has the same bytes, however many units it has; a block of a thousand tiny units takes seconds to read.
    group_rows = max(group_rows, -(-len(lengths_N) // _MOST_UNITS))
    pq.write_table(
        pa.table({"tokens": column}), path, row_group_size=group_rows, compression="zstd"
    )
