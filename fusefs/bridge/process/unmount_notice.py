"""The end of a mount, reported to processes that wait for it: the daemon's side, and an unmount that waits.

The kernel lets an unmount return while the daemon still publishes. So each daemon
listens on an abstract socket named for its mount point, and sends one
line of JSON to each connection at two times::

    at once      {"version": 1, "process": 123, "bridge": "device", "watched": false}
    at its end   {"ended": true, "lost": ["path of a file that could not be published"]}

The end of the process closes the connection. If a connection closes without the second line, the
daemon was killed. The kernel frees the name with the process.
"""

import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import orjson

from fusefs.bridge.process import launch
from fusefs.bridge.process.sockets import address_of, is_taken, peer_name
from fusefs.bridge.process.tuning import holders_of_mount
from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.base.linux.mount_table import fuse_mount_at, mount_point
from omniload.base.linux.socket_peer import peer_of
from omniload.base.log import get_logger
from omniload.base.units import counted

__all__ = ["UnmountClient", "UnmountNotifier", "umount"]

_LOG = get_logger(__name__)
_ANSWER_WITHIN_S = 10.0
"""Seconds for the first line, which a thread of its own sends."""
_LOOK_EVERY_S = 1.0
_REST_S = 0.1
_ASK_AGAIN_AFTER_S = (0.1, 0.2, 0.4)
_MOST_BYTES = 16 << 20


def _address(target: str, uid: int) -> bytes:
    return address_of("farewell", target, uid)


class UnmountNotifier:
    """The daemon's side.

    Make it before the mount: from the mount on, the daemon must not ask for its own mount point.

    Args:
        mountpoint: The mount.
        about: Facts to send at once, in addition to version and process.
    """

    def __init__(self, mountpoint: str, **about: Any) -> None:  # noqa: ANN401 -- JSON values
        self._target = os.path.realpath(mountpoint)
        self._about = {"version": 1, "process": os.getpid(), **about}
        self._lock, self._accepting = threading.Lock(), threading.Lock()
        self._waiting: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._has_let_go = False

    def listen(self) -> None:
        """Answer from now on, in a thread.

        Raises:
            StateError: Another process answers for that mount point.
        """
        if self._has_let_go:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_address(self._target, os.getuid()))
            # Many processes may wait for the end, or ask whether the mount is watched.
            listener.listen(16)
        except OSError as error:
            listener.close()
            raise StateError(
                f"the end of {self._target!r} cannot be reported, so umount will not wait for it: {error}; "
                f"{_who_answers(_address(self._target, os.getuid()))} has the name"
            ) from error
        self._listener = listener
        threading.Thread(
            target=self._answer, args=(listener,), name="fusefs-unmount-notice", daemon=True
        ).start()

    def let_go(self) -> None:
        """Stop answering, because another process has the mount; peers that already wait learn of this one's end."""
        self._has_let_go = True
        if self._listener is None:
            return
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        # Until the thread wakes, the kernel keeps the address, which the next process takes.
        if self._accepting.acquire(timeout=_ANSWER_WITHIN_S):
            self._listener.close()
            self._accepting.release()

    def notify(self, lost: Sequence[str]) -> None:
        """Report that the daemon has finished, and which files could not be published."""
        line = orjson.dumps({"ended": True, "lost": list(lost)}) + b"\n"
        with self._lock:
            for peer in self._waiting:
                with suppress(OSError):  # the peer no longer waits
                    peer.sendall(line)

    def _answer(self, listener: socket.socket) -> None:
        while True:
            try:
                with self._accepting:
                    peer, _ = listener.accept()
            except OSError as error:
                if self._has_let_go:
                    return
                if listener.fileno() < 0:  # closed: no peer is answered any more
                    self._hang_up()
                    return
                # For example, there are no free descriptors. The peer stays in the queue, and this thread must not end.
                _LOG.warning(
                    "a process that waits for the end of the mount cannot be answered: %s", error
                )
                time.sleep(_REST_S)
                continue
            # A peer that does not read must not keep the daemon from ending.
            peer.settimeout(_ANSWER_WITHIN_S)
            try:
                if peer_of(peer)[1] not in {0, os.getuid()}:
                    raise PermissionError("asked by another user")
                # Hold the lock over both steps: a daemon that ends in between would miss a peer that got the first
                # line.
                with self._lock:
                    # Peers that ask about the mount, or find it busy, leave again: their connections must not pile up.
                    self._waiting = _without_gone(self._waiting)
                    peer.sendall(orjson.dumps(self._about) + b"\n")
                    self._waiting.append(peer)
            except OSError as error:
                _LOG.debug("nobody waits: %s", error)
                peer.close()

    def _hang_up(self) -> None:
        with self._lock:
            for peer in self._waiting:
                peer.close()
            self._waiting.clear()


def _without_gone(peers: list[socket.socket]) -> list[socket.socket]:
    """Close the connections that the other side has closed; return the others."""
    poll = select.poll()
    for peer in peers:
        poll.register(peer, select.POLLIN)
    # Peers send nothing here, so a readable peer has hung up.
    gone = {descriptor for descriptor, _ in poll.poll(0)}
    left = []
    for peer in peers:
        if peer.fileno() in gone:
            peer.close()
        else:
            left.append(peer)
    return left


