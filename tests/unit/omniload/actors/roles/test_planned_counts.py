"""The contents of steps are counted once and for good; skipped records are reported a few times."""

import logging
from collections import Counter

import pytest

from omniload.actors.heartbeat_board import Figures
from omniload.actors.roles.planned_counts import COUNTED, PlannedCounts, count_skipped
from omniload.base.metrics import REGISTRY
from omniload.machine.messages import AppendJournal
from omniload.machine.plans.fences import CutJournal
from omniload.machine.status import SKIPPED
from omniload.mix.state import MixState
from tests.support.plane.builders import a_plan

_LOGGER = "omniload.actors.roles.planned_counts"


def test_ten_thousand_reads_with_a_bad_record_each_are_a_dozen_lines_and_the_last_total_is_a_figure(
    caplog,
):
    figures = Figures()

    with caplog.at_level(logging.WARNING, logger=_LOGGER):
        for _ in range(10_000):
            count_skipped("web", 1, figures)

    assert figures.read()[SKIPPED + "web"] == 10_000
    assert len(caplog.messages) == 14  # at 1, 2, 4, ... 8,192
    assert caplog.messages[0].startswith("source web: ")
    assert "skipped once so far; reported again at 2" in caplog.messages[0]
    assert "8192 times so far; reported again at 16384" in caplog.messages[-1]


def test_each_source_is_told_of_by_itself_and_a_read_without_a_bad_record_is_not(caplog):
    figures = Figures()

    with caplog.at_level(logging.WARNING, logger=_LOGGER):
        count_skipped("web", 5, figures)
        count_skipped("web", 2, figures)
        count_skipped("code", 0, figures)
        count_skipped("books", 1, figures)

    assert [message.split(":")[0] for message in caplog.messages] == ["source web", "source books"]
    assert "5 times so far; reported again at 8" in caplog.messages[0]


def planned(step, bad=(), **tokens):
    """Return the record of a step that holds some tokens of each source, and passed bad records of some."""
    state, names = MixState.start(len(tokens)), tuple(tokens)
    plan = a_plan([[[0, 1, 0, 0, 5, 5]]], step=step, tokens_S=tuple(tokens.values()))
    return AppendJournal(state, plan, state, names, dict(bad))


class Counted:
    """The growth of the counters since this was made."""

    NAMES = ("omniload_tokens_planned_total", "omniload_samples_skipped_total")

    def __init__(self):
        self._before = self._now()

    def _now(self):
        found = Counter()
        for name in self.NAMES:
            for source in ("taken", "added"):
                value = REGISTRY.get_sample_value(name, {"source": source}) or 0
                found[name.split("_")[1], source] = int(value)
        return found

    def read(self):
        return dict(self._now() - self._before)


def test_a_step_is_counted_once_every_rank_has_taken_it_and_one_that_was_taken_back_is_not():
    counted, counts = Counted(), PlannedCounts(Figures())

    counts.note([planned(step, {0: 1}, taken=10) for step in range(4)], slowest=0)
    assert counted.read() == {}
    counts.note([], slowest=1)
    assert counted.read() == {("tokens", "taken"): 10, ("samples", "taken"): 1}
    # Steps 2 and 3 are planned again, with an added source.
    anew = [planned(step, {1: 2}, taken=3, added=7) for step in (2, 3)]
    counts.note([CutJournal(step=2), *anew], slowest=2)
    counts.note([], slowest=4)

    assert counted.read() == {
        ("tokens", "taken"): 26,
        ("tokens", "added"): 14,
        ("samples", "taken"): 2,
        ("samples", "added"): 4,
    }


@pytest.mark.parametrize("heard", [1, 2, 4])
def test_a_planner_that_took_over_counts_none_of_the_steps_that_it_plans_again(heard):
    steps = [planned(step, {0: 1}, taken=10 + step) for step in range(6)]
    counted, figures = Counted(), Figures()
    PlannedCounts(figures).note(steps, slowest=heard)

    # It knows the last heartbeat of the lost planner, and nothing of ranks until they report.
    after = PlannedCounts(figures)
    after.note(steps[1:], slowest=1)
    after.note([], slowest=6)

    assert counted.read() == {("tokens", "taken"): sum(range(10, 16)), ("samples", "taken"): 6}
    assert figures.read()[COUNTED] == 6
