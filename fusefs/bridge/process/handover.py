"""Hand-over of a mount from one process to the next, without unmounting: the kernel notices nothing.

The daemon of every mount listens on an abstract socket named for the mount point, whichever
binding serves it. A process of the same user may ask for the mount, and then serves it over
``/dev/fuse``::

    new      "take over 1"
    old      takes no more requests (they wait in the kernel), finishes the ones under way
    old      length, state as JSON, and with them the descriptor of /dev/fuse
    new      opens the files that were open, then "ready"
    old      "yours", and ends without unmounting
    new      anything else, or nothing: the old process continues to serve as before

The state is JSON with a length, not a pickle, because it holds only numbers and names. A socket in the abstract
namespace leaves no file behind that could outlive its daemon.
"""

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, Self

import orjson

from fusefs.bridge.process.sockets import address_of, peer_name
from fusefs.bridge.process.unmount_notice import UnmountClient
from omniload.base.errors import OmniloadError, StateError
from omniload.base.linux.socket_peer import peer_of
from omniload.base.log import get_logger

__all__ = [
    "FINISH_WITHIN_S",
    "HELLO_WITHIN_S",
    "LENGTH",
    "REST_S",
    "Door",
    "Taken",
    "admitted",
    "handed_over",
    "listen",
    "received",
    "socket_address",
    "take",
    "why_nobody",
]

_LOG = get_logger(__name__)
_HELLO = b"take over 1"
_READY, _YOURS = b"ready", b"yours"
LENGTH = struct.Struct("<Q")
_NOTHING = LENGTH.pack(0)
ANSWER_WITHIN_S = 60.0
"""Seconds for the other side's next message: it may have to finish requests, or open files."""
FINISH_WITHIN_S = 30.0
"""Seconds for requests under way; if the store does not answer, the old process keeps the mount."""
HELLO_WITHIN_S = 5.0
REST_S = 0.1
_MOST_STATE_BYTES = 1 << 30
_NOTHING_HELD = nullcontext()


def socket_address(target: str) -> bytes:
    """Return the address at which the server of a mount listens for the process that takes it over."""
    # The name contains the user, so a user without root takes over only their own mounts.
    return address_of("mount", target, os.getuid())


def listen(target: str) -> socket.socket | None:
    """Return the socket at which the mount at ``target`` may be asked for; None if another process has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_address(target))
        # One peer asks at a time; another waits in the queue until the first is answered.
        listener.listen(1)
    except OSError as error:
        listener.close()
        _LOG.info("%s cannot be handed over later: %s", target, error)
        return None
    return listener


def admitted(
    listener: socket.socket, accepting: AbstractContextManager[object] = _NOTHING_HELD
) -> socket.socket | None:
    """Wait for the next connection, and return it if its peer asks for the mount.

    This call blocks, because a peer may stay silent, so it belongs in a thread of its own.

    Args:
        listener: Socket that peers connect to.
        accepting: Held while this waits for a connection.

    Raises:
        OSError: The listener is closed.
    """
    try:
        with accepting:
            peer, _ = listener.accept()
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EBADF}:
            raise
        # For example, there are no free descriptors. The peer stays in the queue, which must not become a busy loop.
        _LOG.warning("the mount is asked for, and nobody can be answered: %s", error)
        time.sleep(REST_S)
        return None
    try:
        # A peer that says nothing must not keep the peers behind it waiting.
        peer.settimeout(HELLO_WITHIN_S)
        if _is_ours(peer) and peer.recv(64) == _HELLO:
            return peer
    except OSError as error:
        _LOG.debug("a peer does not ask for the mount: %s", error)
    peer.close()
    return None


class Door:
    """Accepts peers that ask for a mount, in a thread of its own, and wakes the loop that serves the mount.

    Args:
        listener: Socket that peers connect to; closed together with this.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._asking: SimpleQueue[socket.socket] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._lock, self._accepting = threading.Lock(), threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._hear, name="fusefs-door", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable while a peer asks."""
        return self._bell

    def next(self) -> socket.socket:
        """Return the connection of the next peer; call it when the descriptor is readable."""
        os.eventfd_read(self._bell)
        return self._asking.get_nowait()

    def close(self) -> None:
        """Free the address, and hang up on all peers that still ask."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._bell)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        # While the thread waits for a connection it keeps the address, which the next process takes: on a busy machine
        # the thread wakes up late. While it listens to a peer, it does not keep the address.
        is_free = self._accepting.acquire(timeout=HELLO_WITHIN_S)
        self._listener.close()
        if is_free:
            self._accepting.release()
        # Wait no longer than this: the thread may wait HELLO_WITHIN_S for a peer that says nothing.
        self._thread.join(REST_S)
        while not self._asking.empty():
            self._asking.get_nowait().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self) -> None:
        while True:
            try:
                peer = admitted(self._listener, self._accepting)
            except OSError:
                return
            if peer is None:
                continue
            with self._lock:
                if self._closed:
                    peer.close()
                    return
                self._asking.put(peer)
                os.eventfd_write(self._bell, 1)


