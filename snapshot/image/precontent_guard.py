"""The process that says no when the one that fills is gone, started with descriptors: ``GROUP LIFE BLOB...``.

When the last process leaves a fanotify group, the kernel *allows* what waits and all that
comes: holes would be read as zeroes. So a second process is in the group. It does nothing
until the pipe ``LIFE`` ends, which it does in the moment in which the filling process
dies, whatever kills it. Then it denies all reads that wait, and all that come, until nobody
has a file of the group open any more. A word on the pipe tells it to go instead.

Standard library only, and no import of this package: it must be small and start fast.
"""

import errno
import fcntl
import os
import select
import signal
import stat
import struct
import sys

__all__ = ["main"]

_DENY_EIO = 2 | errno.EIO << 24
_MOST_DESCRIPTORS = 1 << 16
"""Above any descriptor of the process that died: its unanswered events are named by them."""
_LOOK_S = 1.0
"""Between two looks whether the files are still in use, while no read comes."""


def main() -> None:
    """Be the guard."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # told to a whole service, they are for the other one
    group, life = int(sys.argv[1]), int(sys.argv[2])
    blobs = list(map(int, sys.argv[3:]))
    if os.read(life, 1):
        return
    os.set_blocking(group, False)  # not before: the one that fills shares this flag
    for descriptor in range(_MOST_DESCRIPTORS):
        _deny(group, descriptor)
    while not all(_is_whole(blob) or _is_unused(blob) for blob in blobs):
        select.select([group], [], [], _LOOK_S)
        _deny_waiting(group)


def _deny_waiting(group: int) -> None:
    """Deny the reads that wait.

    A read whose descriptor cannot be had is denied by the kernel itself, and this call fails:
    no reason to leave, since that would allow all others.
    """
    try:
        data = os.read(group, 1 << 16)
    except OSError:
        return
    at = 0
    while at < len(data):
        size, _, _, _, _, descriptor, _ = struct.unpack_from("=IBBHQii", data, at)
        if descriptor >= 0:
            _deny(group, descriptor)
            os.close(descriptor)
        at += size


def _deny(group: int, descriptor: int) -> None:
    try:
        os.write(group, struct.pack("=iI", descriptor, _DENY_EIO))
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.EINVAL}:
            raise


def _is_whole(file: int) -> bool:
    """Tell whether a blob was whole, synced and made read-only before the other process died."""
    return not os.fstat(file).st_mode & stat.S_IWUSR


def _is_unused(file: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO would kill whose lease is broken
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


if __name__ == "__main__":
    main()
