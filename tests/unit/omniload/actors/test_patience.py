"""The message about a wait whose limit has passed, and the time that counts."""

from concurrent.futures import Future

import pytest

from omniload.actors.heartbeat_board import Activity
from omniload.actors.patience import heard_within, note_taken, wait_until
from omniload.base.clock import FakeClock
from omniload.base.errors import UnavailableError
from omniload.machine.waiting import Wait


def test_a_planner_that_is_late_to_hear_of_a_loader_is_told_as_late():
    with pytest.raises(UnavailableError, match=r"begun the take-over by loader-0\+1"):
        heard_within(0.0, Future(), "loader-0+1")


class Board:
    """A board of roles without a heartbeat."""

    def read(self):
        return {}


def a_wait():
    return Wait(who="rank dp=0", what="the batch of step 7", first="constructor-0", limit_s=30.0)


def test_a_wait_in_which_its_own_process_was_stopped_has_the_rest_of_its_limit_yet():
    clock, turns = FakeClock(), []

    def ready(turn_s):
        turns.append(turn_s)
        # Stopped for a day in the second look; the batch is there 5 s after it resumes.
        clock.advance(5.0 if len(turns) == 3 else turn_s + 86_400.0 * (len(turns) == 2))
        return len(turns) == 3

    wait_until(ready, a_wait(), Board(), clock.now_s)

    assert turns == [10.0, 10.0, 10.0]


def test_a_wait_whose_turns_end_late_for_a_busy_machine_ends_at_its_limit():
    clock = FakeClock()

    def ready(turn_s):
        clock.advance(turn_s + 0.5)
        return False

    with pytest.raises(
        UnavailableError, match=r"waited 3[01] s for the batch of step 7, its limit"
    ):
        wait_until(ready, a_wait(), Board(), clock.now_s)


def test_a_step_that_there_is_none_of_is_not_taken_and_what_was_waited_for_it_counts():
    rank = Activity("rank dp=0")
    for step in range(3):
        note_taken(rank, step, 0.5, is_end=step == 2)

    told = {"wait_seconds_total": 1.5, "taken_steps_total": 2, "taken_step": 1}
    assert rank.figures.read() == told
    (task,) = rank.progress().tasks
    assert task.doing == "has heard that step 2 is none, where the run ends"
