"""A command run in a mounted image: an overlay for its writes, namespaces of its own, another root.

No code of the image runs before the command. The command is process 1 of a new
process namespace, as in any container, so that no process that it started outlives it. It has the
network of the machine.
"""

import os
import signal
import stat as stat_bits
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from fusefs.bridge.process.launch import clear_dead_mount, failure_of, serve_reporting, umount
from omniload.base.errors import ConfigError, StateError
from omniload.base.log import get_logger, set_up_logging
from omniload.base.writing import open_log
from snapshot.image.mount.daemon import ImageMount, serve
from snapshot.image.start.namespaces import Start, enter, make_folder, make_mount_points
from snapshot.oci.image import Image
from snapshot.oci.manifest import Process
from snapshot.private_folder import put_file

__all__ = [
    "DEFECT_CODE",
    "ForkedProcess",
    "check_alone",
    "check_machine",
    "etc_text",
    "fork",
    "ids_of",
    "prepare_upper",
    "run_in",
    "start_forked",
    "start_of",
]

_ROLE = "image"
"""Role of the daemon, in its log and its reports."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def start_of(process: Process | None, words: Sequence[str], variables: Sequence[str]) -> Start:
    """Return the start that an image describes: its variables, folder and user.

    ``words`` replace the image's own command. ``KEY=VALUE`` replaces one of its variables;
    ``KEY`` alone passes a variable of this process on.

    Raises:
        ConfigError: There is no command, or a variable is malformed.
    """
    process = process or Process()
    command = tuple(words) or process.command
    if not command:
        raise ConfigError("the image names no command; give one after --")
    found = {"PATH": _PATH, "HOME": "/root"}
    # Check here, because after the fork the bad text could not be named: the command would only end with 126.
    env = process.env or ()
    unfit = [text for text in (*command, *env, process.working_dir or "") if "\0" in text]
    unfit += [text for text in env if not text.partition("=")[0]]
    if unfit:
        raise ConfigError(f"no process can have {unfit[0][:200]!r}, as the image says; mend it")
    for text in env:
        key, _, value = text.partition("=")
        found[key] = value
    for text in variables:
        key, given, value = text.partition("=")
        if not key:
            raise ConfigError(f"variable {text!r} is not KEY=VALUE")
        if given:
            found[key] = value
        elif key in os.environ:
            found[key] = os.environ[key]
    return Start(command, found, process.working_dir or "/", process.user or "")


def ids_of(user: str, passwd: str, group: str) -> tuple[int, int]:
    """Return the numbers of the user and group that an image's configuration names, by the image's own files.

    Raises:
        ConfigError: The image knows no such user or group.
    """
    name, _, group_name = user.partition(":")
    lines = [line.split(":") for line in passwd.splitlines()]
    known = {f[0]: (int(f[2]), int(f[3])) for f in lines if len(f) > 3 and _numbers(f[2], f[3])}
    by_number = {ids[0]: ids for ids in reversed(known.values())}
    if not name:
        ids = (0, 0)
    elif name in known:
        ids = known[name]
    elif _numbers(name):
        ids = by_number.get(int(name), (int(name), 0))
    else:
        raise ConfigError(f"the image starts as user {name!r}, whom its /etc/passwd does not know")
    if not group_name:
        return ids
    groups = {f[0]: f[2] for line in group.splitlines() if len(f := line.split(":")) > 2}
    number = groups.get(group_name, group_name)
    if not _numbers(number):
        raise ConfigError(f"the image starts as group {group_name!r}, not in its /etc/group")
    return ids[0], int(number)


def check_machine() -> None:
    """Check that this machine can run commands in images.

    Raises:
        ConfigError: The process is not root.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            f"user {os.geteuid()} cannot mount an overlay and change the root directory; run it as root"
        )


def run_in(
    settings: ImageMount,
    start: Start,
    *,
    scratch: str | None,
    log_path: str,
    image: Image | None = None,
    entered: Callable[[], None] = lambda: None,
) -> int:
    """Mount an image, run a command in it, unmount; return its exit code, 128 + N for signal N.

    Files that the command writes are in a folder in ``scratch``, or a temporary one, and are removed.
    ``image`` is the image of ``settings``, if it was already resolved; ``entered`` is called when
    the command is started.

    Raises:
        ConfigError: The image does not exist, or a bind cannot be at its place.
        StateError: The overlay cannot be mounted, or another thread runs here.
    """
    check_machine()
    check_alone()
    with _scratch(scratch) as place:
        place.chmod(0o755)  # users of the image must be able to enter it
        for name in ("image", "upper", "work", "root"):
            (place / name).mkdir(mode=0o755)
        with _mounted(settings, image, place / "image", log_path):
            prepare_upper(place / "image", place / "upper")
            make_mount_points(start.binds, place / "image", place / "upper")
            ids = ids_of(start.user, *(etc_text(place / "image", f) for f in ("passwd", "group")))
            return _run(place, start, ids, entered)


@contextmanager
def _scratch(folder: str | None) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix="omniload-run-", dir=folder)
    except OSError as error:
        raise StateError(
            f"{error.filename!r} cannot be made: {error.strerror}; give another --scratch"
        ) from error
    with made as text:
        yield Path(text)


@contextmanager
def _mounted(
    settings: ImageMount, image: Image | None, mountpoint: Path, log_path: str
) -> Iterator[None]:
    """Mount inside a block; at its end the daemon has ended, and its recording is written."""
    bridge = settings.bridge.model_copy(update={"allow_other": True, "trusted": True})
    changed = {"mountpoint": str(mountpoint), "bridge": bridge}
    # A fork has all modules, and the manifest if it was read.
    serving = partial(serve, settings.model_copy(update=changed), resolved=image)
    daemon = start_forked(serving, str(mountpoint), log_path=log_path)
    try:
        yield
    finally:
        try:
            umount(str(mountpoint))
        except StateError:
            daemon.terminate()  # the daemon unmounts as it ends
        daemon.wait()


