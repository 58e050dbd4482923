"""The corpus of the throughput and resume benchmarks: pre-tokenised parquet sources of long-tailed documents."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omniload.mix.config import MixConfig

__all__ = ["MixedSources", "build_sources", "lengths_of", "mix_of"]

_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSources:
    """Contents of the corpus; two equal values describe the same tokens."""

    sources: int = 16
    shards: int = 2
    """Files of a source."""
    documents: int = 3_000
    """Documents of a file."""
    group_rows: int = 500
    """Documents of a row group."""
    seed: int = 0
    weighted: bool = False
    """Whether each token has a weight, a float32."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources, and of their folders."""
        return tuple(f"s{i:03}" for i in range(self.sources))

    @property
    def weights(self) -> tuple[float, ...]:
        """Share of each source in the mix: source ``i`` has ``i + 1`` parts."""
        whole = self.sources * (self.sources + 1) / 2
        return tuple((i + 1) / whole for i in range(self.sources))


def lengths_of(rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw document lengths: log-normal, mean about 650 tokens, cut at 32k."""
    return np.clip(rng.lognormal(6, 1, count), 1, 32_768).astype(np.int64)


def build_sources(folder: Path, corpus: MixedSources) -> None:
    """Write the corpus to ``folder``, unless it exists already."""
    marker = folder / "corpus.json"
    wanted = json.dumps(asdict(corpus))
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for number, name in enumerate(corpus.names):
        (folder / name).mkdir(parents=True)
        for shard in range(corpus.shards):
            rng = np.random.default_rng((corpus.seed, number, shard))
            offsets = np.concatenate(([0], np.cumsum(lengths_of(rng, corpus.documents))))
            # The logarithms are uniform, so the n-th token is about 1/n as frequent as the first.
            tokens = (_VOCABULARY ** rng.random(int(offsets[-1]), np.float32)).astype(np.int32)
            bounds = pa.array(offsets.astype(np.int32))
            table = {"tokens": pa.ListArray.from_arrays(bounds, pa.array(tokens))}
            if corpus.weighted:
                weights = rng.random(len(tokens), np.float32)
                table["weight"] = pa.ListArray.from_arrays(bounds, pa.array(weights))
            pq.write_table(
                pa.table(table),
                folder / name / f"{shard:05}.parquet",
                row_group_size=corpus.group_rows,
                compression="zstd",
            )
    marker.write_text(wanted, encoding="utf-8")


def mix_of(
    names: Sequence[str],
    weights: Sequence[float],
    *,
    rows: int,
    micro_rows: int,
    length: int,
    **changes: Mapping[str, Any],
) -> MixConfig:
    """Return the mix file that reads such a corpus; ``changes`` are further top-level keys."""
    return MixConfig.model_validate(
        {
            "version": 1,
            "seed": 1,
            "sources": {
                name: {"type": "parquet", "path": f"{name}/*.parquet", "tokens": "tokens"}
                for name in names
            },
            "mix": {
                "stages": [{"from_step": 0, "weights": dict(zip(names, weights, strict=True))}]
            },
            "pack": {"length": length},
            "batch": {"tokens": rows * length, "micro_tokens": micro_rows * length},
        }
        | changes
    )
