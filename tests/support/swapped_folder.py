"""A folder of a store that is exchanged, again and again, for a symbolic link that leads out of the store."""

import contextlib
import ctypes
import errno
import os
import threading

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_libc = ctypes.CDLL(None, use_errno=True)


def exchange(one, other):
    """Exchange two names in one step."""
    words = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if _libc.renameat2(*words):
        raise OSError(ctypes.get_errno(), "cannot be exchanged", str(one))


class Outside:
    """The files outside a store, which must stay unchanged and unread."""

    def __init__(self, base):
        self.store, self.folder = base / "store", base / "outside"
        (self.store / "d").mkdir(parents=True)
        (self.folder / "below").mkdir(parents=True)
        (self.folder / "f").write_bytes(b"SECRET")
        (self.folder / "victim").write_bytes(b"SECRET")
        (self.folder / "source").write_bytes(b"SECRET")
        (self.store / "d" / "f").write_bytes(b"inside")
        self.before = self.state()

    def state(self):
        """Return every path outside with its bytes."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None
            for path in self.folder.rglob("*")
        }

    def link(self, name):
        """Put a link to the outside into the store."""
        place = self.store / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.folder)
        return place

    @contextlib.contextmanager
    def swapping(self):
        """Exchange ``d`` for a link to the outside and back, while the block runs."""
        link, ends, swaps = self.link("link-to-outside"), threading.Event(), [0]

        def swap():
            while not ends.is_set():
                exchange(self.store / "d", link)
                swaps[0] += 1

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            yield swaps
        finally:
            ends.set()
            thread.join()
            if link.is_dir() and not link.is_symlink():
                exchange(self.store / "d", link)
            link.unlink()


ANSWERS = frozenset(
    {errno.ELOOP, errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.ESTALE}
)
"""Errors that a call may raise while its folder comes and goes."""


@contextlib.contextmanager
def may_fail():
    """Ignore errors that a folder which comes and goes explains."""
    try:
        yield
    except OSError as error:
        if error.errno not in ANSWERS:
            raise
