"""The note that ranks need to join a served plane: in a folder, or at a port of the plane's server.

The note contains the secret of the plane's Ray, so only its owner may read it, and the same is true of the folder. The
note is valid while its server holds its lock or, for other hosts, while the server accepts connections. This matters
because a killed server leaves its note, and Ray would wait minutes for a server that is gone. Hosts without a common
folder get the note from a port of the server.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from omniload.actors.address import PlaneAddress
from omniload.actors.lifeline import answers
from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.base.linux.file_lock import is_locked
from omniload.base.linux.network import host_id
from omniload.base.reading import read_kept_file
from omniload.front.rendezvous import fetch_note

__all__ = ["NOTE_NAME", "PlaneNote", "note_of", "port_of"]

NOTE_NAME = "plane.json"
"""Name of the note's file in a folder."""
_HOST_AND_PORT = re.compile(r"([^/\s:]+):(\d{1,5})")
_LIKE_A_PORT = re.compile(r"[]:][^/]*:\d+$|^\w+://")
"""Matches an IPv6 address with a port, or a URL."""
_MOST_BYTES = 64 << 20
_LARGEST_PORT = 65_535
_LOOK_S = 0.1
"""Seconds between two looks for a plane that is not served yet."""
_ANSWER_S = 5.0
"""Longest wait for a server on another host to accept a connection."""
_ROOT = 0


class PlaneNote(StrictModel):
    """What ranks need to join, and what a loader knows of the mix before it has joined."""

    version: Literal[2] = 2
    plane: PlaneAddress
    token: str
    """Secret of the plane's Ray."""
    names: tuple[str, ...]
    """Names of the sources, by number."""
    vocab_size: int | None
    num_steps: int | None
    """The step after the last; ``None`` if only the mix ends the run."""
    first_step: int
    repeats: bool
    """Whether no source ends."""
    run_dir: Path | None
    """Folder of the run, which keeps losses of documents."""


def port_of(address: str | Path) -> tuple[str, int] | None:
    """Return the host and port that an address names; ``None`` for a folder.

    Raises:
        ConfigError: There is no such port.
    """
    found = _HOST_AND_PORT.fullmatch(address) if isinstance(address, str) else None
    if found is None:
        # Otherwise every host would create a folder of that name and wait in vain.
        if isinstance(address, str) and _LIKE_A_PORT.search(address) and not Path(address).exists():
            raise ConfigError(
                f"address is {address!r}, neither HOST:PORT with a name or an IPv4 address nor a folder that is there; "
                "planes listen on IPv4: give one of the two"
            )
        return None
    if not 0 < int(found[2]) <= _LARGEST_PORT:
        raise ConfigError(
            f"address is {address!r}; ports are 1 to {_LARGEST_PORT}: give one, or a folder"
        )
    return found[1], int(found[2])


def note_of(address: str | Path, timeout_s: float) -> PlaneNote:
    """Wait for the note of a served plane.

    Args:
        address: A folder, or ``HOST:PORT``.
        timeout_s: Longest wait.

    Raises:
        ConfigError: There is no such port, the note is another user's, or its plane listens only for another host.
        IntegrityError: The note was not written by this release.
        UnavailableError: No plane is served there in time.
    """
    place, until_s = Path(address) / NOTE_NAME, time.monotonic() + timeout_s
    at = port_of(address)
    # The note is published whole, so it can be read as soon as it exists.
    while (note := _note_at(place) if at is None else _note_from(*at, until_s)) is None:
        if time.monotonic() >= until_s:
            was = ", and the process that served one has ended, or does not answer"
            why = _unknown(at[0]) if at is not None else was if place.exists() else ""
            raise UnavailableError(
                f"no plane is served at {address} within {timeout_s:g} s{why}; start the "
                "process that calls omniload.serve; on another host, see that runtime.ports are open between them"
            )
        time.sleep(_LOOK_S)
    return note


def _note_at(place: Path) -> PlaneNote | None:
    """Return the note of a plane that is served now; ``None`` without a note, or if its server has ended."""
    try:
        owner = place.stat().st_uid
        # The note decides which Ray this process connects to, and so which code runs in it.
        if owner not in (os.geteuid(), _ROOT):
            raise ConfigError(
                f"{place} is of user {owner}, this rank of {os.geteuid()}; name a folder of its own user"
            )
        content = read_kept_file(place, most_bytes=_MOST_BYTES, what="the address of a plane")
        note = _checked(content, str(place))
        return note if _is_served(note, place) else None
    except FileNotFoundError:
        return None


def _note_from(host: str, port: int, until_s: float) -> PlaneNote | None:
    """Return the note that a server at a port sends; ``None`` if none arrives before ``until_s``."""
    content = fetch_note(host, port, max(_LOOK_S, until_s - time.monotonic()), _MOST_BYTES)
    return _checked(content, f"{host}:{port}") if content else None


def _checked(content: bytes, place: str) -> PlaneNote:
    """Return a note whose plane this host can reach."""
    try:
        note = PlaneNote.model_validate_json(content)
    except ValidationError as error:
        raise IntegrityError(
            f"{place} is no address of a plane that this release serves ({error.error_count()} faults); install one "
            "release everywhere"
        ) from error
    if note.plane.host != host_id() and note.plane.terms is None:
        raise ConfigError(
            f"the plane at {place} runs on another host, and listens on loopback; set runtime.bind in the mix that is "
            "served to an interface such as eth0, or a network such as 10.0.0.0/8"
        )
    return note


def _is_served(note: PlaneNote, place: Path) -> bool:
    """Return whether the process that wrote a note lives."""
    if note.plane.host == host_id():
        return is_locked(place)
    # Locks of another host may be invisible here, so a connection shows whether the process lives.
    return answers(note.plane.lifeline, _ANSWER_S)


def _unknown(host: str) -> str:
    """Return a hint if no host has that name. Asked last, because a host that is starting may get its name late."""
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError as error:
        return f", as no host {host} is known here ({error.strerror})"
    return ""
