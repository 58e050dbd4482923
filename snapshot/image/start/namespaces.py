"""The way into an image, in a forked process, and the parts of this machine that are visible there.

In a folder with ``image``, ``upper``, ``work`` and ``root``, it makes new mount and process
namespaces and an overlay at ``root``, and becomes the command there.
"""

import os
import signal
import stat as stat_bits
import warnings  # noqa: F401 -- by execvpe, which must not import it from the image
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from omniload.base.errors import ConfigError
from omniload.base.linux import calls
from omniload.base.linux.calls import MS_BIND, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT, MS_SLAVE
from omniload.base.linux.exec_with_parent import end_with_parent
from snapshot.startup.events import LOG_VARIABLE, handed_down

__all__ = [
    "LOG_INSIDE",
    "Bind",
    "Start",
    "bind_of",
    "enter",
    "log_of",
    "make_folder",
    "make_mount_points",
]

LOG_INSIDE = "/run/omniload/startup.jsonl"
"""Path of the start-up log for a command inside an image."""
_TAKEN = ("proc", "dev", "sys")
# CLONE_NEWNS and CLONE_NEWPID of linux/sched.h.
_NEW_MOUNTS, _NEW_PROCESSES = 0x20000, 0x20000000
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Python ignores these signals, and so would the command, unless they are restored.
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)
_MOUNTS = (
    # Mounts do not leak out; but a shared mount that the machine unmounts is not kept in use here.
    ("none", "/", "", MS_REC | MS_SLAVE, ""),
    ("omniload", "root", "overlay", 0, "lowerdir=image,upperdir=upper,workdir=work"),
    ("proc", "root/proc", "proc", 0, ""),
    ("/dev", "root/dev", "", MS_BIND | MS_REC, ""),
    ("/sys", "root/sys", "", MS_BIND | MS_REC, ""),
)


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of this machine, and its place inside the image."""

    source: str
    """Absolute path on this machine."""
    target: str
    """Absolute path in the image."""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A command to run, and its surroundings."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    folder: str = "/"
    user: str = ""
    """User in the form of the image: ``NAME``, ``NUMBER``, ``USER:GROUP``; empty for root."""
    binds: tuple[Bind, ...] = ()
    """Paths of this machine that the command sees in addition to the image."""


def bind_of(text: str) -> Bind:
    """Read ``HOST``, ``HOST:PATH`` or either with ``:ro``; without PATH it is the same as HOST.

    Raises:
        ConfigError: Nothing is there, or PATH cannot be mounted on.
    """
    rest, _, last = text.rpartition(":")
    read_only = bool(rest) and last == "ro"
    host, _, path = (rest if read_only else text).partition(":")
    source = os.path.realpath(host)
    if not host or not Path(source).exists():
        raise ConfigError(f"--bind {text!r}: {host!r} is not on this machine; make it first")
    target = path or str(Path(host).absolute())
    parts = PurePosixPath(target).parts
    if parts[:1] != ("/",) or len(parts) == 1 or ".." in parts or parts[1] in _TAKEN:
        raise ConfigError(
            f"--bind {text!r}: {target!r} cannot be mounted on; give an absolute path without '..', "
            f"outside of /{', /'.join(_TAKEN)}"
        )
    return Bind(source, str(PurePosixPath(target)), read_only)


def log_of(environment: Mapping[str, str] = os.environ) -> tuple[tuple[Bind, ...], list[str]]:
    """Return the settings by which stages inside and outside of an image become lines of one start-up.

    Returns:
        The bind of the log, and ``KEY=VALUE`` for the job, node and attempt inside;
        nothing if no log is written or the log cannot be shared.
    """
    path = environment.get(LOG_VARIABLE)
    if not path:
        return (), []
    with suppress(OSError):
        Path(path).touch()
        known = handed_down(environment) | {LOG_VARIABLE: LOG_INSIDE}
        return (Bind(os.path.realpath(path), LOG_INSIDE),), [f"{k}={v}" for k, v in known.items()]
    return (), []


def make_mount_points(binds: Sequence[Bind], image: Path, upper: Path) -> None:
    """Make the mount points in the upper layer, so that no link of the image can lead them elsewhere.

    Folders that the image has keep their modes and owners.

    Raises:
        ConfigError: A mount point would be inside a file.
    """
    for bind in binds:
        *above, name = PurePosixPath(bind.target).parts[1:]
        lower, place = image, upper
        for part in above:
            lower, place = lower / part, place / part
            make_folder(place, lower)
        try:
            if Path(bind.source).is_dir():
                (place / name).mkdir(exist_ok=True)
            else:
                (place / name).touch()
        except OSError as error:
            raise ConfigError(
                f"--bind {bind.source}:{bind.target}: {error.strerror}; another bind lies there"
            ) from error


def make_folder(place: Path, lower: Path) -> None:
    """Make a missing folder of the upper layer, with mode and owner of the lower folder that it covers."""
    try:
        place.mkdir(mode=0o755)
    except FileExistsError:
        return
    with suppress(OSError):
        found = lower.lstat()
        if stat_bits.S_ISDIR(found.st_mode):
            os.chown(place, found.st_uid, found.st_gid)
            place.chmod(stat_bits.S_IMODE(found.st_mode))


def enter(status: int, start: Start, ids: tuple[int, int]) -> int:
    """Make the namespaces, start the command in them, wait; return its exit code, 128 + N for signal N.

    This process cannot start another one afterwards, because its process namespace has ended.

    ``status`` gets the number of the command's process, then ``done``, or the error.
    """
    # Do not use ``unshare --fork`` of util-linux: 2.38 loses the exit code of a command that was signalled.
    try:
        calls.unshare(_NEW_MOUNTS | _NEW_PROCESSES)
    except OSError as error:
        os.write(status, f"no namespaces: {error.strerror}".encode())
        return 1
    # The first child is process 1 of the new namespace; this process stays outside.
    child = os.fork()
    if child:
        for number in _IGNORED:
            # these signals are meant for the command, and are sent to it
            signal.signal(number, signal.SIG_IGN)
        os.write(status, b"%d\n" % child)
        os.close(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return 128 - code if code < 0 else code
    try:
        end_with_parent(signal.SIGKILL)
        _mount(status, start.binds)
        os.write(status, b"done\n")
        os.close(status)
        _become(start, ids)
    finally:
        os._exit(126)  # never return into the code that forked this process


def _mount(status: int, binds: Sequence[Bind]) -> None:
    mounts = list(_MOUNTS)
    for bind in binds:
        target = f"root{bind.target}"
        mounts.append((bind.source, target, "", MS_BIND | MS_REC, ""))
        # The command keeps the mounts that it was started with; later mounts do not reach it.
        mounts.append(("none", target, "", MS_REC | MS_PRIVATE, ""))
        # A new bind takes no other flags; a second mount makes it read-only.
        if bind.read_only:
            mounts.append(("none", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY, ""))
    for source, target, kind, flags, data in mounts:
        try:
            calls.mount(source, target, kind, flags, data)
        except OSError as error:
            said = f"mount of {kind or source} at {target}: {error.strerror}"
            os.write(status, said.encode(errors="replace"))
            os._exit(1)


def _become(start: Start, ids: tuple[int, int]) -> None:
    """Change the root directory and become the command; exit with 127 if it does not exist, as a shell does."""
    code, words, variables = 126, start.words, dict(start.variables)
    try:
        for number in _RESTORED:
            signal.signal(number, signal.SIG_DFL)
        os.chroot("root")
        os.chdir("/")
        os.makedirs(start.folder, exist_ok=True)  # noqa: PTH103 -- pathlib is not loaded for this
        os.chdir(start.folder)
        os.setgroups([])  # groups first, because a user who is not root may not change them
        os.setgid(ids[1])
        os.setuid(ids[0])
        # Set its variables only now: with LD_PRELOAD, a program of this machine would load code of the image.
        os.execvpe(words[0], words, variables)  # noqa: S606 -- what was asked for
    except FileNotFoundError as error:
        code, problem = 127, str(error.strerror)
    except OSError as error:
        problem = str(error.strerror)
    # A traceback would import modules, which must not happen here: the files are the image's now.
    os.write(2, f"omniload: {words[0]}: {problem}\n".encode("utf-8", "surrogateescape"))
    os._exit(code)
