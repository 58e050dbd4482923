"""``omniload image``: show, convert, mount, umount, run, record, prefetch, startup; serve for containerd."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_VERBS = {
    "convert": (
        "snapshot.commands.image_show:convert_command",
        "Write IMAGE to TARGET as zstd:chunked, of which parts can be read; other tools read it, too.",
    ),
    "mount": (
        "snapshot.commands.image_mount:mount_command",
        "Show IMAGE at MOUNTPOINT, read-only; its bytes are fetched as they are read.",
    ),
    "prefetch": (
        "snapshot.commands.image_run:prefetch_command",
        "Fetch the blocks that a start of WORDS in IMAGE touches to this node, before the start.",
    ),
    "record": (
        "snapshot.commands.image_run:record_command",
        "Run WORDS in IMAGE and record which bytes the command touches, in order; needs root.",
    ),
    "run": (
        "snapshot.commands.image_run:run_command",
        "Run WORDS in IMAGE from a lazy mount; the blocks of the last start come first; needs root.",
    ),
    "serve": (
        "snapshot.commands.image_serve:serve_command",
        "Serve containerd as a snapshotter: containers start from lazily read images; needs root.",
    ),
    "show": (
        "snapshot.commands.image_show:show_command",
        "Show the layers of IMAGE, with sizes and formats; to see its files, mount it.",
    ),
    "startup": (
        "snapshot.commands.startup:startup_command",
        "Show how long a start-up took, from the event files of its nodes.",
    ),
    "umount": (
        "snapshot.commands.image_mount:umount_command",
        "Unmount an image, and write its recorded trace.",
    ),
}
"""Module of each verb, and its line in ``--help``.

A report of a start loads no code of registries, mounts and engines.
"""


@click.group("image", cls=Verbs, verbs=_VERBS)
def command() -> None:
    """Run container images whose bytes are fetched as they are read.

    \b
    Example:
      omniload image show registry.example:5000/team/torch:2.13
      omniload image run registry.example:5000/team/torch:2.13 -- python train.py
    """  # noqa: D301 -- click's own marker
