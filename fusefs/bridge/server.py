"""Shows any ``FileSystem`` at a mount point, through the binding that the options name."""

import importlib.util
import os
from collections.abc import Callable

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.device import binding as device_binding
from omniload.base.errors import StateError
from omniload.base.linux.mount_table import fuse_mount_at

__all__ = ["chosen", "serve"]


def _nobody_waits() -> None:
    """Report nothing, because no process waits for the mount or its hand-over."""


def serve(
    filesystem: FileSystem,
    mountpoint: str,
    options: BridgeOptions | None = None,
    *,
    name: str = "omnifs",
    ready: Callable[[], None] = _nobody_waits,
    let_go: Callable[[], None] = _nobody_waits,
) -> None:
    """Mount, answer until unmounted or asked to end by SIGTERM, SIGINT or SIGHUP, unmount.

    This call is for the main thread of a process of its own. The process must not touch the mount itself,
    because it would wait for its own answer.

    Args:
        filesystem: The file system to show.
        mountpoint: An empty directory.
        options: The kernel's side.
        name: Name of the mount in ``mount`` and ``df``.
        ready: Called once, when the mount is usable.
        let_go: Called if another process has taken the mount over, before that process is ready.

    Raises:
        ConfigError: The chosen binding is not installed.
        StateError: The mount point cannot be mounted on.
    """
    options = options or BridgeOptions()
    target = os.path.realpath(mountpoint)
    # A second mount would hide the first, and nobody could then reach the first mount's daemon by its mount point.
    if not options.take_over and fuse_mount_at(target) is not None:
        # An image keeps no state to hand over, so the message must not name a remedy that would be refused.
        can_go_on = type(filesystem).handed_over is not FileSystem.handed_over
        goes_on = ", or go on with it: --take-over" if can_go_on else ""
        raise StateError(f"{mountpoint!r} is a mount already; unmount it{goes_on}")
    if chosen(options) == "device":
        device_binding.serve(filesystem, mountpoint, options, name=name, ready=ready, let_go=let_go)
        return
    # Import it here, because pyfuse3 and trio are an extra, which the other binding does not need.
    from fusefs.bridge.libfuse import binding  # noqa: PLC0415

    binding.serve(filesystem, mountpoint, options, name=name, ready=ready, let_go=let_go)


def chosen(options: BridgeOptions) -> str:
    """Return the binding that serves.

    ``auto`` means our own binding for root, or if that of libfuse is not installed. A mount that is taken over is
    always served by our own binding, because libfuse begins with INIT, which was answered long ago.
    """
    if options.take_over:
        return "device"
    if options.bridge != "auto":
        return options.bridge
    # With our own binding, root mounts, passes files through and sets read-ahead itself; a user keeps the binding
    # that distributions support (docs/design/fusefs/0012).
    has_pyfuse3 = all(importlib.util.find_spec(name) for name in ("pyfuse3", "trio"))
    return "device" if os.geteuid() == 0 or not has_pyfuse3 else "pyfuse3"
