"""Read-ahead and requests in flight of a mount, set under /sys if this process may (root)."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fusefs.bridge.api.options import BridgeOptions
from omniload.base.linux.mount_table import fuse_mount_at, mounts_everywhere
from omniload.base.log import get_logger

__all__ = ["holders_of_mount", "tune_kernel"]

_LOG = get_logger(__name__)


def holders_of_mount(device: str) -> list[str]:
    """Return one process of each mount namespace that still has a mount, by its name and number.

    Args:
        device: Device number of the mount, such as ``0:41``.
    """
    found = []
    for folder, mounts in mounts_everywhere():
        if any(mount.device == device for mount in mounts or ()):
            with suppress(OSError):  # the process has ended
                found.append(f"{(folder / 'comm').read_text().strip()} ({folder.name})")
    return found


def tune_kernel(options: BridgeOptions, target: str) -> None:
    """Raise read-ahead and requests in flight of the mount at ``target`` if this process may."""
    mount = fuse_mount_at(target)
    if mount is None:
        return
    device = mount.device
    connection = Path(f"/sys/fs/fuse/connections/{device.partition(':')[2]}")
    settings: Mapping[Path, int] = {
        Path(f"/sys/class/bdi/{device}/read_ahead_kb"): options.kernel_read_ahead >> 10,
        connection / "max_background": options.max_background,
        connection / "congestion_threshold": options.max_background * 3 // 4,
    }
    # Set each one separately: any of them may be refused, and a mount works without.
    for path, value in settings.items():
        try:
            path.write_text(str(value), encoding="ascii")
        except OSError as error:
            _LOG.debug("%s stays as it is: %s", path, error)
