"""In which order copies leave a shared directory: found in one look at all, for the many times that room is made."""

import struct
from collections.abc import Iterable, Iterator

__all__ = ["Leaving"]

_COPY = struct.Struct("<16sQ")  # its name, and when it was used last, in ns


class Leaving:
    """Copies as one look found them, the one that leaves first ahead; of each 24 bytes.

    It is believed of no copy: one that was used since has another time than is said here, and is passed over.
    """

    def __init__(self) -> None:
        self._last_first = bytearray()

    def find(self, copies: Iterable[tuple[str, int]]) -> None:
        """Hold other copies, each with when it was used last, in ns."""
        lines = [_COPY.pack(bytes.fromhex(name), used_ns) for name, used_ns in copies]
        self._last_first = bytearray().join(reversed(lines))

    def take(self) -> Iterator[tuple[str, int]]:
        """Take copies off, one after the other, as far as they are asked for."""
        while self._last_first:
            name, used_ns = _COPY.unpack(self._last_first[-_COPY.size :])
            del self._last_first[-_COPY.size :]
            yield name.hex(), used_ns
