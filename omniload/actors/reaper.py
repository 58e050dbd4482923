"""The opener's side of the reaper, and the folder of a plane."""

import hashlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omniload.actors import reaper_process
from omniload.actors.reaper_process import LEAVE, MARKS, PATIENCE_S
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.linux.file_lock import FileLock, is_locked
from omniload.base.log import get_logger

__all__ = ["FOLDERS", "PlaneFolder", "Reaper", "marked"]

_LOG = get_logger(__name__)
FOLDERS, _BEGUN, _OPENER = "omniload-ray-", "omniload-begun-", "opener"
"""Prefixes of the names of folders, finished and unfinished; the file in each of them that its opener locks."""
_TRIES = 16
"""Tries for a folder's name; more than the planes that start at once on a host."""
_RESTARTS = 5
_LAST_S = 5.0
"""How long a reaper may take to end, in addition to its patience with other processes."""


class PlaneFolder:
    """The folder of a plane's files on this host; if opener and reaper were killed, the next start removes it."""

    def __init__(self) -> None:
        """Choose a name; raises ``StateError`` if no folder of temporary files can be written."""
        try:
            above = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise StateError(
                f"a data plane on Ray needs a folder for its files on this host ({error.strerror}); free space or "
                "permit writing in one of them, or set TMPDIR to a folder that can be written"
            ) from error
        # A short name, because the paths of Ray's sockets in the folder are limited.
        self.path = above / f"{FOLDERS}{secrets.token_hex(4)}"
        # A folder that is still empty cannot name its owner in a file, so its name does.
        self._begun = self.path.with_name(f"{_begun_here()}{secrets.token_hex(4)}")
        self._lock: FileLock | None = None

    @property
    def places(self) -> tuple[Path, ...]:
        """Paths of the finished and of the unfinished folder."""
        return self.path, self._begun

    def make(self) -> None:
        """Make the folder, and remove abandoned ones."""
        beside = self.path.parent
        left = [
            *((folder, _is_left) for folder in beside.glob(f"{FOLDERS}*")),
            *((folder, _is_left_begun) for folder in beside.glob(f"{_begun_here()}*")),
        ]
        for folder, is_left in left:
            with suppress(OSError):  # removed meanwhile, or not readable
                if is_left(folder):
                    _LOG.info("%s belongs to a data plane that was killed; it is removed", folder)
                    shutil.rmtree(folder, ignore_errors=True)
        for _ in range(_TRIES):
            # Another start may find it before it is locked, and takes it for abandoned.
            with suppress(FileNotFoundError):
                self._make()
                return
        raise UnavailableError(
            f"{self._begun} was removed {_TRIES} times before it became a folder of a data plane; end the process "
            "that removes it, or set TMPDIR to another folder, and try again"
        )

    def _make(self) -> None:
        """Make the folder and lock it before it gets its final name, so that a folder without a lock is abandoned."""
        self._begun.mkdir(mode=0o700)
        opener = self._begun / _OPENER
        try:
            self._lock = FileLock(opener)
        except FileNotFoundError:
            raise
        except (OSError, ConfigError):  # without locks, nobody else may remove the folder
            opener.unlink(missing_ok=True)
        try:
            self._begun.rename(self.path)
        except FileNotFoundError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Remove the folder, if it was made."""
        self._let_go()
        for place in self.places:
            shutil.rmtree(place, ignore_errors=True)


def _begun_here() -> str:
    """Return the prefix of unfinished folders of this host."""
    return f"{_BEGUN}{hashlib.blake2b(socket.gethostname().encode(), digest_size=8).hexdigest()}-"


def _is_left_begun(folder: Path) -> bool:
    """Return whether an unfinished folder of this user and host is abandoned."""
    of_folder, opener = folder.lstat(), folder / _OPENER
    if of_folder.st_uid != os.geteuid() or not stat.S_ISDIR(of_folder.st_mode):
        return False
    # A process that has not locked its folder yet makes another one.
    return not (os.path.lexists(opener) and is_locked(opener))


def _is_left(folder: Path) -> bool:
    """Return whether a folder of this user and host is abandoned: not locked by its opener, and without open files.

    If hosts share the folder of temporary files, neither locks nor processes of another host can be seen for certain. A
    folder of an older release does not name its opener, and is left alone.
    """
    of_folder, opener = folder.lstat(), folder / _OPENER
    of_opener = opener.lstat()
    ours = {of_folder.st_uid, of_opener.st_uid} == {os.geteuid()}
    if not (ours and stat.S_ISDIR(of_folder.st_mode) and stat.S_ISREG(of_opener.st_mode)):
        return False
    is_here = opener.read_text(errors="replace").rstrip().endswith(f" on {socket.gethostname()}")
    return is_here and not is_locked(opener) and not _has_files_open(folder.resolve())


def _has_files_open(folder: Path) -> bool:
    # Without a reaper, Ray's processes outlive a killed opener by up to a minute. Only names of open files are
    # compared, because a look at a file itself waits for its mount, which may hang.
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process of another user, or one that has ended meanwhile
            for number in (process / "fd").iterdir():
                with suppress(OSError):
                    if number.readlink().is_relative_to(folder):
                        return True
    return False


class Reaper:
    """The opener's side: started before the watched processes, closed after them, and restarted if it is killed."""

    def __init__(self, mark: str, folders: Sequence[Path] = ()) -> None:
        """Start a reaper for folders, which need not exist yet, and for processes that carry ``mark``, if given."""
        self._words = [mark, str(os.getpid()), *map(str, folders)]
        self._lock = threading.Lock()
        self._closed = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._follow, name="omniload-reaper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the present reaper."""
        return self._process.pid

    def close(self) -> None:
        """End every remaining marked process, and wait for their end, for half a minute at most."""
        with self._lock:
            self._closed = True
            process = self._process
        assert process.stdin is not None
        # A message and not just a closed pipe, because a process that was forked meanwhile holds the pipe as well.
        with suppress(BrokenPipeError):
            process.stdin.write(LEAVE)
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(PATIENCE_S + _LAST_S)
        except subprocess.TimeoutExpired:
            _LOG.warning("the reaper %d does not end; it is left alone", process.pid)
        self._thread.join(_LAST_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        # Without marks, because the reaper of this process's own launcher would end it too early.
        environment = {name: value for name, value in os.environ.items() if name != MARKS}
        return subprocess.Popen(  # noqa: S603 -- our own module, our own interpreter
            # -P: the folder of this module holds no module that the reaper imports.
            [sys.executable, "-P", reaper_process.__file__, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal is for the opener
        )

    def _follow(self) -> None:
        """Start another reaper if one ends before its time."""
        for _ in range(_RESTARTS):
            code = self._process.wait()
            with self._lock:
                if self._closed:
                    return
                _LOG.warning("the reaper of a data plane ended with %d; another one starts", code)
                assert self._process.stdin is not None
                with suppress(BrokenPipeError):
                    self._process.stdin.close()
                self._process = self._start()
        _LOG.error(
            "no reaper keeps running: if this process is killed, the processes of Ray live for a minute longer"
        )


@contextmanager
def marked(mark: str) -> Iterator[None]:
    """Mark the processes that are started inside, and their children, with ``mark`` in addition to this one's marks."""
    before = os.environ.get(MARKS)
    os.environ[MARKS] = mark if before is None else f"{before}:{mark}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARKS]
        else:
            os.environ[MARKS] = before
