"""Getting a /dev/fuse that is mounted, and taking the mount away: mount(2) for root, else fusermount3."""

# ruff: noqa: S603 -- fusermount3, no shell
import array
import os
import shutil
import socket
import stat as stat_bits
import subprocess
from contextlib import suppress

from fusefs.bridge.api.options import BridgeOptions
from omniload.base.errors import ConfigError, StateError
from omniload.base.linux import calls
from omniload.base.log import get_logger

__all__ = ["attach", "attach_as_root", "detach"]

_LOG = get_logger(__name__)


def attach(target: str, options: BridgeOptions, name: str) -> int:
    """Mount and return the descriptor of /dev/fuse, which does not block.

    Args:
        target: Real path of the mount point.
        options: The kernel's side.
        name: What ``mount`` and ``df`` call it.

    Raises:
        ConfigError: fusermount3 is not installed, and we are not root.
        StateError: The kernel or fusermount3 refuses.
    """
    device = attach_as_root(target, options, name) if os.geteuid() == 0 else None
    if device is None:
        device = _attach_as_user(target, options, name)
    os.set_blocking(device, False)
    return device


def detach(target: str) -> None:
    """Take the mount away from its place; open files stay as long as the daemon answers."""
    if os.geteuid() == 0:
        with suppress(OSError):
            calls.umount(target, lazily=True)
            return
    if (tool := shutil.which("fusermount3")) is not None:
        subprocess.run([tool, "-u", "-q", "-z", target], check=False, capture_output=True)


def _words(options: BridgeOptions) -> list[str]:
    return ["default_permissions", *(["allow_other"] if options.allow_other else [])]


def attach_as_root(target: str, options: BridgeOptions, name: str) -> int | None:
    """Mount by mount(2); return None where it refuses and fusermount3 may be asked.

    Raises:
        StateError: There is no device, or nobody else to ask.
    """
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(
            f"{target!r} cannot be mounted: {error}; load the fuse module, "
            "or give the container the device"
        ) from error
    rootmode = stat_bits.S_IFMT(os.stat(target).st_mode)  # noqa: PTH116 -- before it is ours
    given = [f"fd={device}", f"rootmode={rootmode:o}", f"user_id={os.getuid()}"]
    given += [f"group_id={os.getgid()}", *_words(options)]
    flags = 0 if options.trusted else calls.MS_NOSUID | calls.MS_NODEV
    flags |= calls.MS_RDONLY if options.read_only else 0
    try:
        calls.mount(name, target, f"fuse.{name}", flags, ",".join(given))
    except OSError as error:
        os.close(device)
        if shutil.which("fusermount3") is None:
            raise StateError(f"{target!r} cannot be mounted: {error.strerror}") from error
        _LOG.debug("mount(2) of %s: %s; asking fusermount3", target, error.strerror)
        return None
    return device


def _attach_as_user(target: str, options: BridgeOptions, name: str) -> int:
    tool = shutil.which("fusermount3")
    if tool is None:
        raise ConfigError(f"{target!r} needs fusermount3 to be mounted by a user; install fuse3")
    given = [f"fsname={name}", f"subtype={name}", *_words(options)]
    given += ["ro"] if options.read_only else []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [tool, "-o", ",".join(given), "--", target],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",  # it names the mount point
            check=False,
        )
        if done.returncode:
            raise StateError(f"{target!r} cannot be mounted: {done.stderr.strip()}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise StateError(f"{target!r}: fusermount3 handed over no descriptor; is it version 3?")
    return array.array("i", descriptors)[0]
