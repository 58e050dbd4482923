"""``omniload fs umount``: unmount, and wait until everything is published."""

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
    help="How long to wait for its process.",
)
def umount(mountpoint: str, within: float) -> None:
    """Unmount, and return when its process has ended and everything is published.

    Close all files that are being written first. The exit code is 3 if the process is still there, and 5 if something
    could not be published.

    \b
    Example:
      omniload fs umount /mnt/jobs
    """  # noqa: D301 -- click's own marker
    unmount(mountpoint, within_s=within, report=waiting_line(mountpoint))
