"""``omniload fs umount``: unmount, and wait for what is written."""

import click

from fusefs.mounts.lifecycle import umount as unmount
from fusefs.tools.display import waiting_line
from omniload.base.cli import DURATION

__all__ = ["umount"]


@click.command("umount")
@click.argument("mountpoint")
@click.option(
    "--within",
    type=DURATION,
    default="5m",
    show_default=True,
    help="Most time to wait for its process.",
)
def umount(mountpoint: str, within: float) -> None:
    """Unmount, and return when the process behind it is gone and everything is published.

    Files that are being written must be closed first. Ends with 3 where the process is still
    there, and with 5 where something could not be published.

    \b
    Example:
      omniload fs umount /mnt/jobs
    """  # noqa: D301 -- click's own marker
    unmount(mountpoint, within_s=within, report=waiting_line(mountpoint))
