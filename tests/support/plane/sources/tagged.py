"""A cost and a strategy that use a tag of samples, installed as by a lab, and texts in two languages."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from omniload.base.settings.registry import registered
from omniload.mix.config import MixConfig
from tests.support.plane.builders import a_mix

__all__ = ["DEAR", "a_tagged_corpus", "install"]

DEAR = 100.0
"""Cost of a token of German; a token of another language costs 1."""
_LAB = f"""\
import numpy as np


def dear_german(lengths_P, langs_P):
    return lengths_P * np.where(langs_P == "de", {DEAR}, 1.0)


dear_german.of = ("lengths", "columns.lang")


def german_first(rows, request):
    german_P = rows.columns["columns.lang"] == "de"
    first_R = german_P[rows.row_offsets[:-1]]
    order_R = np.argsort(~first_R, kind="stable")
    ranks_R, turns_R = np.empty(len(rows), int), np.empty(len(rows), int)
    each = -(-len(rows) // request.tree.size_of("dp"))
    ranks_R[order_R], turns_R[order_R] = np.divmod(np.arange(len(rows)), each)
    graph = request.distributed(rows).cost(request.cost, of=request.cost_columns)
    return graph.deal(ranks_R, turns_R // request.rows_per_microbatch).plan(request.tree)


german_first.of = ("columns.lang",)
"""


def install(folder: Path, monkeypatch) -> None:
    """Register the cost ``dear_german`` and the strategy ``german_first``, here and in processes started later."""
    lab = folder / "lab"
    about = lab / "dear-1.0.dist-info"
    about.mkdir(parents=True)
    (lab / "lab_of_costs.py").write_text(_LAB)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: dear\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[omniload.costs]\ndear_german = lab_of_costs:dear_german\n"
        "[omniload.strategies]\ngerman_first = lab_of_costs:german_first\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{lab}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(lab)
    registered.cache_clear()


def a_tagged_corpus(folder: Path, *, records: int = 240, **changes: Any) -> MixConfig:
    """Write texts of two sources, one without the tag ``lang``, and return a mix whose batches contain it."""
    rng = np.random.default_rng(7)
    lengths = np.clip(rng.lognormal(3, 0.8, 2 * records), 1, 150).astype(int).tolist()
    for name, sizes in (("plain", lengths[:records]), ("web", lengths[records:])):
        lines = [{"text": f"{name} {i} " + "x" * size} for i, size in enumerate(sizes)]
        if name == "web":
            langs = rng.choice(["de", "en", "fr"], records, p=[0.3, 0.6, 0.1]).tolist()
            lines = [line | {"language": lang} for line, lang in zip(lines, langs, strict=True)]
        (folder / f"{name}.jsonl").write_bytes(
            b"".join(orjson.dumps(each) + b"\n" for each in lines)
        )
    lang = {"column": "language", "dtype": "text", "of": "samples", "default": "en"}
    given = {
        "sources": {
            "plain": {"type": "jsonl", "path": "plain.jsonl"},
            "web": {"type": "jsonl", "path": "web.jsonl", "columns": {"lang": lang}},
        },
        "tokenizer": {"type": "bytes"},
        "rows": 12,
        "length": 64,
        "micro_rows": 2,
    }
    mix = a_mix(**given | changes)
    return mix.model_copy(update={"batch": mix.batch.model_copy(update={"columns": ("lang",)})})
