"""Messages between the ranks of a machine, the server of their group, and its workers."""

import select
import socket
import struct
from asyncio import StreamReader
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from omniload.base.errors import IntegrityError

__all__ = ["Frame", "Kind", "Wire", "packed", "read_frame"]

_HEAD = struct.Struct(">BQIQ")
_MOST_SLOTS = 1 << 16
_MOST_BYTES = 1 << 33
_READ_BYTES = 1 << 18


class Kind(IntEnum):
    """Kind of a message."""

    HELLO = 1
    """A rank names its dataset; the body is JSON."""
    WELCOME = 2
    """The rank is admitted; the number is its row of holds, and the body is JSON."""
    REFUSED = 3
    """The rank is not admitted; the body says why."""
    ASK = 4
    """A batch is wanted; the number is the rank's task or, on the way to a worker, the server's job."""
    DROP = 5
    """A requested batch is not wanted any more."""
    BATCH = 6
    """A batch as its worker pickled it, with the slots of its blocks."""
    FAILED = 7
    """The worker's error, pickled."""
    LOST = 8
    """The worker has ended; the body says how."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    number: int = 0
    body: bytes = b""
    slots: tuple[int, ...] = ()


def packed(frame: Frame) -> bytes:
    """Return a message in its binary form."""
    head = _HEAD.pack(frame.kind, frame.number, len(frame.slots), len(frame.body))
    return head + np.asarray(frame.slots, ">u4").tobytes() + frame.body


def _sizes(head: bytes) -> tuple[Kind, int, int, int]:
    kind, number, slots, size_bytes = _HEAD.unpack(head)
    # Checked before anything of the announced size is read or allocated.
    if kind not in Kind._value2member_map_ or slots > _MOST_SLOTS or size_bytes > _MOST_BYTES:
        raise IntegrityError(
            f"a message of the loader's group begins with {head.hex()}: kind {kind}, {slots} slots (at most "
            f"{_MOST_SLOTS}), {size_bytes} bytes (at most {_MOST_BYTES}); all ranks need one release of omniload"
        )
    return Kind(kind), number, 4 * slots, size_bytes


def _frame(kind: Kind, number: int, slots: bytes, body: bytes) -> Frame:
    return Frame(kind, number, body, tuple(np.frombuffer(slots, ">u4").tolist()))


async def read_frame(reader: StreamReader) -> Frame:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError: The other side has gone.
        IntegrityError: The bytes are no message.
    """
    kind, number, slots, body = _sizes(await reader.readexactly(_HEAD.size))
    return _frame(kind, number, await reader.readexactly(slots), await reader.readexactly(body))


class Wire:
    """The blocking side of a connection: that of a rank, or of a worker."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over ``connection``."""
        self._socket = connection
        self._read = bytearray()

    def send(self, frame: Frame) -> None:
        """Send a message.

        Raises:
            OSError: The other side has gone.
        """
        self._socket.sendall(packed(frame))

    def receive(self, limit_s: float) -> Frame | None:
        """Return the next message; ``None`` if none has begun within ``limit_s``.

        Raises:
            EOFError: The other side has gone.
            OSError: The same.
        """
        if len(self._read) < _HEAD.size and not self._is_readable(limit_s):
            return None
        kind, number, slots, body = _sizes(self._exactly(_HEAD.size))
        return _frame(kind, number, self._exactly(slots), self._exactly(body))

    def _is_readable(self, limit_s: float) -> bool:
        # ``select`` supports no descriptor from 1024 on, and trainers open many files.
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(1e3 * limit_s))

    def _exactly(self, count: int) -> bytes:
        while len(self._read) < count:
            # Reads more than asked for, because messages are short, and a system call takes as long as several of them.
            piece = self._socket.recv(max(_READ_BYTES, count - len(self._read)))
            if not piece:
                raise EOFError("the other side has closed the connection")
            self._read += piece
        found = bytes(self._read[:count])
        del self._read[:count]
        return found

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
