"""HTTP connections with a limit for every step that the other side could draw out."""

import io
import socket
import time
from dataclasses import dataclass
from http.client import HTTPResponse
from math import inf, isinf

import urllib3
from typing_extensions import Buffer, override
from urllib3.connection import HTTPConnection, HTTPSConnection

__all__ = ["Pace", "paced_pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The slowest pace that is allowed for the other side."""

    silent_s: float
    """Longest wait for all headers, for the next byte, and for the number of bytes that the rate demands."""
    least_bytes_per_s: float
    """Least rate, over each ``silent_s`` of waiting for a body."""


class _TooSlowError(ConnectionError):
    """The other side sends, but less than it must."""


# A socket's timeout limits one ``recv``: a server that sends a byte within each of them would be waited for
# without end, in the headers as well as in the body. Here the total time of waiting counts, so that a pause of
# our own reader does not make the server look slow.
class _PacedIO(io.RawIOBase):
    """The bytes of a socket, while enough of them come: all headers within one ``silent_s``, a body at its rate."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, pace: Pace) -> None:
        self._raw, self._connection, self._pace = raw, connection, pace
        self._least_bytes_per_s = inf
        self._waited_s, self._moved = 0.0, 0

    def body_begins(self) -> None:
        """Judge all further bytes by their rate."""
        self._least_bytes_per_s = self._pace.least_bytes_per_s
        self._waited_s, self._moved = 0.0, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        try:
            while True:
                left_s = max(self._pace.silent_s - self._waited_s, 0.001)
                self._connection.settimeout(left_s)
                began_s = time.monotonic()
                try:
                    # Do not read through the file of the socket, which reads no more after a time-out.
                    moved = self._connection.recv_into(buffer)
                except TimeoutError:
                    # Count the whole time, because a shorter silence than the limit must end nothing.
                    self._judge(max(time.monotonic() - began_s, left_s), 0)
                    continue
                if moved:
                    self._judge(time.monotonic() - began_s, moved)
                return moved
        finally:
            self._connection.settimeout(self._pace.silent_s)

    def _judge(self, waited_s: float, moved: int) -> None:
        """Count bytes against the time of waiting for them; raise if the time is over, and they are too few."""
        self._waited_s += waited_s
        self._moved += moved
        if self._waited_s < self._pace.silent_s:
            return
        if self._moved < max(self._least_bytes_per_s * self._waited_s, 1):
            wanted = f"at least {self._least_bytes_per_s:.0f} bytes/s were wanted"
            if isinf(self._least_bytes_per_s):
                wanted = "all headers were wanted"
            raise _TooSlowError(f"{self._moved} bytes came in {self._waited_s:.1f} s; {wanted}")
        self._waited_s, self._moved = 0.0, 0

    @override
    def close(self) -> None:
        self._raw.close()
        super().close()


def paced_pool(pace: Pace, *, connect_s: float, **options: object) -> urllib3.PoolManager:
    """Return a pool whose connections keep to ``pace``; ``connect_s`` is for each address of a name, TLS included.

    Requests are sent in pieces with the same time limit each, small enough for the least rate.
    """

    class _Response(HTTPResponse):
        def __init__(self, sock: socket.socket, *args: object, **named: object) -> None:
            super().__init__(sock, *args, **named)  # type: ignore[arg-type]
            # Headers and body are read through ``fp`` alone, so all received bytes are judged there.
            self._paced = _PacedIO(self.fp.detach(), sock, pace)
            self.fp = io.BufferedReader(self._paced)

        @override
        def begin(self) -> None:
            super().begin()
            self._paced.body_begins()

    class _Plain(HTTPConnection):
        response_class = _Response  # type: ignore[mutable-override]

    class _Tls(HTTPSConnection):
        response_class = _Response  # type: ignore[mutable-override]

    class _PlainPool(urllib3.HTTPConnectionPool):
        ConnectionCls = _Plain  # type: ignore[mutable-override]

    class _TlsPool(urllib3.HTTPSConnectionPool):
        ConnectionCls = _Tls  # type: ignore[mutable-override]

    timeout = urllib3.Timeout(connect=connect_s, read=pace.silent_s)
    # The client sends under the time-out for connecting, which limits one call for one piece.
    piece_bytes = max(int(pace.least_bytes_per_s * connect_s), 1 << 10)
    pool = urllib3.PoolManager(timeout=timeout, blocksize=piece_bytes, **options)  # type: ignore[arg-type]
    pool.pool_classes_by_scheme = {"http": _PlainPool, "https": _TlsPool}
    return pool
