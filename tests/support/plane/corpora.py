"""Small corpora on disk: token columns in Parquet, text in JSON lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from omniload.mix.config import MixConfig
from omniload.mix.schema.sources.own_columns import OwnColumn
from tests.support.plane.builders import a_mix

__all__ = ["a_corpus", "a_mixed_corpus", "with_masks", "write_texts", "write_tokens"]


def write_tokens(file: Path, documents: Sequence[np.ndarray], *, rows_per_group: int = 20) -> None:
    """Write one Parquet shard with ``tokens``, a ``mask`` and a ``weight`` computed from them, and a number column."""
    file.parent.mkdir(parents=True, exist_ok=True)
    column = pa.array([document.tolist() for document in documents], pa.list_(pa.int32()))
    masks = pa.array([(document % 3 > 0).tolist() for document in documents], pa.list_(pa.bool_()))
    scores = pa.array([float(len(document)) for document in documents])
    weights = pa.array([(document * 0.5 + 1).tolist() for document in documents])
    table = pa.table({"tokens": column, "mask": masks, "score": scores, "weight": weights})
    pq.write_table(table, file, row_group_size=rows_per_group)


def write_texts(file: Path, texts: Sequence[str | None]) -> None:
    """Write one shard of JSON lines with the key ``text``; for ``None`` the line has no such key."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (orjson.dumps({"text": text} if text is not None else {"title": ""}) for text in texts)
    file.write_bytes(b"".join(line + b"\n" for line in lines))


def _lengths(seed: int, count: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(2.5, 0.9, count)
    return np.clip(drawn, 1, longest).astype(int)


def a_corpus(
    folder: Path,
    names: Sequence[str] = ("web", "code"),
    *,
    records: int = 120,
    shards: int = 2,
    longest: int = 90,
    masked: bool = False,
    **changes: Any,
) -> MixConfig:
    """Write token sources under ``folder`` and return a mix of them."""
    for number, name in enumerate(names):
        for shard in range(shards):
            rng = np.random.default_rng((number, shard))
            lengths = _lengths(number * 100 + shard, records // shards, longest)
            write_tokens(
                folder / name / f"{shard}.parquet",
                [rng.integers(0, 5000, n).astype(np.int32) for n in lengths],
            )
    mix = a_mix(sources=names, **changes)
    return with_masks(mix, names) if masked else mix


def with_masks(mix: MixConfig, names: Sequence[str]) -> MixConfig:
    """Return the mix with masks, scores, weights of labels and sizes that ``write_tokens`` wrote for these sources."""
    weight = OwnColumn(column="weight", dtype="float32", of="labels", default=2.5)
    size = OwnColumn(column="score", dtype="float64", of="samples", default=-1)
    own = {"weight": weight, "size": size}
    update = {"columns": {"loss_mask": "mask", "scores": "score"} | own}
    changed = {name: mix.sources[name].model_copy(update=update) for name in names}
    batch = mix.batch.model_copy(update={"columns": ("scores", *own)})
    return mix.model_copy(update={"sources": {**mix.sources, **changed}, "batch": batch})


def a_mixed_corpus(folder: Path, *, records: int = 120, **changes: Any) -> MixConfig:
    """Write a token source and a text source, tokenised by bytes unless said otherwise; return a mix of them."""
    a_corpus(folder, ("ids",), records=records)
    lengths = _lengths(9, records, 80).tolist()
    write_texts(folder / "text" / "0.jsonl", [f"{i} " + "x" * n for i, n in enumerate(lengths)])
    sources: Mapping[str, Mapping[str, Any]] = {
        "ids": {"type": "parquet", "path": "ids/*.parquet", "tokens": "tokens"},
        "text": {"type": "jsonl", "path": "text/*.jsonl"},
    }
    return a_mix(**{"sources": sources, "tokenizer": {"type": "bytes"}} | changes)
