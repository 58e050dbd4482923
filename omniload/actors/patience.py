"""Waits with a limit: the shell of the Wait machine, which reads heartbeats when that is due, logs, and gives up."""

import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from omniload.actors.heartbeat_board import Activity, Board
from omniload.base.clock import overslept_s
from omniload.base.concurrency.held_signals import let_signals_in, longest_turn_s
from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger
from omniload.machine.waiting import EndWait, HeartbeatsRead, Wait

__all__ = ["heard_within", "note_taken", "taken_within", "wait_for_opening", "wait_until"]

_ANSWER_S = 60.0
"""Longest wait for a planner to begin with a question."""

_LOG = get_logger(__name__)

Taken = TypeVar("Taken")


def wait_until(
    ready: Callable[[float], bool],
    wait: Wait,
    board: Board,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until ``ready``, as long as the machine allows; time in which this process is stopped does not count.

    Args:
        ready: Waits for up to the given seconds; returns whether the wait is over.
        wait: The machine, which knows who waits for what.
        board: Heartbeats of the roles.
        clock_s: Monotonic clock of the heartbeats.

    Raises:
        UnavailableError: The limit passed; names the role that causes the wait, and why.
        OmniloadError: ``ready`` raised it.
    """
    began_s = now_s = clock_s()
    while not ready(turn_s := min(longest_turn_s(), wait.due_in_s(now_s - began_s))):
        let_signals_in()
        asked_s = now_s
        # Read once, because heartbeats are compared with the moment at which the machine is asked.
        now_s = clock_s()
        began_s += overslept_s(turn_s, now_s - asked_s)
        # Some callbacks return earlier than they are told to.
        if wait.due_in_s(now_s - began_s) > 0:
            continue
        looked = HeartbeatsRead(waited_s=now_s - began_s, now_s=now_s, roles=board.read())
        for command in wait.handle(looked):
            if isinstance(command, EndWait):
                raise UnavailableError(command.text)
            _LOG.warning("%s", command.text)


def note_taken(rank: Activity, step: int, waited_s: float, *, is_end: bool) -> None:
    """Note that a rank has taken the batch of a step, or reached the end, and how long it waited."""
    rank.figures.count("wait_seconds_total", waited_s)
    if is_end:
        rank.rest(f"has heard that step {step} is none, where the run ends")
        return
    rank.figures.count("taken_steps_total")
    rank.figures.note(taken_step=step)
    rank.rest(f"has step {step} and has not asked for the next")


def wait_for_opening(
    ready: Callable[[float], bool], role: str, limit_s: float, board: Board
) -> None:
    """Wait until a plane that opens has the answer of ``role``.

    The duration depends on the data, so the limit is on the time without any progress.

    Raises:
        UnavailableError: The limit passed; names the role that causes the wait, and why.
        OmniloadError: ``ready`` raised it.
    """
    opening = Wait(
        who="the data plane", what="its start", first=role, limit_s=limit_s, while_still=True
    )
    wait_until(ready, opening, board)


def heard_within(limit_s: float, taken_over: "Future[None]", name: str) -> None:
    """Wait until a loader knows which sources and samples it takes over.

    Raises:
        UnavailableError: The planner, or the loader, was late; the caller may try again.
    """
    try:
        taken_over.result(limit_s)
    except TimeoutError as error:
        raise UnavailableError(
            f"within {limit_s:.0f} s the planner has not begun the take-over by {name}, or {name} does not answer; "
            "omniload mix top shows what they wait for"
        ) from error


def taken_within(
    answer: "Future[Taken]", limit_s: float = _ANSWER_S, what: str = "a change of the mix"
) -> Taken:
    """Wait for a planner to apply a change; if it has not begun by the limit, the change is withdrawn.

    Raises:
        UnavailableError: The change is withdrawn, and nothing has changed; or the planner has begun and not finished.
        OmniloadError: The change is refused.
    """
    # If the planner has begun, the change cannot be cancelled any more, and the wait continues below.
    if not futures.wait([answer], limit_s).done and answer.cancel():
        raise UnavailableError(
            f"the planner did not begin to apply {what} within {limit_s:.0f} s, so the request is withdrawn: ask again"
        )
    try:
        return answer.result(limit_s)
    except TimeoutError as error:
        # The cause is a journal on a store that does not answer. That is no defect, and the change is not withdrawn.
        raise UnavailableError(
            f"the planner has begun to apply {what}, has not finished within {limit_s:.0f} s more, and may still "
            "finish: see what it waits for (omniload mix top) and which edits the run has (omniload mix show) before "
            "you ask again"
        ) from error
