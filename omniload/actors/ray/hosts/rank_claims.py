"""Which process has which rank, and which ranks a planner that took over need not wait for.

A rank tells each planner anew what it has, within a second. One that ended beside the planner before never does: of
this host its lock tells that, of another host the board of its heartbeats.
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
"""A longer time between two looks is one in which this process did not run: it says nothing of others."""


def claim_rank(board: Path, name: str, guest: str = "") -> FileLock:
    """Take a rank of a plane on this host.

    Args:
        board: Folder of the host's heartbeats.
        name: Of the rank.
        guest: The process of another host that it is for, if any.

    Raises:
        StateError: It has a handle already, or one on another host has had it; names the process.
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
                f"{name} of this data plane was taken by {holder}; number every rank once, and where that one has "
                "ended count a change: join with step= and the next generation="
            )
    forget_generations(board)  # here: of hosts besides its own the planner sees no file
    return lock


def claim_for_guest(board: Path, name: str, guest: str) -> None:
    """Take a rank for a process of another host, for good: whether that lives is not seen here.

    Raises:
        OmniloadError: As ``claim_rank``.
    """
    # Held meanwhile: of two who want it at once, one is refused.
    with closing(claim_rank(board, name, guest)):
        write_whole(guest_of(board, name), guest.encode())


def was_claimed(board: Path, name: str) -> bool:
    """Tell whether a rank of a plane was taken on this host, by one that lives or is lost."""
    return lock_of(board, name).exists()


@dataclass(slots=True)
class LostRanks:
    """Looks at ranks that are not heard of, again and again."""

    folder: Path
    """Of the heartbeats and the locks of this host."""
    board: Board
    """Heartbeats of all hosts: of a rank of another one they tell whether it has ended."""
    silent_s: float | None
    """Without a heartbeat for so long a rank is lost; ``None`` for never, where one that is stopped would be missed."""
    _beats: dict[str, Watched] = field(default_factory=dict, init=False)
    _looked_s: float | None = field(default=None, init=False)

    def look(self, world: World, ranks: Iterable[Rank], now_s: float) -> dict[Rank, str]:
        """Return those of some ranks of a world that are lost, each with what is seen of it.

        A rank that nobody has taken yet is none of them: it may come.
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
        except OSError:  # nobody has taken it here
            # Where ranks come and go, the heartbeat of this name is of the ranks of before: another one is to come.
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
    """Look, in a thread of its own, at ranks of which nothing is heard, until all are heard or ``left`` is set.

    Args:
        unheard: Returns the ranks of now, and those of them that are not heard of.
        lose: Is told of those that are lost, each once, and of their generation.
        lost: Says which are.
        left: Ends it.
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
        f"{', '.join(lost)}, and has told the planner that took over nothing: the other ranks go on to the last step "
        f"that was planned, and as far as is planned ahead; {AFTER_A_RANK}"
    )
