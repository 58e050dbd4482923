"""How a mount ends, told to those who wait for it: the daemon's side, and an unmount that waits.

The kernel lets an unmount return while the daemon behind it still publishes. So each daemon
listens on an abstract socket named for its mount point, and tells whoever connects, one
line of JSON each::

    at once      {"version": 1, "process": 123, "bridge": "device", "watched": false}
    at its end   {"ended": true, "lost": ["path of a file that could not be published"]}

and closes the connection by ending. A connection that closes without the second line is a
daemon that was killed. The kernel frees the name with the process.
"""

import hashlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import orjson

from fusefs.bridge import daemons
from fusefs.bridge.tuning import line_of_mount, mount_table
from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.base.log import get_logger

__all__ = ["Farewell", "Waiter", "umount"]

_LOG = get_logger(__name__)
_PEER = struct.Struct("3i")
_ANSWER_WITHIN_S = 10.0
"""For the first line, which a thread of its own sends."""
_LOOK_EVERY_S = 1.0
_REST_S = 0.1
_MOST_BYTES = 16 << 20


def _address(target: str, uid: int) -> bytes:
    place = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    return f"\0omniload-farewell-{uid}-{place}".encode()


class Farewell:
    """The daemon's side.

    Made before the mount is: from then on the daemon must not ask for its own mount point.

    Args:
        mountpoint: The mount.
        about: What is told at once, beside version and process.
    """

    def __init__(self, mountpoint: str, **about: Any) -> None:  # noqa: ANN401 -- JSON values
        self._target = os.path.realpath(mountpoint)
        self._about = {"version": 1, "process": os.getpid(), **about}
        self._lock = threading.Lock()
        self._waiting: list[socket.socket] = []

    def listen(self) -> None:
        """Answer from now on, in a thread.

        Raises:
            StateError: Another process answers for that mount point.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_address(self._target, os.getuid()))
            listener.listen(16)
        except OSError as error:
            listener.close()
            raise StateError(f"the end of {self._target!r} cannot be told: {error}") from error
        threading.Thread(
            target=self._answer, args=(listener,), name="fusefs-farewell", daemon=True
        ).start()

    def tell(self, lost: Sequence[str]) -> None:
        """Say that all is done that will be done, and which files could not be published."""
        line = orjson.dumps({"ended": True, "lost": list(lost)}) + b"\n"
        with self._lock:
            for peer in self._waiting:
                with suppress(OSError):  # it waits no more
                    peer.sendall(line)

    def _answer(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError as error:
                # Out of descriptors, say. Who asks stays in the queue, and this thread must not end.
                _LOG.warning("who waits for the end of the mount cannot be answered: %s", error)
                time.sleep(_REST_S)
                continue
            peer.settimeout(_ANSWER_WITHIN_S)  # who does not read must not keep us from ending
            try:
                if _uid_of(peer) not in {0, os.getuid()}:
                    raise PermissionError("asked by another user")
                with self._lock:
                    peer.sendall(orjson.dumps(self._about) + b"\n")
                    self._waiting.append(peer)
            except OSError as error:
                _LOG.debug("nobody waits: %s", error)
                peer.close()


class Waiter:
    """One who wants to know how a mount ends.

    Attributes:
        about: What its daemon told of itself: ``process``, ``bridge``, ``watched``.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._rest = b""
        self.about: Mapping[str, Any] = {}

    @classmethod
    def of(cls, mountpoint: str) -> "Waiter | None":
        """Ask the daemon behind a mount; None where none answers (another host's, an image's, an older release's)."""
        target = os.path.realpath(mountpoint)
        owner = _owner(target)
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        waiter = cls(peer)
        try:
            peer.settimeout(_ANSWER_WITHIN_S)
            peer.connect(_address(target, owner))
            is_owners = _uid_of(peer) == owner  # anybody may take an abstract name
            about = orjson.loads(waiter._line() or b"null") if is_owners else None
        except (OSError, orjson.JSONDecodeError) as error:
            _LOG.debug("nobody tells how %s ends: %s", target, error)
            about = None
        except BaseException:
            peer.close()
            raise
        if not isinstance(about, dict) or about.get("version") != 1:
            peer.close()
            return None
        waiter.about = about
        return waiter

    def close(self) -> None:
        """Wait no more."""
        self._peer.close()

    def wait(self, within_s: float, tell: Callable[[float], None]) -> Sequence[str] | None:
        """Wait until the daemon is gone.

        Args:
            within_s: Most seconds.
            tell: Called about once a second with how long it has been.

        Returns:
            Paths of files that could not be published; None where it ended without a word.

        Raises:
            TimeoutError: It is still there.
        """
        begin, lost = time.monotonic(), None
        while True:
            waited = time.monotonic() - begin
            if waited >= within_s:
                raise TimeoutError
            self._peer.settimeout(min(_LOOK_EVERY_S, within_s - waited))
            try:
                line = self._line()
            except TimeoutError:
                tell(time.monotonic() - begin)
                continue
            except ConnectionError:
                line = b""
            if not line:
                return lost
            lost = list(map(str, orjson.loads(line).get("lost", ())))

    def _line(self) -> bytes:
        """Return the next line; nothing at the end."""
        while b"\n" not in self._rest:
            part = self._peer.recv(1 << 16)
            if not part or len(self._rest) > _MOST_BYTES:
                return b""
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _uid_of(peer: socket.socket) -> int:
    uid: int = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    return uid


def _owner(target: str) -> int:
    """Return the user who mounted: root unmounts for others, too."""
    found = re.search(r"\buser_id=(\d+)", line_of_mount(target, mount_table()) or "")
    return int(found[1]) if found is not None else os.getuid()


def _tell_nobody(_: float) -> None:
    """Wait in silence."""


def umount(
    mountpoint: str, *, within_s: float = 300.0, tell: Callable[[float], None] = _tell_nobody
) -> None:
    """Unmount, and wait until the daemon behind it is gone and everything is published.

    Args:
        mountpoint: The mount.
        within_s: Most seconds to wait for the daemon.
        tell: Called about once a second while it waits.

    Raises:
        StateError: It is not a mount, or it is in use; or the daemon ended without a word.
        UnavailableError: The daemon is still there.
        IntegrityError: Files could not be published: what was written last is lost.
    """
    waiter = Waiter.of(mountpoint)
    if waiter is None:
        daemons.umount(mountpoint)
        return
    with closing(waiter):
        daemons.umount(mountpoint)
        process = waiter.about["process"]
        try:
            lost = waiter.wait(within_s, tell)
        except TimeoutError:
            raise UnavailableError(
                f"{mountpoint!r} is unmounted, but its process {process} still works after "
                f"{within_s:g} s and goes on by itself; wait for it to end, and read its log"
            ) from None
    if lost is None:
        raise StateError(
            f"{mountpoint!r} is unmounted, but its process {process} ended before it said that "
            "everything is published; read its log, and run omniload fs verify"
        )
    if lost:
        raise IntegrityError(
            f"{mountpoint!r} is unmounted, and what was written last to {len(lost)} files is lost: "
            f"{', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}; its log says why"
        )
