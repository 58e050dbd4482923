"""How the ranks of a job open one plane together: the notes that they exchange, and how long each rank waits.

::

    rank 0   start Ray ── read "here/1", "here/2" ── post "hosts" ── open the plane ── post "plane" ── read "joined/1"
    rank 1                post "here/1" ──────────── read "hosts" ──────────────────── read "plane" ── post "joined/1"
    rank 2                post "here/2" ──────────── read "hosts" ── its host's node ── post "node/2" ── and so on

The first rank of each other host starts a node of Ray there, and rank 0 waits for "node/2" before it opens the plane. A
rank that fails posts its error in place of its missing notes, so that no other rank waits for them.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from pydantic import ValidationError

from omniload.actors.address import Head, HostPlace, Hosts, PlaneAddress
from omniload.base.clock import Deadline
from omniload.base.config import StrictModel
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.base.linux.network import LOOPBACK, host_id
from omniload.front.launch import Launch, Place
from omniload.front.mix_values import MixValues
from omniload.front.rendezvous import Rendezvous

__all__ = [
    "Arrival",
    "Failure",
    "HostAssignment",
    "Invitation",
    "Joined",
    "Meeting",
    "NodeUp",
    "read_as",
    "wait_for_ranks",
]

_A_FOLDER_EACH = ", and each start of the job a folder of its own where address= names one"
_MOST_LETTERS = 512 << 10
"""Most letters of a note of values. A rank does not read a note of 1 MiB."""
_TURNS = 4
"""Reads that one limit is divided into. torch's store logs a warning for each read without a note."""
_THERE_S = 1.0
"""Longest wait for a note that was posted before another note that has been read."""
_LEAVE_S, _STUCK_S = 10.0, 12.0
"""Longest wait for a last note, and for a rendezvous that does not keep to its own limit."""
_KINDS: tuple[type[OmniloadError], ...] = (
    ConfigError, UnavailableError, StateError, IntegrityError
)  # fmt: skip
Note = TypeVar("Note", bound=StrictModel)
Answer = TypeVar("Answer")


class Failure(StrictModel):
    """Takes the place of a note that will not come, and says why."""

    failed: Literal["ConfigError", "UnavailableError", "StateError", "IntegrityError", "Fault"]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the note for an error."""
        # Looked up in a short list, so that a note of another rank cannot choose any other class to raise here.
        kind = next((k.__name__ for k in _KINDS if isinstance(error, k)), "Fault")
        return cls.model_validate({"failed": kind, "message": str(error) or repr(error)})

    def error(self, rank: int) -> OmniloadError:
        """Return the error as another rank raises it."""
        # A defect of that rank is no defect of this rank, which only lacks a rank.
        kind = next((k for k in _KINDS if k.__name__ == self.failed), UnavailableError)
        return kind(f"rank {rank}: {self.message}")


class Arrival(StrictModel):
    """First note of every rank except rank 0: where it runs."""

    version: Literal[1] = 1
    host: str
    """Number of its host."""
    name: str
    """Name of its host."""
    dp_rank: int
    fetches: bool = True
    """Whether the rank asks the data plane itself; a peer along tp, pp or ep gets its batches from another rank."""


class HostAssignment(StrictModel):
    """Note of rank 0 once it knows the hosts of all ranks: the plane's Ray, and the ranks that start its nodes."""

    version: Literal[2] = 2
    head: Head | None
    """The plane's Ray; ``None``: threads of rank 0. Its secret is as private as the rendezvous, and so as the job."""
    first_of: dict[str, int]
    """Rank that starts the node, for each other host."""


class NodeUp(StrictModel):
    """Note of a rank that has started its host's node."""

    version: Literal[1] = 1
    place: HostPlace


class Invitation(StrictModel):
    """Note of rank 0 once the plane is up."""

    version: Literal[5] = 5
    plane: PlaneAddress | None
    """Address of the plane; ``None`` if the plane runs in threads of rank 0, which alone asks them."""
    deals: bool = False
    """Whether rank 0 sends every rank its batches, as for a plane next to another one."""
    mix: str
    """Digest of the mix and its settings."""
    dp_size: int
    cp_size: int
    step: int
    """Step that follows the state of rank 0; 0 without a state."""


class Joined(StrictModel):
    """Note of every rank except rank 0 once it has its handle of the plane."""

    version: Literal[1] = 1
    host: str
    pid: int


def read_as(
    rendezvous: Rendezvous, key: str, kind: type[Note], *, of_rank: int, timeout_s: float
) -> Note | None:
    """Return another rank's note; ``None`` if it is late, not counting time in which this process was stopped.

    Raises:
        OmniloadError: The error that the other rank failed with.
        ConfigError: The note is of another release, or damaged.
    """
    return _read_by(rendezvous, key, kind, of_rank, Deadline(timeout_s))


