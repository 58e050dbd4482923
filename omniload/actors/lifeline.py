"""How ranks on other hosts learn at once that the plane's opener has ended: a connection that breaks.

Ray itself notices the end of its head after a minute. The kernel closes the connections of a
process that ends, however it ends; a host that falls silent is noticed by probes. Nothing is
ever sent, so nothing is read, and whoever connects learns nothing.
"""

import errno
import select
import socket
import threading
from contextlib import suppress

from omniload.base.errors import UnavailableError

__all__ = ["Lifeline", "LifelineEnd", "answers"]

_CONNECT_S = 10.0
_MOST_HELD = 1 << 16
"""Connections at once: whatever connects is held, and a process has only so many descriptors."""
_AGAIN_S = 0.1
"""A connection that could not be taken, for want of a descriptor, waits so long in the kernel's queue."""
# The kernel's own: 2 hours until the first probe. So a host that is cut off is missed after 25 s.
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 10, 5, 3


_ENDED = "has ended"
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Lifeline:
    """The opener's end: takes connections and holds them."""

    def __init__(self, address: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: The port is taken.
        """
        self._listener = socket.create_server((address, port))
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        self._listener.setblocking(False)  # what was to be taken may be gone by then
        self._held: dict[int, socket.socket] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="omniload-lifeline", daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._closed.is_set():
            ready = [number for number, _ in poll.poll()]
            # Nothing is ever sent, so these have ended: ranks come and go, and none is refused for those before it.
            for number in self._held.keys() & set(ready):
                poll.unregister(number)
                self._held.pop(number).close()
            if self._listener.fileno() in ready and (connection := self._taken()) is not None:
                poll.register(connection, select.POLLIN)
                self._held[connection.fileno()] = connection

    def _taken(self) -> socket.socket | None:
        """Return a connection that wants to be held; nothing where it is gone, or cannot be."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError:  # of one connection: the others stay, and more may come
            self._closed.wait(_AGAIN_S)
            return None
        if len(self._held) < _MOST_HELD:
            return connection
        connection.close()
        return None

    def close(self) -> None:
        """Let go of all."""
        self._closed.set()
        # A listener that is only closed leaves its thread in the poll.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        # Not before: its number may be another file's by then, which the thread would wait for.
        self._listener.close()
        for connection in self._held.values():
            connection.close()


def answers(address: str, within_s: float) -> bool:
    """Tell whether the opener of a plane lives and can be reached from here, by the address of its end."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), within_s).close()
    except OSError:
        return False
    return True


class LifelineEnd:
    """The end of a process on another host; holds nothing where all ranks are on one."""

    def __init__(self, address: str) -> None:
        """Connect, unless ``address`` is empty.

        Raises:
            UnavailableError: Nobody listens there.
        """
        self._address, self._why = address, ""
        self._connection: socket.socket | None = None
        if not address:
            return
        host, _, port = address.rpartition(":")
        try:
            self._connection = socket.create_connection((host, int(port)), _CONNECT_S)
        except OSError as error:
            raise UnavailableError(
                f"the process that opened the data plane does not answer at {address}: {error}; it has ended, or a "
                "firewall lies between"
            ) from error
        for option, value in (
            (socket.SO_KEEPALIVE, None),
            (socket.TCP_KEEPIDLE, _PROBE_AFTER_S),
            (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
            (socket.TCP_KEEPCNT, _PROBES),
        ):
            level = socket.SOL_SOCKET if value is None else socket.IPPROTO_TCP
            self._connection.setsockopt(level, option, 1 if value is None else value)

    @property
    def has_ended(self) -> bool:
        """Whether the opener was found to have ended, and not to be out of reach."""
        return self._why == _ENDED

    def check(self) -> None:
        """Return while the opener lives.

        Raises:
            UnavailableError: It has ended.
        """
        if self._connection is None:
            return
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        # Whatever it is: nothing is ever sent, so only an end or an error can be told.
        if poll.poll(0):
            is_silent = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _SILENT
            why = "is out of reach, its host or the way to it" if is_silent else _ENDED
            # The kernel tells an error once, and an end whenever it is asked.
            self._why = self._why or why
            raise UnavailableError(
                f"the process that opened the data plane at {self._address} {self._why}; start again from the last "
                "checkpoint"
            )

    def close(self) -> None:
        """Let go."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
