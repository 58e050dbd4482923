"""A planner's journal: its place, its continuation and its records; and the times that ranks write next to it."""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import OmniloadError, UnavailableError, project_error, system_refusals
from omniload.base.log import get_logger
from omniload.base.retry import with_retries
from omniload.machine.messages import (
    AppendBase,
    AppendJournal,
    AppendWorld,
    PlannerCommand,
    TimesRead,
)
from omniload.machine.plans.ahead import PlanningAhead
from omniload.machine.plans.fences import CutJournal
from omniload.mix.edits.edit import said_of
from omniload.mix.edits.edits_file import write_history
from omniload.mix.edits.found import never_reached
from omniload.mix.edits.history import History
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.place import journal_at
from omniload.mix.journal.room import GIVE_UP_S, WAITS_S, Room
from omniload.mix.journal.storage import JournalStorage
from omniload.mix.journal.times import NO_TIMES, times_since
from omniload.mix.run_record import latest_start_s

__all__ = [
    "Kept",
    "claimed_place",
    "keep",
    "keep_edits",
    "open_journal",
    "report_times",
    "warn_of_edits",
]

_LOG = get_logger(__name__)
Kept = AppendJournal | AppendBase | AppendWorld | CutJournal
"""Commands of a planner that the journal records."""


def keep(journal: Journal, commands: Iterable[PlannerCommand]) -> None:
    """Write a window of steps to the journal, all or nothing, before any of them is published."""
    with journal.together():
        for command in commands:
            assert isinstance(command, Kept), "for the journal"
            if isinstance(command, AppendJournal):
                journal.append(command.record)
            elif isinstance(command, AppendWorld):
                journal.append_world(command.world.to_json())
            elif isinstance(command, CutJournal):
                journal.cut(command.step)
            else:
                journal.append_base(command.content, command.state.digest())


def keep_edits(
    run_dir: Path | None,
    history: History,
    journal: Journal | None,
    room: Room,
    doing: AbstractContextManager[Callable[[str], None]],
) -> None:
    """Make edits durable, inside ``doing``; without a folder there is nothing to do, as nobody can continue the run."""
    if run_dir is not None:
        # The successor of a planner that is wrongly believed dead may have kept other edits.
        if journal is not None:
            journal.require_claim()
        # Before the later commands, so that no step is journaled under an edit that would be lost.
        with doing as room.says:
            write_history(run_dir, history, room)


@system_refusals("the run's journal")
def open_journal(
    folder: Path | None, planner: PlanningAhead, *, durable: bool = True
) -> Journal | None:
    """Open the run's journal, continuing the one that leads up to the planner's state.

    Args:
        folder: Folder of the run, or a temporary one; ``None`` for no journal.
        planner: The planner.
        durable: Whether it is the run's folder; then the mix says where the journal lies.
    """
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    state = planner.state
    place = claimed_place(folder, planner.mix.runtime.journal if durable else "")
    begin, digest = planner.state_at(state.step), state.digest()
    journal = Journal.leading_up(
        place, begin, digest, durable=durable, keep_steps=planner.mix.runtime.journal_steps
    )
    # The run may continue with other ranks than the last ones in the journal.
    if journal.has_worlds:
        journal.append_world(planner.world.to_json())
    return journal


@system_refusals("the run's journal")
def claimed_place(
    folder: Path, url: str, room: Room | None = None, clock: Clock | None = None
) -> Path | JournalStorage:
    """Claim a planner's journal and return its place; earlier holders cannot add to it any more.

    A planner that takes over asks a store that does not answer again, as long as the record of a step would wait, since
    the old planner may have been lost in the same outage. A user who opens a plane gets the error at once.

    Args:
        folder: Folder of the run.
        url: As for ``journal_at``.
        room: For a planner that takes over: shows what it waits for, and waits if there is no room on the disk;
            ``None`` to raise errors at once.
        clock: Clock for the waits between attempts; by default the machine's.
    """
    place = (
        journal_at(folder, url)
        if room is None
        else _opened_patiently(folder, url, room, clock or SystemClock())
    )
    if not isinstance(place, Path):
        # A store has no locks, so the claim is written there, and an earlier holder finds it changed.
        place.room = room
        place.claim()
    return place


def _opened_patiently(folder: Path, url: str, room: Room, clock: Clock) -> Path | JournalStorage:
    until_s, has_refused = clock.now_s() + GIVE_UP_S, False

    def tell(error: UnavailableError, wait_s: float) -> None:
        nonlocal has_refused
        has_refused = True
        _LOG.warning("the journal is opened again in %.1f s: %s", wait_s, error)
        # These words are part of each heartbeat, so only the log has the whole error.
        room.says(f"opens the journal again, as its store refused ({error!s:.200}),")

    place = with_retries(
        *(lambda: journal_at(folder, url), WAITS_S, clock.sleep),
        *(tell, lambda: until_s - clock.now_s()),
    )
    if has_refused:
        room.says("")
    return place


def warn_of_edits(history: History, end: int) -> None:
    """Warn of edits that a run which ends before step ``end`` does not reach."""
    for edit in never_reached(history, end):
        _LOG.warning(
            "the run ends before edit %d takes effect: %s", edit.revision, said_of(edit.change)
        )


def report_times(
    run_dir: Path | None,
    first: int,
    tell: Callable[[TimesRead], None],
    fail: Callable[[OmniloadError], None],
) -> None:
    """Report the latest compute times of a run's steps from ``first`` on; none if they cannot be read.

    Args:
        run_dir: Folder of the run; ``None`` for a plane without one.
        first: The first step of interest.
        tell: Receives the times, in a thread, because a network folder may hang and the planner has steps to plan.
        fail: Receives a defect that prevented the reading.
    """

    def read() -> None:
        times = NO_TIMES
        try:
            if run_dir is not None:
                times = times_since(run_dir, first, latest_start_s(run_dir))
        except OmniloadError as error:
            # A failure here must not end the run; the present cost stays.
            _LOG.warning("no cost is fitted now: %s", error)
        except Exception as error:  # noqa: BLE001 -- the outermost call of its thread: the planner must hear of it
            fail(project_error(error, "the reader of compute times"))
            return
        tell(TimesRead(times=times))

    threading.Thread(target=read, name="omniload-planner-times", daemon=True).start()