def _read_by(
    rendezvous: Rendezvous, key: str, kind: type[Note], of_rank: int, deadline: Deadline
) -> Note | None:
    """Read a note as ``read_as``, within a limit that may be shared."""
    # In turns: if this process is stopped during a turn, its elapsed part is unknown, and the turn counts in full.
    turn_s = deadline.limit_s / _TURNS
    while (text := deadline.wait(partial(rendezvous.read, key), turn_s)) is None:
        if deadline.left_s() <= 0:
            return None
    try:
        # A failure is stored under the key of the note that it replaces, so it is checked first.
        raise Failure.model_validate_json(text).error(of_rank)
    except ValidationError:
        pass
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"the note {key!r} of rank {of_rank} is not of this release ({error.error_count()} faults); install "
            "one release on all ranks"
        ) from error


def wait_for_ranks(
    rendezvous: Rendezvous,
    keys: Iterable[tuple[int, str]],
    timeout_s: float,
    kind: type[Note],
    what: str = "joined the plane of rank 0",
) -> dict[int, Note]:
    """Wait until every other rank has posted a note, and return the notes.

    Args:
        rendezvous: Where the ranks post.
        keys: Ranks and the keys of their notes.
        timeout_s: Longest wait for all of them.
        kind: Model of the notes.
        what: Action that a missing rank has not done, for the message.

    Raises:
        UnavailableError: Some ranks have not posted in time; names their numbers.
        OmniloadError: The error that one of the ranks failed with.
    """
    # One limit for all notes, because they arrive at the same time but are read one after another.
    deadline = Deadline(timeout_s)
    found: dict[int, Note] = {}
    absent = []
    for rank, key in keys:
        if (note := _read_by(rendezvous, key, kind, rank, deadline)) is None:
            absent.append(rank)
        else:
            found[rank] = note
    if absent:
        raise UnavailableError(
            f"ranks {absent} have not {what} on {socket.gethostname()} within {timeout_s:g} s; "
            "do they run, and do they call omniload.open as often as rank 0? timeout= waits longer"
        )
    return found


