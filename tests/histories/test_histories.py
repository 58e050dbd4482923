"""Histories of a whole plane under faults: every promise is kept, every event occurs, every safeguard is needed."""

import gc
import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.histories.checking import history_of, shrunk, without_collection
from tests.histories.page import page_of
from tests.histories.plane import SOMETIMES, FaultyPlane
from tests.histories.safeguards import ROOT, safeguards
from tests.histories.scaled import SCALED_SOMETIMES
from tests.histories.worlds import World, world_of
from tests.support.plane.messages import below
from tests.support.programs import finished

FEW, MANY = 60, 5_000
EVERYTHING = (*SOMETIMES, *SCALED_SOMETIMES)
NOTHING_TAKEN_AWAY = """
from tests.histories.scaled import SCALED_SOMETIMES
from tests.histories.safeguards import broken_undisturbed, safeguards
print(*broken_undisturbed(safeguards()), len(safeguards()))
"""


def broken_of(seeds):
    """Return the broken promises of histories, with the command that repeats them, and the events of all."""
    seen, broken = Counter(), []
    with without_collection():
        for seed in seeds:
            outcome = history_of(world_of(seed))
            seen += outcome.seen
            if outcome.broken is not None:
                words = shrunk(world_of(seed), outcome.broken).to_words()
                broken.append(f"{outcome.broken}\npython -m tests.histories --world {words}")
    return broken, seen


def test_no_promise_breaks_in_any_history_and_much_came_about():
    broken, seen = broken_of(range(FEW))

    assert broken == []
    # Anything rarer than this happens somewhere in the large number of histories.
    assert len([what for what in EVERYTHING if seen[what]]) >= len(EVERYTHING) - 6


@pytest.mark.soak
@pytest.mark.slow
def test_no_promise_breaks_in_many_histories_and_everything_came_about():
    broken, seen = broken_of(range(FEW, MANY))

    assert broken == []
    assert [what for what in EVERYTHING if not seen[what]] == []


def test_a_seed_is_one_history():
    one, other = (history_of(world_of(7), traced=True) for _ in range(2))

    told = [[(m.at, m.role, m.what) for m in outcome.trace] for outcome in (one, other)]
    assert told[0] == told[1]
    assert one.messages == other.messages > 50


def test_what_a_history_leaves_goes_without_a_look_for_cycles():
    worlds = [world for world in map(world_of, range(20)) if world.planner_kills and world.kills]
    with without_collection():
        for world in worlds:
            history_of(world)  # this builds everything that histories share
        gc.collect()
        for world in worlds:
            history_of(world)

        assert gc.collect() == 0


def test_a_number_is_the_one_that_randrange_draws():
    one, other = random.Random(5), random.Random(5)

    for limit in (*range(1, 70), 1_000):
        assert below(one, limit) == other.randrange(limit)


def test_a_history_is_named_by_its_world():
    world = world_of(11)

    assert World.from_words(world.to_words()) == world
    with pytest.raises(ValueError, match="a world has no 'loader'; it has seed, scenario"):
        World.from_words("seed=1,loader=3")


def test_a_history_that_breaks_is_made_small(monkeypatch):
    def published_too_often(plane):
        digests = run(plane)
        if plane.planners_killed:
            plane.published.append(0)
        return digests

    run = FaultyPlane.run
    monkeypatch.setattr(FaultyPlane, "run", published_too_often)
    world = next(w for w in map(world_of, range(100)) if w.planner_kills and w.kills and w.moves)
    broken = history_of(world).broken
    smallest = shrunk(world, broken)

    assert broken.startswith("steps: ")
    assert history_of(smallest).broken.startswith("steps: ")
    assert smallest.planner_kills
    assert (smallest.kills, smallest.cuts) == (0, 0)


def test_the_page_of_a_history_shows_its_faults_and_how_to_see_it_again():
    world = next(w for w in map(world_of, range(100)) if w.planner_kills)
    outcome = history_of(world, traced=True)

    page = page_of(world, outcome)

    assert f"--world {world.to_words()}" in page
    assert "every promise held" in page
    assert re.search(r'class="fault".*a planner is killed', page)
    assert page.count('class="takes"') >= world.steps


def test_every_safeguard_is_missed_by_the_history_that_stands_with_it():
    command = [sys.executable, "-m", "tests.histories", "--known-safeguards"]
    told = finished(command, limit_s=600, cwd=ROOT)

    assert told.returncode == 0, told.stdout + told.stderr
    assert len(told.stdout.splitlines()) == len(safeguards()) + 2
    assert len(safeguards()) >= 20


def test_histories_break_for_want_of_a_safeguard_alone():
    """Neither the unchanged code nor a fresh import of a part of it breaks the histories."""
    command = [sys.executable, "-c", NOTHING_TAKEN_AWAY]
    told = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600
    )

    assert told.stdout == f"{len(safeguards())}\n"
