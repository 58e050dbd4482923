"""Who is told that a loader has taken over, and what becomes of a planner that is late to hear it."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.handing_over import HandingOver
from omniload.base.errors import DefectError, UnavailableError
from omniload.machine.lost_roles import Member

LOADER, NEXT = Member("loader-0", 1), Member("loader-0", 2)
PLANNER, CONSTRUCTOR = Member("planner"), Member("constructor-0")


class Actor:
    """Hears of loaders; its answers are made by the test."""

    def __init__(self):
        self.heard, self.answers = [], []
        self.replace_loader = SimpleNamespace(remote=self._hear)

    def _hear(self, serving):
        self.heard.append(serving)
        self.answers.append(Future())
        return SimpleNamespace(future=lambda answer=self.answers[-1]: answer)


class FakeCrew:
    """A planner and a constructor, and a loader of two sources that has just taken over."""

    def __init__(self):
        self.holders = {m.role: m for m in (LOADER, PLANNER, CONSTRUCTOR)}
        self.dp_ranks_of, self.sources_of = {"constructor-0": (0,)}, {"loader-0": (0, 1)}
        self.actors = {m: Actor() for m in self.holders.values()}
        self.changed, self.noted = threading.Condition(), []

    def holding(self, role):
        return self.actors[self.holders[role]]

    def as_serving(self, member, sources):
        return SimpleNamespace(sources=tuple(sources), name=member.name)

    def note_serving(self, member, sources):
        self.noted.append((member, tuple(sources)))


@pytest.fixture
def crew():
    made = FakeCrew()
    made.planner, made.constructor = made.actors[PLANNER], made.actors[CONSTRUCTOR]
    HandingOver(made, lambda call: call()).to(LOADER)
    return made


def test_constructors_are_told_once_the_planner_has_handed_over(crew):
    assert not crew.constructor.heard

    crew.planner.answers[0].set_result(None)

    assert [serving.sources for serving in crew.constructor.heard] == [(0, 1)]
    assert crew.noted == [(LOADER, (0, 1))]


def test_a_planner_that_is_late_is_told_again_and_constructors_after_that(crew):
    crew.planner.answers[0].set_exception(UnavailableError("its journal waits for a store"))
    assert (len(crew.planner.heard), crew.constructor.heard) == (2, [])

    crew.planner.answers[1].set_result(None)

    assert [serving.name for serving in crew.constructor.heard] == [LOADER.name]


@pytest.mark.parametrize(
    ("role", "held_by"), [("loader-0", NEXT), ("planner", Member("planner", 1))]
)
def test_of_roles_that_were_replaced_meanwhile_nothing_is_told_again(crew, role, held_by):
    crew.holders[role] = held_by

    crew.planner.answers[0].set_exception(UnavailableError("late"))

    assert (len(crew.planner.heard), crew.constructor.heard) == (1, [])


def test_what_fails_at_once_is_not_tried_for_ever(crew):
    crew.planner.answers[0].set_exception(DefectError("a fault of omniload itself"))

    assert (len(crew.planner.heard), crew.constructor.heard) == (1, [])
