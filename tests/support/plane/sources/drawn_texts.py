"""Shards of two times fifty texts, and a file that lists the drawn ones."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import omniload
from omniload.source.distinct.drawn_before import write_drawn

__all__ = [
    "LEFT",
    "TEXTS",
    "a_mix",
    "a_mix_of",
    "drawn",
    "in_folder",
    "said_behind_d",
    "write",
]

TEXTS = [f"d{i}" for i in range(100)]
DRAWN = {"a": np.array([0, 7, 8, 49]), "b": np.array([3])}
"""Drawn records by shard, of fifty each."""
LEFT = sorted(set(range(100)) - {0, 7, 8, 49, 53})


def in_folder(tmp_path, monkeypatch):
    """Go to a folder with the shards ``a`` and ``b``, as Parquet, JSON lines and compressed JSON lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, texts in (("a", TEXTS[:50]), ("b", TEXTS[50:])):
        rows = [{"text": text} for text in texts]
        pq.write_table(pa.Table.from_pylist(rows), f"{name}.parquet", row_group_size=9)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / f"{name}.jsonl").write_bytes(lines)
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(lines))
    return tmp_path


def a_mix_of(**source):
    """Return a mix of one source, whose records are each drawn once."""
    return {
        "version": 2,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {"web": source},
        "mix": {"stages": [{"weights": {"web": 1}}], "stop": "each_once"},
        "pack": {"length": 16},
        "batch": {"tokens": 64, "micro_tokens": 32},
    }


def a_mix(kind="parquet", path=None, **source):
    declared = {"type": kind, "path": path or f"*.{kind}", "text": "text", **source}
    return a_mix_of(**{"drawn_before": "drawn.arrow", **declared})


def write(kind="parquet", **shards):
    found = {f"{name}.{kind}": records for name, records in (DRAWN | shards).items()}
    write_drawn(Path("drawn.arrow"), found.items())


def said_behind_d(mix, **words):
    """Return the text after each letter d in the texts that a run draws, sorted."""
    with omniload.open(mix, arrays="numpy", **words) as loader:
        texts = [bytes(batch.tokens[batch.tokens < 256].tolist()) for batch in loader]
    return sorted(b"".join(texts).replace(b"\0", b"").decode().split("d")[1:])


def drawn(mix, **words):
    """Return the numbers of the texts that a run draws, sorted."""
    return sorted(map(int, said_behind_d(mix, **words)))
