"""``omniload fs``: mount, umount, stat, verify, prefetch, drop, export."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_VERBS = {
    "drop": (
        "fusefs.commands.drop:drop",
        "Drop cached data of files and directories: attributes, blocks in memory, copies on disk.",
    ),
    "export": (
        "fusefs.commands.export:export",
        "Copy FILE, or all files below it, to plain files at TARGET: a path or any store's URL.",
    ),
    "mount": ("fusefs.commands.mount:mount", "Show STORE as a tree of files at MOUNTPOINT."),
    "prefetch": (
        "fusefs.commands.prefetch:prefetch",
        "Load files and directories before they are read: into the disk cache, or else into memory.",
    ),
    "stat": (
        "fusefs.commands.stat:stat",
        "Show how FILE is stored: plain or striped, unit, count, objects.",
    ),
    "umount": (
        "fusefs.commands.umount:umount",
        "Unmount, and return when its process has ended and everything is published.",
    ),
    "verify": (
        "fusefs.commands.verify:verify_command",
        "Check that every object that a manifest of STORE names is present and complete.",
    ),
}
"""Module of each verb, and its line in ``--help``.

Modules are loaded lazily: a mount is ready sooner without the code that checks and copies files.
"""


@click.group("fs", cls=Verbs, verbs=_VERBS)
def command() -> None:
    """Mount HDFS, S3 or any store as files, read and written in parallel.

    \b
    Example:
      omniload fs mount hdfs://namenode:9000/jobs /mnt/jobs
      omniload fs umount /mnt/jobs
    """  # noqa: D301 -- click's own marker
