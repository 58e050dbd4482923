"""``omniload image``: show, convert, mount, umount, run, record, prefetch, startup; serve for containerd."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_PLACES = {
    "convert": "snapshot.commands.image_show:convert_command",
    "mount": "snapshot.commands.image_mount:mount_command",
    "prefetch": "snapshot.commands.image_run:prefetch_command",
    "record": "snapshot.commands.image_run:record_command",
    "run": "snapshot.commands.image_run:run_command",
    "serve": "snapshot.commands.image_serve:serve_command",
    "show": "snapshot.commands.image_show:show_command",
    "startup": "snapshot.commands.startup:startup_command",
    "umount": "snapshot.commands.image_mount:umount_command",
}
"""Where each verb lies: a report of a start loads nothing of registries, mounts and engines."""


@click.group("image", cls=Verbs, places=_PLACES)
def command() -> None:
    """Container images, read lazily."""
