"""The account of the bytes of a shared directory, written under a lock; who uses which copy, and which leave first."""

import fcntl
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

__all__ = ["NAME_BYTES", "Leaving", "believe", "in_use", "is_believed", "note", "noted"]

_SUM = struct.Struct("<QQ")  # used bytes, and the same with every bit inverted
_EVERY_BIT = (1 << 64) - 1
NAME_BYTES = 16
"""Bytes of the name of a copy in the files of processes that use copies."""
_USER_NAME = re.compile("[0-9a-f]{32}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def note(account: int, used: int) -> None:
    """Write the used bytes to an account."""
    os.pwrite(account, _SUM.pack(used, used ^ _EVERY_BIT), 0)


def noted(account: int) -> int | None:
    """Return the used bytes of an account; ``None`` if its content is not credible."""
    found = os.pread(account, _SUM.size, 0)
    if len(found) != _SUM.size:
        return None
    used, turned = _SUM.unpack(found)
    return int(used) if used == turned ^ _EVERY_BIT else None


def is_believed(account: int) -> bool:
    """Return whether an account was counted since this machine started, and in this place."""
    # After a power failure, or in a copied folder, the number may be too small.
    birth = _birth_of(account)
    return bool(birth) and os.pread(account, len(birth), _SUM.size) == birth


def believe(account: int) -> None:
    """Mark an account as counted."""
    os.pwrite(account, _birth_of(account), _SUM.size)


def _birth_of(account: int) -> bytes:
    """Return 16 bytes that differ after a restart of the machine and between files; empty if the system gives none."""
    with suppress(OSError):
        status = os.fstat(account)
        return xxhash.xxh3_128_digest(
            b"%s %d %d" % (_BOOT.read_bytes(), status.st_dev, status.st_ino)
        )
    return b""


def in_use(users: Path) -> set[str]:
    """Return the copies that living processes use; the files of dead processes are removed."""
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


_COPY = struct.Struct("<16sQ")  # name, and time of the last use in ns


class Leaving:
    """Copies from one look at a directory, in the order in which they leave; 24 bytes for each.

    The order is only a hint: a copy that was used since has another time than recorded here, and is skipped.
    """

    def __init__(self) -> None:
        self._last_first = bytearray()

    def find(self, copies: Iterable[tuple[str, int]]) -> None:
        """Replace the copies, each with the time of its last use in ns."""
        lines = [_COPY.pack(bytes.fromhex(name), used_ns) for name, used_ns in copies]
        self._last_first = bytearray().join(reversed(lines))

    def take(self) -> Iterator[tuple[str, int]]:
        """Yield and remove copies, as many as the caller takes."""
        while self._last_first:
            name, used_ns = _COPY.unpack(self._last_first[-_COPY.size :])
            del self._last_first[-_COPY.size :]
            yield name.hex(), used_ns
