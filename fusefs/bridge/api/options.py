"""The user's options for the kernel's side of a mount, whatever file system it shows."""

from typing import Literal

from pydantic import Field

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError
from omniload.base.settings.quantities import Bytes

__all__ = ["BridgeOptions", "require_text"]


class BridgeOptions(StrictModel):
    """The kernel's side of a mount."""

    bridge: Literal["auto", "pyfuse3", "device"] = "auto"
    """How the kernel is spoken to: through libfuse, or over /dev/fuse by this package itself.

    ``auto`` is ``device`` for root, and where pyfuse3 is not installed; else ``pyfuse3``.
    """
    read_only: bool = False
    """Refuse every change."""
    allow_other: bool = False
    """Let other users in, under the permission bits of each file."""
    passthrough: bool | None = None
    """Have the kernel read whole local copies by itself (Linux 6.9, root, ``bridge=device``).

    If not given, where the mount is read-only: a file that is written while it is read so becomes
    another inode, and an open handle of the old one sees neither the change nor its locks.
    """
    trusted: bool = False
    """Honour set-uid bits and device nodes, as the root directory of a container needs; root only."""
    take_over: bool = False
    """Go on with the mount that another process has there, which then ends; by bridge=device, whatever it had."""
    kernel_read_ahead: Bytes = 4 << 20
    """Read-ahead of the kernel, set where the daemon may (root); ours works for everyone."""
    max_background: int = Field(default=64, ge=1, le=1024)
    """Requests the kernel keeps in flight, set where the daemon may."""


def require_text(*given: str) -> None:
    """Refuse text that settings cannot hold, because they go to the daemon as JSON.

    Raises:
        ConfigError: A text has bytes that are not UTF-8.
    """
    for value in given:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{value!r} has bytes that are no UTF-8; name what it is by another path, such as a link to it"
            ) from error