def prepare_upper(image: Path, upper: Path) -> None:
    """Make the mount points in the upper layer, where a link of the image cannot lead them elsewhere."""
    for name in ("proc", "dev", "sys"):
        (upper / name).mkdir(mode=0o755)
    upper.chmod(stat_bits.S_IMODE(image.stat().st_mode))
    # The command has this machine's network, and so needs its name servers.
    here, etc = Path("/etc/resolv.conf"), image / "etc"
    if here.is_file() and etc.is_dir() and not etc.is_symlink():
        make_folder(upper / "etc", etc)
        put_file(upper / "etc/resolv.conf", here.read_bytes())


def etc_text(image: Path, name: str) -> str:
    """Return a small file of the image's ``/etc``; links are not followed, because they may lead out."""
    etc = image / "etc"
    try:
        if not stat_bits.S_ISDIR(etc.lstat().st_mode):
            return ""
        # Without O_NONBLOCK, opening a pipe of that name would wait for ever.
        file = os.open(etc / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(file, "rb") as opened:
        if not stat_bits.S_ISREG(os.fstat(file).st_mode):
            return ""
        return opened.read(1 << 20).decode("utf-8", "replace")


def _run(place: Path, start: Start, ids: tuple[int, int], entered: Callable[[], None]) -> int:
    reading, status = os.pipe()

    def child() -> int:
        os.close(reading)
        # The options of the overlay are names in this folder, so that commas in paths of this machine do no harm.
        os.chdir(place)
        return enter(status, start, ids)

    process = fork(child)
    os.close(status)
    with os.fdopen(reading, "rb") as pipe:
        # Two processes write: the number of the command may come after the command's own lines.
        said = sorted(pipe.readlines(), key=lambda line: not line.strip().isdigit())
    if b"done\n" not in said:
        code = process.wait()
        why = b"".join(said[1:] or said).decode(errors="replace").strip()
        raise StateError(
            f"no root directory could be made in {str(place.parent)!r}: "
            f"{why or f'exit code {code}'}; give --scratch a folder on a disk or tmpfs, not on an overlay"
        )
    entered()
    with _forwarding(int(said[0])):
        return process.wait()


@contextmanager
def _forwarding(command: int) -> Iterator[None]:
    """Pass signals on to the command. Process 1 ignores signals that it does not handle; a second signal kills it."""
    seen = 0

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if seen > 1:
            number = signal.SIGKILL
        elif number == signal.SIGINT and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
            return  # the terminal has already sent it to the command
        with suppress(ProcessLookupError):
            os.kill(command, number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _numbers(*texts: str) -> bool:
    return all(text.isascii() and text.isdecimal() and len(text) < 11 for text in texts)


_log = get_logger(__name__)

_READY = b"ready"
DEFECT_CODE = 70
"""Exit code of a daemon that ended because of a defect; its traceback is in the log."""
_DEFAULT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# A new Python process would cost a command half a second of processor time to load modules that this process
# already has. A fork is safe only if no other thread runs: a lock held by another thread would stay locked in
# the child for ever.
class ForkedProcess:
    """A child process; ``wait`` and ``terminate`` work as in ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Return its exit code when it has ended; if negative, the signal that ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


def check_alone() -> None:
    """Check that this process may be forked: no other Python thread runs.

    Raises:
        StateError: Another thread runs.
    """
    if (threads := threading.active_count()) > 1:
        raise StateError(
            f"a process of {threads} threads cannot be forked into a mount or a command; start "
            "'omniload image run' as a process of its own"
        )


def start_forked(
    serve: Callable[[Callable[[], None]], None], mountpoint: str, *, log_path: str
) -> ForkedProcess:
    """Fork, let the child serve, and return when its mount is usable.

    ``serve`` calls its argument once the mount is usable. A dead mount at the mount point is removed
    first. Output of the child to a terminal goes to its log.

    Raises:
        ConfigError: The mount point is no directory, the log cannot be written, or the
            child reports this error.
        UnavailableError: The child reports this error.
        StateError: The child reports this error, or ended without a report.
    """
    clear_dead_mount(mountpoint)
    log = open_log(log_path)
    ready, status = os.pipe()

    def child() -> int:
        os.close(ready)
        return _be_daemon(serve, status, log)

    daemon = fork(child)
    os.close(status)
    os.close(log)
    with os.fdopen(ready, "rb") as pipe:
        answer = pipe.read()
    if answer != _READY:
        code = daemon.wait()
        raise failure_of(answer, code, log_path)
    return daemon


def fork(child: Callable[[], int]) -> ForkedProcess:
    """Fork; the child runs ``child`` and exits with its return value, without doing anything else."""
    # a process may be started without these streams
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # or the child would write the text again
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    code = DEFECT_CODE
    try:
        code = child()
    except BaseException:  # noqa: BLE001 -- the child must never go on as its parent
        _log.exception("defect in a forked process")
    finally:
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                # The disk may be full, or the pipe may have no reader any more.
                with suppress(OSError, ValueError):
                    stream.flush()
        finally:
            # Exit in any case, such as an error of a signal handler; exit handlers, and ``finally`` blocks of callers,
            # belong to the parent.
            os._exit(code)


def _be_daemon(serve: Callable[[Callable[[], None]], None], status: int, log: int) -> int:
    os.setsid()
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # The process that forked may have replaced these streams by its own.
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    set_up_logging("INFO", role=_ROLE)
    return serve_reporting(serve, status, role=_ROLE)
