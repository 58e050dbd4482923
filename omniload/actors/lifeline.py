"""How ranks on other hosts learn at once that the plane's opener has ended: a connection that breaks.

Ray itself notices the end of its head after a minute. The kernel closes the connections of a
process that ends, however it ends; a host that falls silent is noticed by probes. Nothing is
ever sent, so nothing is read, and whoever connects learns nothing.
"""

import select
import socket
import threading
from contextlib import suppress

from omniload.base.errors import UnavailableError

__all__ = ["Lifeline", "LifelineEnd"]

_CONNECT_S = 10.0
_MOST_HELD = 4096
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 10, 5, 3


class Lifeline:
    """The opener's end: takes connections and holds them."""

    def __init__(self, address: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: The port is taken.
        """
        self._listener = socket.create_server((address, port))
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._hold, name="omniload-lifeline", daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if len(self._held) < _MOST_HELD:
                self._held.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Let go of all."""
        # A listener that is only closed leaves its thread in accept.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._held:
            connection.close()


class LifelineEnd:
    """The end of a process on another host; holds nothing where all ranks are on one."""

    def __init__(self, address: str) -> None:
        """Connect, unless ``address`` is empty.

        Raises:
            UnavailableError: Nobody listens there.
        """
        self._address = address
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

    def check(self) -> None:
        """Return while the opener lives.

        Raises:
            UnavailableError: It has ended.
        """
        if self._connection is None:
            return
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if poll.poll(0):
            raise UnavailableError(
                f"the process that opened the data plane at {self._address} has ended; start again from the last "
                "checkpoint"
            )

    def close(self) -> None:
        """Let go."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
