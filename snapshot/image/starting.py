"""A command run in a mounted image: an overlay for what it writes, namespaces of its own, another root.

``unshare``, ``mount`` and ``sh`` of this machine do it; nothing of the image runs before
the command does. The command is process 1 of a new process namespace, as in any container,
so that nothing it started outlives it. It has the network of the machine.
"""

import os
import shutil
import signal
import stat as stat_bits
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fusefs.bridge.daemons import umount
from omniload.base.errors import ConfigError, StateError
from snapshot.image.mounting import ImageMount, mount
from snapshot.oci.manifest import Process

__all__ = ["Start", "check_machine", "ids_of", "run_in", "start_of"]

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TOOLS = ("unshare", "mount", "sh", "fusermount3")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STEPS = """
{
    mount -t overlay omniload -o lowerdir=image,upperdir=upper,workdir=work root
    mount -t proc proc root/proc
    mount --rbind /dev root/dev
    mount --rbind /sys root/sys
} 2>&3
echo done >&3
directory=$1 user=$2 group=$3
shift 3
exec "$UNSHARE" --root=root --wd="$directory" --setgid "$group" --setuid "$user" -- \
    "$ENV" -i "$@" 3>&-
"""


@dataclass(frozen=True, slots=True)
class Start:
    """What is run, and how."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    folder: str = "/"
    user: str = ""
    """As the image says it: ``NAME``, ``NUMBER``, ``USER:GROUP``; empty for root."""


def start_of(process: Process | None, words: Sequence[str], variables: Sequence[str]) -> Start:
    """Return how an image wants to be started: its variables, folder and user.

    Args:
        process: Of its configuration.
        words: The command, instead of the image's own where there are any.
        variables: ``KEY=VALUE`` over those of the image, or ``KEY`` alone to pass one on.

    Raises:
        ConfigError: There is no command, or a variable is none.
    """
    process = process or Process()
    command = tuple(words) or (*(process.entrypoint or ()), *(process.cmd or ()))
    if not command:
        raise ConfigError("the image names no command; give one after --")
    found = {"PATH": _PATH, "HOME": "/root"}
    for text in process.env or ():
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
    """Return the numbers of user and group that an image's configuration names.

    Args:
        user: ``NAME``, ``NUMBER``, or either with ``:GROUP``; empty for root.
        passwd: Text of the image's ``/etc/passwd``.
        group: Text of its ``/etc/group``.

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
    """Say what keeps this machine from running commands in images.

    Raises:
        ConfigError: Not root, or a tool is missing.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            f"user {os.geteuid()} cannot mount an overlay and change the root directory; run it as root"
        )
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not found; install util-linux and fuse3")


def run_in(settings: ImageMount, start: Start, *, scratch: str | None, log_path: str) -> int:
    """Mount an image, run a command in it, unmount; return its exit code, 128 + N for signal N.

    Args:
        settings: Of the mount; ``mountpoint`` is not looked at.
        start: The command.
        scratch: Folder for what it writes, removed afterwards; a temporary one if not given.
        log_path: Where the daemon of the mount logs.

    Raises:
        ConfigError: The image is not there.
        StateError: The overlay cannot be mounted.
    """
    check_machine()
    with tempfile.TemporaryDirectory(prefix="omniload-run-", dir=scratch) as text:
        place = Path(text)
        place.chmod(0o755)  # users of the image pass through it
        for name in ("image", "upper", "work", "root"):
            (place / name).mkdir()
        with _mounted(settings, place / "image", log_path):
            _prepare(place / "image", place / "upper")
            ids = ids_of(start.user, *(_text(place / "image", f) for f in ("passwd", "group")))
            return _run(place, start, ids)


@contextmanager
def _mounted(settings: ImageMount, mountpoint: Path, log_path: str) -> Iterator[None]:
    """Mount for the time of a ``with``; at its end the daemon has ended, and what it recorded is written."""
    bridge = settings.bridge.model_copy(update={"allow_other": True, "trusted": True})
    changed = {"mountpoint": str(mountpoint), "bridge": bridge}
    daemon = mount(settings.model_copy(update=changed), log_path=log_path)
    try:
        yield
    finally:
        try:
            umount(str(mountpoint))
        except StateError:
            daemon.terminate()  # it unmounts as it ends
        daemon.wait()


def _prepare(image: Path, upper: Path) -> None:
    """Make the mount points in the upper layer, where a link of the image cannot lead them elsewhere."""
    for name in ("proc", "dev", "sys"):
        (upper / name).mkdir(mode=0o755)
    upper.chmod(stat_bits.S_IMODE(image.stat().st_mode))
    here, etc = Path("/etc/resolv.conf"), image / "etc"
    with suppress(FileNotFoundError):
        found = etc.lstat()
        if stat_bits.S_ISDIR(found.st_mode) and here.is_file():
            (upper / "etc").mkdir()
            (upper / "etc").chmod(stat_bits.S_IMODE(found.st_mode))
            os.chown(upper / "etc", found.st_uid, found.st_gid)
            (upper / "etc/resolv.conf").write_bytes(here.read_bytes())


def _text(image: Path, name: str) -> str:
    """Return a small file of the image's ``/etc``; links are not followed: they may lead out."""
    etc = image / "etc"
    try:
        if not stat_bits.S_ISDIR(etc.lstat().st_mode):
            return ""
        file = os.open(etc / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(file, "rb") as opened:
        if not stat_bits.S_ISREG(os.fstat(file).st_mode):
            return ""
        return opened.read(1 << 20).decode("utf-8", "replace")


def _run(place: Path, start: Start, ids: tuple[int, int]) -> int:
    told, telling = os.pipe()
    tools = {name.upper(): shutil.which(name) or name for name in ("unshare", "env")}
    namespaces = ("--mount", "--propagation=private", "--pid", "--fork", "--kill-child")
    # Moved to 3, the one number that the steps know.
    line = [tools["UNSHARE"], *namespaces, "sh", "-ec", f"exec 3>&{telling} {telling}>&-\n{_STEPS}"]
    line += ["sh", start.folder, *map(str, ids)]
    line += [f"{key}={value}" for key, value in start.variables.items()]
    process = subprocess.Popen(  # noqa: S603 -- tools of this machine, fixed steps
        [*line, *start.words],
        cwd=place,
        env={"PATH": os.environ.get("PATH", _PATH), **tools},
        pass_fds=[telling],
    )
    os.close(telling)
    with _forwarding(process), os.fdopen(told, "rb", buffering=0) as pipe:
        said = b""
        while not said.endswith(b"done\n") and (part := pipe.read(4096)):
            said += part
        code = process.wait()
    if not said.endswith(b"done\n"):
        raise StateError(
            f"no root directory could be made in {str(place.parent)!r}: "
            f"{said.decode(errors='replace').strip() or f'exit code {code}'}; "
            "give --scratch a folder on a disk or tmpfs, not on an overlay"
        )
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Pass signals on to the command. Process 1 is deaf to those it does not handle; the second one kills it."""
    seen = 0

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL if seen > 1 else number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _numbers(*texts: str) -> bool:
    return all(text.isascii() and text.isdecimal() and len(text) < 11 for text in texts)
