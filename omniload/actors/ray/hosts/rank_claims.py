"""Claims of ranks by processes, and the ranks that a planner which took over need not wait for.

Within a second, each rank reports to a new planner what it has. A rank that ended together with the previous planner
never reports. The end of a rank on this host shows by its lock, the end of a rank on another host by the board of its
heartbeats.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from omniload.actors.heartbeat_board import Board
from omniload.actors.rank_locks import forget_generations, guest_of, lock_of, name_in, take
from omniload.base.errors import StateError, UnavailableError
from omniload.base.linux.file_lock import FileLock, is_locked
from omniload.base.log import get_logger
from omniload.base.writing import write_whole
from omniload.machine.progress import AFTER_A_RANK, Progress, Watched, rank_name
from omniload.machine.steps import Rank
from omniload.plan.world import World

__all__ = ["LostRanks", "claim_for_guest", "claim_rank", "was_claimed", "watch_unheard"]

_LOG = get_logger(__name__)
_LOOK_S = 0.25
_LONGEST_LOOK_S = 1.0
"""A longer time between two looks means that this process did not run, so it says nothing about other processes."""


def claim_rank(board: Path, name: str, guest: str = "") -> FileLock:
    """Claim a rank of a plane on this host.

    Args:
        board: Folder of the host's heartbeats.
        name: Name of the rank.
        guest: The process of another host that the rank is claimed for, if any.

    Raises:
        StateError: The rank has a handle already, or a process of another host had it; names the process.
        UnavailableError: The folder of the host's heartbeats cannot be used.
    """
    try:
        lock = take(lock_of(board, name))
    except BlockingIOError as error:
        raise StateError(
            f"{name} of this data plane has a handle already, in {error.strerror}; close it first, "
            "or give each process a rank of its own"
        ) from None
    except OSError as error:
        raise UnavailableError(
            f"the data plane's folder {board} cannot be used: {error.strerror}; the plane has ended, "
            "or runs on another machine"
        ) from error
    with suppress(FileNotFoundError):
        if (holder := guest_of(board, name).read_text(encoding="utf-8")) != guest:
            lock.close()
            raise StateError(
                f"{name} of this data plane was taken by {holder}; give each rank a number of its own. If the rank "
                "that took this number has ended, count a change of the ranks: join with step= and the next "
                "generation="
            )
    forget_generations(board)  # here, because the planner sees no files of other hosts
    return lock


def claim_for_guest(board: Path, name: str, guest: str) -> None:
    """Claim a rank for a process of another host, permanently, because this host cannot see whether that process lives.

    Raises:
        OmniloadError: See ``claim_rank``.
    """
    # The lock is held meanwhile, so that of two simultaneous claims one is refused.
    with closing(claim_rank(board, name, guest)):
        write_whole(guest_of(board, name), guest.encode())


def was_claimed(board: Path, name: str) -> bool:
    """Return whether a rank of a plane was claimed on this host, whether or not the process still lives."""
    return lock_of(board, name).exists()


@dataclass(slots=True)
class LostRanks:
    """Looks repeatedly at ranks that have not reported."""

    folder: Path
    """Folder of this host's heartbeats and locks."""
    board: Board
    """Heartbeats of all hosts; they show whether a rank on another host has ended."""
    silent_s: float | None
    """A rank without a heartbeat for this long is lost. With ``None``, no silence makes a rank lost, because a rank
    that is only stopped would be missed."""
    _beats: dict[str, Watched] = field(default_factory=dict, init=False)
    _looked_s: float | None = field(default=None, init=False)

    def look(self, world: World, ranks: Iterable[Rank], now_s: float) -> dict[Rank, str]:
        """Return the lost ranks among some ranks of a world, each with a description of what was seen.

        A rank that was never claimed is not lost, because it may still come.
        """
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s, passed_s = now_s, passed_s if passed_s <= _LONGEST_LOOK_S else 0.0
        beats, cp_size = self.board.read(), world.tree.size_of("cp")
        lost = {}
        for rank in ranks:
            name = rank_name(*rank, cp_size)
            if why := self._why_lost(name, name_in(world.generation, name), beats, passed_s):
                lost[rank] = f"{name} {why}"
        return lost

    def _why_lost(
        self, name: str, taken_as: str, beats: dict[str, Progress], passed_s: float
    ) -> str:
        lock, beat = lock_of(self.folder, taken_as), beats.get(name)
        try:
            if not guest_of(self.folder, taken_as).exists() and not is_locked(lock):
                return "has ended"
        except OSError:  # no process on this host has claimed it
            # In an elastic run, the heartbeat of this name is of an earlier world's rank, and another will come.
            may_come = self.silent_s is not None or beat is None or not beat.has_ended
            return "" if may_come else "has ended"
        watched = self._beats.setdefault(taken_as, Watched())
        watched.see(beat, is_stopped=False, passed_s=passed_s)
        if self.silent_s is None or watched.silent_s < self.silent_s:
            return ""
        return f"has given no heartbeat for {watched.silent_s:.0f} s"


def watch_unheard(
    unheard: Callable[[], tuple[World, list[Rank]]],
    lose: Callable[[list[Rank], int], None],
    lost: LostRanks,
    left: threading.Event,
) -> None:
    """Look in a thread at ranks that have not reported, until all have reported or are lost, or ``left`` is set.

    Args:
        unheard: Returns the present world, and its ranks that have not reported.
        lose: Receives the lost ranks, each once, and their generation.
        lost: Determines which ranks are lost.
        left: Ends the thread when set.
    """
    told = set[tuple[int, Rank]]()

    def look() -> bool:
        world, ranks = unheard()
        new = [rank for rank in ranks if (world.generation, rank) not in told]
        found = lost.look(world, new, time.monotonic())
        if found:
            told.update((world.generation, rank) for rank in found)
            _LOG.warning("%s", _said_of(found.values()))
            lose(list(found), world.generation)
        return len(new) > len(found)

    def run() -> None:
        while look() and not left.wait(_LOOK_S):
            pass

    threading.Thread(target=run, name="omniload-unheard-ranks", daemon=True).start()


def _said_of(lost: Iterable[str]) -> str:
    return (
        f"{', '.join(lost)}, and has reported nothing to the planner that took over: the other ranks continue to the "
        f"last step that was planned ahead; {AFTER_A_RANK}"
    )