class UnmountClient:
    """The side of a process that waits for a mount's end.

    Attributes:
        about: Facts that the daemon sent about itself: ``process``, ``bridge``, ``watched``.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._rest = b""
        self.about: Mapping[str, Any] = {}

    @classmethod
    def of(cls, mountpoint: str) -> "UnmountClient | None":
        """Ask the daemon of a mount; None if none answers (that of another host, an image or an older release).

        Raises:
            StateError: Another user's process has the daemon's name, or the process does not answer.
        """
        target = mount_point(mountpoint)
        owner = _owner(target)
        address = _address(target, owner)
        for wait_s in (*_ASK_AGAIN_AFTER_S, None):
            try:
                return cls._connected(address, owner)
            except (OSError, orjson.JSONDecodeError) as error:
                _LOG.debug("no process reports how %s ends: %s", target, error)
                if not is_taken(address):
                    return None
                # A process that refuses is about to listen, or to end; a silent one would stay silent.
                if wait_s is None or not isinstance(error, ConnectionError):
                    raise StateError(
                        f"a process has the name at which that of {target!r} would answer, and does "
                        f"not answer ({error}); look for it: grep {address[1:].decode()} /proc/net/unix"
                    ) from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    @classmethod
    def _connected(cls, address: bytes, owner: int) -> "UnmountClient | None":
        """Connect and read the first line; return None if the daemon is of another release."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        waiter = cls(peer)
        try:
            peer.settimeout(_ANSWER_WITHIN_S)
            peer.connect(address)
            _check_owner(peer, owner)
            about = orjson.loads(waiter._line() or b"null")
        except BaseException:
            peer.close()
            raise
        if not isinstance(about, dict) or about.get("version") != 1:
            peer.close()
            return None
        waiter.about = about
        return waiter

    def close(self) -> None:
        """Stop waiting."""
        self._peer.close()

    def wait(self, within_s: float, report: Callable[[float], None]) -> Sequence[str] | None:
        """Wait until the daemon has ended.

        Args:
            within_s: Most seconds.
            report: Called about once a second with the seconds so far.

        Returns:
            Paths of files that could not be published; None if the daemon ended without a report.

        Raises:
            TimeoutError: The daemon still runs.
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
                report(time.monotonic() - begin)
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
            # A daemon names each lost file; a line longer than this limit is not from a daemon.
            if not part or len(self._rest) > _MOST_BYTES:
                return b""
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _check_owner(peer: socket.socket, owner: int) -> None:
    """Check the user of the peer, because any user may take an abstract name.

    Raises:
        StateError: It is another user's process.
    """
    if peer_of(peer)[1] not in {0, owner}:
        raise StateError(
            f"{peer_name(peer)} has the name at which the process behind the mount would answer, "
            f"and user {owner} mounted it; end that process"
        )


def _who_answers(address: bytes) -> str:
    """Return a description of the process that answers at a name."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as peer:
        try:
            peer.settimeout(_LOOK_EVERY_S)
            peer.connect(address)
            return peer_name(peer)
        except OSError:
            return "a process that does not answer"


def _owner(target: str) -> int:
    """Return the user of the mount, because root may unmount for others, too."""
    mount = fuse_mount_at(target)
    found = re.search(r"\buser_id=(\d+)", mount.options if mount else "")
    return int(found[1]) if found is not None else os.getuid()


def _report_nothing(_: float) -> None:
    """Report nothing."""


def umount(
    mountpoint: str, *, within_s: float = 300.0, report: Callable[[float], None] = _report_nothing
) -> None:
    """Unmount, and wait until the daemon has published everything and ended.

    Args:
        mountpoint: The mount.
        within_s: Most seconds to wait for the daemon.
        report: Called about once a second while it waits.

    Raises:
        StateError: It is not a mount, or it is in use; or the daemon ended without a report, or cannot
            be asked, because another process has its name.
        UnavailableError: The daemon still runs.
        IntegrityError: Files could not be published: the last writes are lost.
    """
    try:
        # Connect before the unmount: a daemon with nothing to publish may end a moment later.
        waiter = UnmountClient.of(mountpoint)
    except StateError as error:
        launch.umount(mountpoint)
        raise StateError(
            f"{mountpoint!r} is unmounted, but whether everything is published is not known: {error}, "
            "then read the mount's log, and run omniload fs verify"
        ) from error
    if waiter is None:
        launch.umount(mountpoint)
        return
    with closing(waiter):
        # Look up the mount while it exists: its device identifies processes that hold it in other namespaces.
        mount = fuse_mount_at(mount_point(mountpoint))
        launch.umount(mountpoint)
        process = waiter.about["process"]
        try:
            lost = waiter.wait(within_s, report)
        except TimeoutError:
            if mount is not None and (holders := holders_of_mount(mount.device)):
                raise UnavailableError(
                    f"{mountpoint!r} is unmounted here, but its process {process} still works after {within_s:g} s: "
                    f"the mount lives on in the mount namespaces of {', '.join(holders)}; end those containers or "
                    "commands, or unmount it there"
                ) from None
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
            f"{mountpoint!r} is unmounted, and what was written last to {counted(len(lost), 'file')} is lost: "
            f"{', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}; its log says why"
        )
