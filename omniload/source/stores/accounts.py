"""What copies of a shared directory take, in a file whose lock its writer holds; who uses which, which leave first."""

import fcntl
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

__all__ = ["NAME_BYTES", "Leaving", "believe", "in_use", "is_believed", "note", "noted"]

_SUM = struct.Struct("<QQ")  # bytes that are taken, and the same with every bit turned over
_EVERY_BIT = (1 << 64) - 1
NAME_BYTES = 16
"""Bytes of the name of a copy, where processes say which they use."""
_USER_NAME = re.compile("[0-9a-f]{32}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def note(account: int, used: int) -> None:
    """Write what is taken."""
    os.pwrite(account, _SUM.pack(used, used ^ _EVERY_BIT), 0)


def noted(account: int) -> int | None:
    """Return what an account says; ``None`` where it says nothing that can be believed."""
    found = os.pread(account, _SUM.size, 0)
    if len(found) != _SUM.size:
        return None
    used, turned = _SUM.unpack(found)
    return int(used) if used == turned ^ _EVERY_BIT else None


def is_believed(account: int) -> bool:
    """Tell whether an account was counted since this machine started, and where it lies now."""
    # After a power cut, or of a folder that was copied, it may say too little.
    birth = _birth_of(account)
    return bool(birth) and os.pread(account, len(birth), _SUM.size) == birth


def believe(account: int) -> None:
    """Note that it was counted."""
    os.pwrite(account, _birth_of(account), _SUM.size)


def _birth_of(account: int) -> bytes:
    """Return 16 bytes that are others after a start of the machine, and for another file; none where it tells none."""
    with suppress(OSError):
        status = os.fstat(account)
        return xxhash.xxh3_128_digest(
            b"%s %d %d" % (_BOOT.read_bytes(), status.st_dev, status.st_ino)
        )
    return b""


def in_use(users: Path) -> set[str]:
    """Return the copies that living processes use; what dead ones left is removed."""
    names: set[str] = set()
    for path in users.iterdir():
        if not _USER_NAME.fullmatch(path.name):
            continue
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = file.read().hex()
                step = 2 * NAME_BYTES
                names |= {held[at : at + step] for at in range(0, len(held), step)}
            else:
                path.unlink(missing_ok=True)
    return names


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