def handed_over(
    peer: socket.socket,
    listener: "Door | socket.socket",
    device: int,
    state: Callable[[], dict[str, Any]],
    let_go: Callable[[], None] = lambda: None,
) -> bool:
    """Answer a peer that asks for the mount; return whether the peer has the mount now.

    Args:
        peer: The process that asks (``admitted``).
        listener: Closed when the peer has the mount.
        device: /dev/fuse.
        state: Stops the service and returns the state for the next process; may raise StateError.
        let_go: Called once the peer has the mount: frees other things that the peer takes before it reports ready.
    """
    with peer:
        try:
            peer.settimeout(ANSWER_WITHIN_S)
            data = orjson.dumps({"version": 1, **state()})
            socket.send_fds(peer, [LENGTH.pack(len(data))], [device])
            peer.sendall(data)
            _await_ready(peer)
            peer.sendall(_YOURS)
            listener.close()  # the new process listens there once this connection has ended
            let_go()
        except (OSError, OmniloadError) as error:
            _LOG.warning("the mount stays with this process: %s", error)
            _send_refusal(peer, str(error))
            return False
        except Exception as error:  # noqa: BLE001 -- the mount must outlive a defect in its hand-over
            _LOG.error("the mount stays with this process", exc_info=error)
            _send_refusal(peer, f"a defect: {error!r}; see its log")
            return False
    return True


def _await_ready(peer: socket.socket) -> None:
    if peer.recv(64) != _READY:
        raise StateError("the process that asked for it did not get ready")


def _is_ours(peer: socket.socket) -> bool:
    return peer_of(peer)[1] in {0, os.getuid()}


def _send_refusal(peer: socket.socket, message: str) -> None:
    """Send a refusal: a length of zero, then the reason."""
    try:
        peer.sendall(_NOTHING + message.encode(errors="backslashreplace"))
    except OSError as error:
        _LOG.debug("nobody hears why: %s", error)


class Taken:
    """A mount that another process is about to hand over.

    Attributes:
        device: /dev/fuse; this process closes it.
        state: The state that the other process sent.
    """

    def __init__(self, peer: socket.socket, device: int, state: dict[str, Any]) -> None:
        self._peer = peer
        self.device = device
        self.state = state

    def confirm(self) -> None:
        """Make the other process end; it has served its last request when this returns.

        Raises:
            StateError: The other process continued to serve, or ended.
        """
        with self._peer:
            try:
                self._peer.sendall(_READY)
                answer = self._peer.recv(4096)
                ended = "it ended"
            except OSError as error:
                answer, ended = b"", str(error)
            if answer == _YOURS:
                with suppress(OSError):
                    self._peer.recv(1)  # an empty answer: the peer has released the address, too
                return
        os.close(self.device)
        if not answer:
            raise StateError(f"the other process did not let the mount go: {ended}; try again")
        reason = answer.removeprefix(_NOTHING).decode(errors="replace")
        raise StateError(f"the other process kept the mount: {reason}; try again")

    def decline(self) -> None:
        """Leave the mount with the other process."""
        self._peer.close()
        os.close(self.device)


def take(target: str) -> Taken:
    """Ask the process that serves the mount at ``target`` for it.

    Raises:
        StateError: No process answers for the mount, or the process refuses.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(ANSWER_WITHIN_S)
    try:
        _connect(peer, target)
        peer.sendall(_HELLO)
        return received(peer, target)
    except BaseException as error:
        peer.close()
        if not isinstance(error, OSError | struct.error):
            raise
        raise StateError(f"{target!r} cannot be taken over: {why_nobody(target, error)}") from error


def _connect(peer: socket.socket, target: str) -> None:
    peer.connect(socket_address(target))
    if not _is_ours(peer):  # any user may take an abstract name
        raise PermissionError(f"{peer_name(peer)}, another user, answers")


def why_nobody(target: str, error: BaseException) -> str:
    """Return the reason why no process hands a mount over, with its remedy."""
    try:
        waiter = UnmountClient.of(target)
    except StateError as foreign:
        return f"{error}; {foreign}"
    if waiter is None:
        return (
            f"no mount of ours answers there ({error}); unmount what is there, if anything, and "
            "mount it without --take-over"
        )
    waiter.close()
    if isinstance(error, TimeoutError):
        return (
            f"process {waiter.about['process']}, which serves it, has not answered within "
            f"{ANSWER_WITHIN_S:g} s and keeps it: the store may be slow, or much is still to be "
            "published; try again"
        )
    return (
        f"process {waiter.about['process']} serves it with bridge={waiter.about['bridge']} and hands "
        f"nothing over ({error}): it is of an older release, or about to end; unmount it, and mount it anew"
    )


def received(peer: socket.socket, target: str) -> Taken:
    """Read the hand-over of a server: a descriptor of the device, and the state."""
    head, descriptors, _, _ = socket.recv_fds(peer, LENGTH.size, 1)
    (size,) = LENGTH.unpack(head)
    if not descriptors or not 0 < size <= _MOST_STATE_BYTES:
        raise StateError(f"{target!r} is not handed over: {_rest(peer)}")
    try:
        # Otherwise a child process would keep the connection open after the mount is gone.
        os.set_inheritable(descriptors[0], False)
        state = _state(_exactly(peer, size), target)
    except BaseException:
        # Otherwise the descriptor would keep the connection open when the other process ends.
        os.close(descriptors[0])
        raise
    return Taken(peer, descriptors[0], state)


def _state(data: bytes, target: str) -> dict[str, Any]:
    # JSON, not a pickle: data of another process must never be code.
    state: dict[str, Any] = orjson.loads(data)
    if state.get("version") != 1:
        raise StateError(f"{target!r} comes with a state of version {state.get('version')}, not 1")
    return state


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(1 << 20, size - len(data)))
        if not part:
            raise StateError(
                f"the other process ended after {len(data)} of {size} bytes of its state"
            )
        data += part
    return bytes(data)


def _rest(peer: socket.socket) -> str:
    return peer.recv(4096).decode(errors="replace") or "it gives no reason"
