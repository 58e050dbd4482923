"""Read-ahead and requests in flight of a mount, set under /sys where we may (root)."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from fusefs.bridge.api.options import BridgeOptions
from omniload.base.log import get_logger

__all__ = ["device_of_mount", "holders_of_mount", "line_of_mount", "mount_table", "tune_kernel"]

_LOG = get_logger(__name__)
_OCTAL = re.compile(r"\\([0-7]{3})")


def device_of_mount(target: str, mountinfo: str) -> str | None:
    """Return the device, as ``0:41``, of the uppermost FUSE mount at a place, or None.

    It comes from mountinfo: asking the mount itself would wait for us to answer.

    Args:
        target: Absolute real path of the mount point.
        mountinfo: Text of ``/proc/self/mountinfo``.
    """
    line = line_of_mount(target, mountinfo)
    return line.split(" ")[2] if line is not None else None


def line_of_mount(target: str, mountinfo: str) -> str | None:
    """Return the line of the uppermost FUSE mount at a place; as ``device_of_mount``."""
    found = None
    for line in filter(None, mountinfo.split("\n")):
        if _named(line.split(" ")[4]) == target and " - fuse" in line:
            found = line
    return found


def mount_table() -> str:
    """Return ``/proc/self/mountinfo``; mount points have names of any bytes."""
    return os.fsdecode(Path("/proc/self/mountinfo").read_bytes())


def holders_of_mount(device: str, processes: Path = Path("/proc")) -> list[str]:
    """Return a process of each mount namespace in which a mount still is: containers hold copies of what was mounted.

    Args:
        device: Of the mount, as ``0:41``.
        processes: The folder that shows processes.
    """
    seen, found = set(), []
    for folder in sorted(processes.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            namespace = (folder / "ns" / "mnt").readlink()
            if namespace in seen:
                continue
            seen.add(namespace)
            mounts = (folder / "mountinfo").read_bytes().split(b"\n")
            if any(line.split(b" ")[2:3] == [device.encode()] for line in mounts):
                found.append(f"{(folder / 'comm').read_text().strip()} ({folder.name})")
        except OSError:
            continue  # it has ended, or is another user's
    return found


def _named(field: str) -> str:
    """Return a path as it is: the kernel writes white space and backslashes in octal."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)


def tune_kernel(options: BridgeOptions, target: str) -> None:
    """Raise read-ahead and requests in flight of the mount at ``target`` where we may."""
    device = device_of_mount(target, mount_table())
    if device is None:
        return
    connection = Path(f"/sys/fs/fuse/connections/{device.partition(':')[2]}")
    settings: Mapping[Path, int] = {
        Path(f"/sys/class/bdi/{device}/read_ahead_kb"): options.kernel_read_ahead >> 10,
        connection / "max_background": options.max_background,
        connection / "congestion_threshold": options.max_background * 3 // 4,
    }
    for path, value in settings.items():
        try:
            path.write_text(str(value), encoding="ascii")
        except OSError as error:
            _LOG.debug("%s stays as it is: %s", path, error)
