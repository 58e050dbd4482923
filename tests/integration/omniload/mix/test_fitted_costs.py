"""A cost that is fitted to reports of ranks: an edit of the run, which a resume repeats whatever it measures."""

import json
import subprocess
import sys

import pytest
import yaml

from omniload.mix.edits.edit import FitCost
from omniload.mix.edits.edits_file import edits_in
from tests.house.modules import ROOT
from tests.support.plane.corpora import a_mixed_corpus
from tests.support.plane.edits.mix_commands import json_of
from tests.support.plane.front_ranks import environment, results_of

pytestmark = pytest.mark.ray
RANK = ROOT / "tests" / "support" / "plane" / "processes" / "fitting_rank.py"
LIMIT_S = 240
STEPS, EVERY = 24, 8
TOKEN_S, PAIR_S = 1e-6, 4e-6
"""Cost of a token and of a pair of tokens: in documents of this length, nearly all work is pairs."""


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    mix = a_mixed_corpus(folder, records=600, rows=8, micro_rows=1, length=128)
    content = mix.model_dump(mode="json", exclude_none=True)
    content["runtime"] |= {"kind": "ray", "loaders": 1, "prefetch_steps": 2}
    (folder / "mix.yaml").write_text(yaml.safe_dump(content))
    return folder / "mix.yaml"


def two_ranks(mix, meet, cost=(), **keywords):
    """Run two ranks, the second twice as slow if they report a ``cost``."""
    cost = [*cost, 1.0, 2.0] if cost else []
    ranks = []
    for rank in range(2):
        where = {"rank": rank, "world_size": 2, "address": str(meet)} | keywords
        words = [sys.executable, RANK, mix, json.dumps(where), json.dumps(cost)]
        ranks.append(
            subprocess.Popen(
                list(map(str, words)),
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    results = sorted((each for out, _ in done for each in results_of(out)), key=lambda r: r["rank"])
    assert [each.get("error") for each in results] == [None, None], (results, done)
    return results


def dealt(results):
    """Return the rows of each step by rank and microbatch."""
    of_rank = [dict(each["seen"]) for each in results]
    return {step: [seen[step] for seen in of_rank] for step in of_rank[0]}


def samples(results):
    """Return the rows of each step, on all ranks."""
    return {
        step: sorted(row for rank in ranks for micro in rank for row in micro)
        for step, ranks in dealt(results).items()
    }


def test_what_two_ranks_measure_is_fitted_journaled_and_the_same_behind_a_resume(mix, tmp_path):
    run = {"run_dir": str(tmp_path / "run"), "fit_every": EVERY}
    declared = two_ranks(mix, tmp_path / "a", takes=STEPS + 2)
    fitted = two_ranks(
        mix, tmp_path / "b", (TOKEN_S, PAIR_S), takes=STEPS, save_at=EVERY // 2, **run
    )

    (edit,) = edits_in(fitted[0]["state"])
    assert isinstance(edit.change, FitCost)
    assert EVERY <= edit.step < STEPS  # after the steps that ranks had at the first fit
    assert (edit.change.linear, edit.change.quadratic) == pytest.approx((1.5e-6, 6e-6), rel=0.4)
    assert edit.change.quadratic / edit.change.linear == pytest.approx(PAIR_S / TOKEN_S, rel=0.01)
    shown = json_of("show", run["run_dir"])
    assert [(each["step"], each["change"]["kind"]) for each in shown["edits"]] == [
        (edit.step, "fit_cost")
    ]
    # The fit decides where rows go from its step on, and never the samples of a step.
    drawn = samples(declared)
    assert samples(fitted) == {step: drawn[step] for step in range(STEPS)}
    differ = [step for step, rows in dealt(fitted).items() if rows != dealt(declared)[step]]
    assert differ
    assert min(differ) >= edit.step

    # Resumed from its end, without times.
    behind = two_ranks(mix, tmp_path / "c", takes=2, state=fitted[0]["state"], **run)
    assert edits_in(behind[1]["state"]) == (edit,)
    assert samples(behind) == {step: drawn[step] for step in (STEPS, STEPS + 1)}
    # Resumed from before the fit, with other times: the journaled cost takes effect, not the present measurement.
    saved = fitted[0]["saved"]
    assert edits_in(saved) == ()
    to_behind = edit.step + 2 - EVERY // 2
    again = two_ranks(mix, tmp_path / "d", (PAIR_S, 0.0), takes=to_behind, state=saved, **run)
    assert edits_in(again[0]["state"]) == (edit,)
    assert dealt(again) == {step: dealt(fitted)[step] for step, _ in again[0]["seen"]}
