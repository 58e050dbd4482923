"""Ranks that open a mix by ``omniload.open``, as processes: how to start them, and the batches that they received."""

import json
import os

import yaml

from tests.house.modules import ROOT
from tests.support.plane.corpora import a_mixed_corpus

__all__ = ["RANK", "a_mix_file", "environment", "results_of", "samples"]

RANK = ROOT / "tests" / "support" / "plane" / "processes" / "front_rank.py"


def a_mix_file(folder, **runtime):
    """Write a corpus, and a mix of it; return the file."""
    content = a_mixed_corpus(folder).model_dump(mode="json", exclude_none=True)
    content["runtime"] |= runtime
    (folder / "mix.yaml").write_text(yaml.safe_dump(content))
    return folder / "mix.yaml"


def environment(**more):
    """Return this process's variables without those of a launcher or of Ray."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
    return mine | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def results_of(text):
    """Return the printed results of ranks, one per line."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def samples(results):
    """Return the rows of every step over all ranks, in an order that does not depend on placement."""
    steps = {}
    for result in results:
        for step, tokens in result["seen"]:
            steps.setdefault(step, []).extend(map(tuple, tokens))
    return {step: sorted(rows) for step, rows in steps.items()}
