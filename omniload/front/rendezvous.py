"""How the ranks of a job find one plane: the first one brings it up, the others read where it is.

::

    rank 0   start Ray ── read "here/1", "here/2" ── post "hosts" ── open the plane ── post "plane" ── read "joined/1"
    rank 1                post "here/1" ──────────── read "hosts" ──────────────────── read "plane" ── post "joined/1"
    rank 2                post "here/2" ──────────── read "hosts" ── its host's node ── post "node/2" ── and so on

The first rank of each other host starts a node of Ray there, and rank 0 waits for "node/2" before
it opens the plane.

What is posted is JSON text. A rank that fails posts its error in place of what it was to post,
so that no other waits for it.
"""

import os
import secrets
import socket
import time
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from pydantic import ValidationError
from typing_extensions import override

from omniload.actors.address import Head, HostPlace, PlaneAddress
from omniload.base.config import StrictModel
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)

__all__ = [
    "Arrival",
    "Failure",
    "FolderRendezvous",
    "Invitation",
    "Joined",
    "Muster",
    "NodeUp",
    "Rendezvous",
    "read_as",
    "wait_for_ranks",
]

_POLL_S = 0.05
"""Between looks at a shared folder: a file of another host brings no event."""
_LARGEST_NOTE_BYTES = 1 << 20
_KINDS: tuple[type[OmniloadError], ...] = (
    ConfigError,
    UnavailableError,
    StateError,
    IntegrityError,
)


Note = TypeVar("Note", bound=StrictModel)


class Rendezvous(Protocol):
    """Where ranks leave notes for each other; each note is written once."""

    @abstractmethod
    def post(self, key: str, text: str) -> bool:
        """Write a note; return false where another process has written it before."""
        ...

    @abstractmethod
    def read(self, key: str, timeout_s: float) -> str | None:
        """Return a note, ``None`` where it was not written within the time."""
        ...


class Failure(StrictModel):
    """In place of a note: why it will not come."""

    failed: Literal["ConfigError", "UnavailableError", "StateError", "IntegrityError", "Fault"]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the note of an error."""
        kind = next((k.__name__ for k in _KINDS if isinstance(error, k)), "Fault")
        return cls.model_validate({"failed": kind, "message": str(error) or repr(error)})

    def error(self, rank: int) -> OmniloadError:
        """Return the error as another rank raises it."""
        kind = next((k for k in _KINDS if k.__name__ == self.failed), UnavailableError)
        return kind(f"rank {rank}: {self.message}")


class Arrival(StrictModel):
    """What another rank posts first."""

    version: Literal[1] = 1
    host: str
    """Number of its host."""
    name: str
    """Name of its host."""
    dp_rank: int
    fetches: bool = True
    """Whether it asks the data plane itself; a peer along tp, pp or ep has its batches from another rank."""


class Muster(StrictModel):
    """What rank 0 posts once it knows where all ranks are."""

    version: Literal[2] = 2
    head: Head | None
    """The plane's Ray; its secret is as private as the rendezvous, and that as the job. ``None``: threads of rank 0."""
    first_of: dict[str, int]
    """Rank that starts the node of each other host."""


class NodeUp(StrictModel):
    """What that rank posts."""

    version: Literal[1] = 1
    place: HostPlace


class Invitation(StrictModel):
    """What rank 0 posts once the plane is up."""

    version: Literal[3] = 3
    plane: PlaneAddress | None
    """Where it is; ``None`` for threads of rank 0, which alone asks them."""
    mix: str
    """Digest of the mix and its settings."""
    dp_size: int
    cp_size: int


class Joined(StrictModel):
    """What another rank posts when it has its handle."""

    version: Literal[1] = 1
    host: str
    pid: int


class FolderRendezvous(Rendezvous):
    """Notes as files of a folder that all ranks see."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder``, made where it is missing, for its owner alone.

        Raises:
            ConfigError: It cannot be made or written.
        """
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"address {str(folder)!r} cannot be used: {error.strerror}; name a folder that all ranks can write"
            ) from error

    @override
    def post(self, key: str, text: str) -> bool:
        place = self._place(key)
        draft = place.with_name(f"{place.name}.{secrets.token_hex(4)}.draft")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 -- made with its mode
            file.write(text)
        try:
            # A link fails where the note is there already; a rename would replace it.
            os.link(draft, place)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    @override
    def read(self, key: str, timeout_s: float) -> str | None:
        place, until_s = self._place(key), time.monotonic() + timeout_s
        while not place.exists():
            if time.monotonic() >= until_s:
                return None
            time.sleep(min(_POLL_S, timeout_s))
        if place.stat().st_size > _LARGEST_NOTE_BYTES:
            raise ConfigError(
                f"{place} holds {place.stat().st_size} bytes, more than the {_LARGEST_NOTE_BYTES} of a note; "
                "name a folder of this job alone"
            )
        return place.read_text(encoding="utf-8")

    def _place(self, key: str) -> Path:
        return self._folder / key.replace("/", ".")


def read_as(
    rendezvous: Rendezvous, key: str, kind: type[Note], *, of_rank: int, timeout_s: float
) -> Note | None:
    """Read another rank's note.

    Returns:
        The note; ``None`` where it did not come in time.

    Raises:
        OmniloadError: What the other rank failed with.
        ConfigError: The note is of another release, or damaged.
    """
    text = rendezvous.read(key, timeout_s)
    if text is None:
        return None
    try:
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
        rendezvous: Where they post.
        keys: Ranks and the keys of their notes.
        timeout_s: Longest wait for all of them.
        kind: Of the notes.
        what: What a rank that has not posted has not done, for the message.

    Raises:
        UnavailableError: Some have not, in the time; their numbers.
        OmniloadError: What one of them failed with.
    """
    until_s = time.monotonic() + timeout_s
    found: dict[int, Note] = {}
    absent = []
    for rank, key in keys:
        left_s = max(0.0, until_s - time.monotonic())
        note = read_as(rendezvous, key, kind, of_rank=rank, timeout_s=left_s)
        if note is None:
            absent.append(rank)
        else:
            found[rank] = note
    if absent:
        raise UnavailableError(
            f"ranks {absent} have not {what} on {socket.gethostname()} within {timeout_s:g} s; "
            "do they run, and do they call omniload.open as often as rank 0? timeout= waits longer"
        )
    return found