@dataclass(frozen=True, slots=True)
class Meeting:
    """One rank's side of one opening of a plane."""

    rendezvous: Rendezvous
    prefix: str
    """Prefix of keys that distinguishes this opening from others of the job."""
    launch: Launch
    place: Place
    timeout_s: float
    """Longest wait for the next action of another rank."""
    _is_stuck: threading.Event = field(default_factory=threading.Event, init=False, compare=False)
    """Set if the rendezvous does not answer on the way out; it is not asked anything more."""

    def post(self, key: str, text: str) -> bool:
        """Write a note of this opening; see ``Rendezvous.post``."""
        return self.rendezvous.post(f"{self.prefix}/{key}", text)

    def fail(self, error: BaseException) -> None:
        """Post the error in place of every note that this rank has not posted yet."""
        rank, text = self.launch.rank, Failure.of(error).model_dump_json()
        owed = ("hosts", "plane") if rank == 0 else ("here", "node", "joined")
        # A note is written only once, so notes posted before stay as they are.

        def tell() -> None:
            for key in owed:
                self.post(key if rank == 0 else f"{key}/{rank}", text)

        self._on_the_way_out(tell)

    def _on_the_way_out(self, ask: Callable[[], Answer]) -> Answer | None:
        """Return the answer to a last question, or ``None``, because a store out of reach may never answer."""
        answers: list[Answer] = []

        def run() -> None:
            with suppress(OmniloadError):  # no rank is left to read it, or the store takes no notes
                answers.append(ask())

        if not self._is_stuck.is_set():
            leaving = threading.Thread(target=run, name="omniload-leaves", daemon=True)
            leaving.start()
            leaving.join(_STUCK_S)
            if leaving.is_alive():
                self._is_stuck.set()
        return answers[0] if answers else None

    # Actions of rank 0.

    def gather(self, head: Head | None) -> Hosts:
        """Wait for all ranks, and for a node on every host but this one; see ``Gather``.

        Args:
            head: The plane's Ray; ``None`` if this rank alone asks the plane.

        Raises:
            ConfigError: Ranks are on several hosts, and this rank listens on loopback.
            UnavailableError: A rank does not come in time.
            OmniloadError: The error that another rank failed with.
        """
        here = host_id()
        everybody = self._notes("here", range(1, self.launch.world_size), Arrival, "joined rank 0")
        # Peers of a rank that fetches do not ask the plane.
        arrivals = {rank: arrival for rank, arrival in everybody.items() if arrival.fetches}
        first_of: dict[str, int] = {}
        for rank, arrival in arrivals.items():
            if arrival.host != here:
                first_of.setdefault(arrival.host, rank)
        if head is None:
            first_of.clear()  # no rank needs a node; another count of ranks is refused at the join
        elif first_of and head.cluster.startswith(f"{LOOPBACK}:"):
            names = [arrivals[rank].name for rank in first_of.values()]
            raise ConfigError(
                f"ranks {sorted(first_of.values())} are on {names}, other hosts than rank 0's, {socket.gethostname()}, "
                "and the data plane listens on loopback; set runtime.bind in the mix to an interface such as eth0, a "
                "network such as 10.0.0.0/8, or auto"
            )
        self.post("hosts", HostAssignment(head=head, first_of=first_of).model_dump_json())
        # Read after the assignment was posted, because it tells ranks to start nodes.
        nodes = self._notes("node", first_of.values(), NodeUp, "started the node of their host")
        # Rank 0 posts no arrival, and is on this host.
        host_of_R = [here] * self.place.dp_size
        for arrival in arrivals.values():
            # A rank with another count of ranks is refused when it joins, when both counts are known.
            if arrival.dp_rank < len(host_of_R):
                host_of_R[arrival.dp_rank] = arrival.host
        return Hosts(
            host_of_R=host_of_R,
            elsewhere={host: nodes[rank].place for host, rank in first_of.items()},
        )

    def invite(self, invitation: Invitation, values: MixValues) -> None:
        """Post the plane's address, and before it the values of the mix, for ranks that open another mix.

        Raises:
            ConfigError: Another process has posted the note as rank 0.
        """
        told = values.model_dump_json()
        if len(told) <= _MOST_LETTERS:
            self.post("mix", told)
        if not self.post("plane", invitation.model_dump_json()):
            raise ConfigError(
                "another process has brought up the plane as rank 0 of this job already; give each process its rank "
                f"({self.launch.found_in}){_A_FOLDER_EACH}"
            )

    def wait_until_joined(self, ranks: Iterable[int]) -> None:
        """Wait for ranks other than rank 0; see ``wait_for_ranks``."""
        self._notes("joined", ranks, Joined, "joined the plane of rank 0")

    def wait_until_left(self, ranks: Iterable[int]) -> int | None:
        """Wait until ranks have posted that they left, for ten seconds each at most; return the first that has not."""
        for rank in ranks:
            # After one late rank, no other is waited for, so that a job of a thousand killed ranks ends immediately.
            if self._last_read(f"left/{rank}") is None:
                return rank
        return None

    def end(self) -> None:
        """Post that the plane has ended."""
        self._on_the_way_out(lambda: self.post("ended", "{}"))

    # Actions of all other ranks.

    def arrive(self) -> HostAssignment:
        """Post this rank's host, and wait until rank 0 knows the hosts of all ranks.

        Raises:
            ConfigError: Another process has this rank.
            UnavailableError: Rank 0 does not answer in time.
            OmniloadError: The error that rank 0 failed with.
        """
        note = Arrival(
            host=host_id(),
            name=socket.gethostname(),
            dp_rank=self.place.dp_rank,
            fetches=self.place.fetches(self.launch.rank),
        )
        self._once("here", note)
        return self._from_0("hosts", HostAssignment, "started the plane's Ray")

    def invitation(self) -> Invitation:
        """Wait until the plane is up; raises the errors of ``arrive``."""
        return self._from_0("plane", Invitation, "brought up the plane")

    def values_of_0(self) -> MixValues | None:
        """Return the values of rank 0's mix, after its invitation; ``None`` if they were too long for a note."""
        key = f"{self.prefix}/mix"
        return read_as(self.rendezvous, key, MixValues, of_rank=0, timeout_s=_THERE_S)

    def join(self) -> None:
        """Post that this rank has its handle."""
        self._once("joined", Joined(host=socket.gethostname(), pid=os.getpid()))

    def wait_until_ended(self) -> None:
        """Wait until the plane has ended, for ten seconds at most."""
        self._last_read("ended")

    def leave(self) -> None:
        """Post that this rank does not ask the plane any more."""
        self._on_the_way_out(lambda: self.post(f"left/{self.launch.rank}", "{}"))

    def _last_read(self, key: str) -> str | None:
        return self._on_the_way_out(lambda: self.rendezvous.read(f"{self.prefix}/{key}", _LEAVE_S))

    def _once(self, key: str, note: Arrival | Joined) -> None:
        if not self.post(f"{key}/{self.launch.rank}", note.model_dump_json()):
            raise ConfigError(
                f"another process has joined as rank {self.launch.rank} of this job already; give each process its "
                f"own rank ({self.launch.found_in}){_A_FOLDER_EACH}"
            )

    def _notes(
        self, key: str, ranks: Iterable[int], kind: type[Note], what: str
    ) -> dict[int, Note]:
        keys = [(rank, f"{self.prefix}/{key}/{rank}") for rank in ranks]
        return wait_for_ranks(self.rendezvous, keys, self.timeout_s, kind, what)

    def _from_0(self, key: str, kind: type[Note], what: str) -> Note:
        note = read_as(
            self.rendezvous, f"{self.prefix}/{key}", kind, of_rank=0, timeout_s=self.timeout_s
        )
        if note is None:
            raise UnavailableError(
                f"rank {self.launch.rank}: rank 0 has not {what} within {self.timeout_s:g} s; does it "
                "run, and does it call omniload.open as often as this rank? timeout= waits longer"
            )
        return note
