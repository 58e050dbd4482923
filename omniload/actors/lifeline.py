"""The lifeline: a connection whose break tells ranks on other hosts at once that the plane's opener has ended.

Ray itself notices the end of its head only after a minute. The kernel closes the connections of
a process however it ends, and probes notice a host that falls silent. No data is ever sent, so a
stranger who connects learns nothing.
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
"""Most connections; all of them are held open, and descriptors of a process are limited."""
_AGAIN_S = 0.1
"""Time after which a connection is tried again that could not be accepted for want of a descriptor."""
# The kernel's own: 2 hours until the first probe. So a host that is cut off is missed after 25 s.
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 10, 5, 3


_ENDED = "has ended"
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Lifeline:
    """The opener's end: accepts connections and holds them open."""

    def __init__(self, address: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: The port is taken.
        """
        self._listener = socket.create_server((address, port))
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        self._listener.setblocking(False)  # the connection may be gone by then
        self._held: dict[int, socket.socket] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="omniload-lifeline", daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._closed.is_set():
            ready = [number for number, _ in poll.poll()]
            # No data is ever sent, so readable connections have ended; they are closed, so that later ranks find room.
            for number in self._held.keys() & set(ready):
                poll.unregister(number)
                self._held.pop(number).close()
            if self._listener.fileno() in ready and (connection := self._taken()) is not None:
                poll.register(connection, select.POLLIN)
                self._held[connection.fileno()] = connection

    def _taken(self) -> socket.socket | None:
        """Accept a connection; return ``None`` if it is gone, or cannot be accepted."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError:  # concerns one connection: the others stay, and more may come
            self._closed.wait(_AGAIN_S)
            return None
        if len(self._held) < _MOST_HELD:
            return connection
        connection.close()
        return None

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        # Closing the listener alone would leave its thread in the poll.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        # Not earlier: the descriptor's number might belong to another file by then, for which the thread would wait.
        self._listener.close()
        for connection in self._held.values():
            connection.close()


def answers(address: str, within_s: float) -> bool:
    """Return whether the opener of a plane lives and can be reached from here, by the lifeline's address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), within_s).close()
    except OSError:
        return False
    return True


class LifelineEnd:
    """The end of a process on another host; it does nothing if all ranks are on one host."""

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
                "firewall blocks the connection"
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
        """Whether the opener is known to have ended, as opposed to being unreachable."""
        return self._why == _ENDED

    def check(self) -> None:
        """Return if the opener lives.

        Raises:
            UnavailableError: It has ended.
        """
        if self._connection is None:
            return
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        # No data is ever sent, so an event can only be the end or an error.
        if poll.poll(0):
            is_silent = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _SILENT
            why = "cannot be reached: its host or the network failed" if is_silent else _ENDED
            # The kernel reports an error only once, but an end on every call.
            self._why = self._why or why
            raise UnavailableError(
                f"the process that opened the data plane at {self._address} {self._why}; start again from the last "
                "checkpoint"
            )

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
