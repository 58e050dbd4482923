"""``omniload fs umount``: unmount, and wait for what is written."""

import click

from fusefs.mounts.lifecycle import umount as unmount
from fusefs.tools.display import waiting_line
from omniload.base.errors import ConfigError
from omniload.base.units import parse_seconds

__all__ = ["umount"]


@click.command("umount")
@click.argument("mountpoint")
@click.option(
    "--within", default="5m", show_default=True, help="Most time to wait for its process."
)
def umount(mountpoint: str, within: str) -> None:
    """Unmount, and return when the process behind it is gone and everything is published.

    Files that are being written must be closed first. Ends with 3 where the process is still
    there, and with 5 where something could not be published.

    \b
    Example:
      omniload fs umount /mnt/jobs
    """  # noqa: D301 -- click's own marker
    try:
        within_s = float(str(parse_seconds(within)))
    except ValueError as error:
        raise ConfigError(f"--within: {error}") from error
    unmount(mountpoint, within_s=within_s, report=waiting_line(mountpoint))
