"""Where the ranks of a job leave notes for each other before there is a plane: a shared folder, or torch's store.

A note is JSON text under a key, and is written once.
"""

import os
import secrets
import socket
import threading
import time
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from omniload.base.errors import ConfigError, system_refusals
from omniload.base.reading import read_small_file

__all__ = ["FolderRendezvous", "NoteServer", "Rendezvous", "fetch_note"]

_POLL_S = 0.05
"""Time between looks at a shared folder, because a file written on another host causes no event."""
_LARGEST_NOTE_BYTES = 1 << 20
_TAKEN_S = 5.0
"""Longest time that a client may take to read a note."""


class Rendezvous(Protocol):
    """Where ranks leave notes for each other; each note is written once."""

    @abstractmethod
    def post(self, key: str, text: str) -> bool:
        """Write a note; return false if another process has written it before."""
        ...

    @abstractmethod
    def read(self, key: str, timeout_s: float) -> str | None:
        """Return a note; ``None`` if it is not written within the time."""
        ...


class FolderRendezvous(Rendezvous):
    """Keeps notes as files of a folder that all ranks see."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder``, created if it is missing, with access for its owner alone.

        Raises:
            ConfigError: The folder cannot be created or written.
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
        with system_refusals(f"address {str(self._folder)!r}"):
            return self._posted(self._place(key), text)

    def _posted(self, place: Path, text: str) -> bool:
        draft = place.with_name(f"{place.name}.{secrets.token_hex(4)}.draft")
        # Access is restricted from the start, because notes contain the secret of the plane's Ray.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 -- created with its mode
                file.write(text)
            # A link fails if the note exists already; a rename would replace it.
            os.link(draft, place)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    @override
    def read(self, key: str, timeout_s: float) -> str | None:
        place, until_s = self._place(key), time.monotonic() + timeout_s
        with system_refusals(f"address {str(self._folder)!r}"):
            while not place.exists():
                if time.monotonic() >= until_s:
                    return None
                time.sleep(min(_POLL_S, timeout_s))
            note = read_small_file(place, most_bytes=_LARGEST_NOTE_BYTES, what="a note of this job")
        # Bytes that are no text cannot be a note of ours; the reader reports this with the rank that wrote them.
        return note.decode(errors="replace")

    def _place(self, key: str) -> Path:
        return self._folder / key.replace("/", ".")


class NoteServer:
    """Serves one note over TCP, to hosts that share no folder."""

    def __init__(self, host: str, port: int) -> None:
        """Listen; clients that connect before ``serve`` wait for the note.

        Raises:
            ConfigError: The host is not this one, or another process listens there.
        """
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"address {host}:{port} cannot be listened on: {error}; give an address of this host, and a port that "
                "is free"
            ) from error
        self._closed, self._thread = threading.Event(), threading.Thread()

    def serve(self, note: bytes) -> None:
        """Send the note to every client, including those that wait for it."""

        def answer() -> None:
            while not self._closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                    with connection:
                        connection.settimeout(_TAKEN_S)
                        connection.sendall(note)
                except OSError:
                    # An error of one connection, of one connection too many, or of the listener that closes.
                    self._closed.wait(_POLL_S)

        self._thread = threading.Thread(target=answer, name="omniload-note", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._closed.set()
        # Closing a listener alone would leave its thread waiting.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()


def fetch_note(host: str, port: int, within_s: float, most_bytes: int) -> bytes:
    """Return the note of a ``NoteServer``; empty if none arrives in time, or if it is longer than allowed."""
    until_s, content = time.monotonic() + within_s, b""
    try:
        with socket.create_connection((host, port), within_s) as line:
            while len(content) <= most_bytes:
                line.settimeout(max(_POLL_S, until_s - time.monotonic()))
                if not (part := line.recv(1 << 16)):
                    return content
                content += part
    except OSError:  # no process listens there, or no host has that name
        return b""
    return b""
