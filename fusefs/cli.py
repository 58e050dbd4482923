"""``omniload fs``: mount, umount, stat, verify, prefetch, drop, export."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_PLACES = {
    "drop": "fusefs.commands.drop:drop",
    "export": "fusefs.commands.export:export",
    "mount": "fusefs.commands.mount:mount",
    "prefetch": "fusefs.commands.prefetch:prefetch",
    "stat": "fusefs.commands.stat:stat",
    "umount": "fusefs.commands.umount:umount",
    "verify": "fusefs.commands.verify:verify_command",
}
"""Where each verb lies: a mount is there sooner where what checks and copies files is not loaded."""


@click.group("fs", cls=Verbs, places=_PLACES)
def command() -> None:
    """Striped files over HDFS and any store."""
