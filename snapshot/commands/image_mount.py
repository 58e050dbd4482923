"""``omniload image``: mount, umount."""

import os
import sys
from pathlib import Path

import click

from fusefs.bridge.process.launch import followed, umount
from omniload.base.errors import ConfigError
from snapshot.engines.podman.mount import layer_store_settings
from snapshot.engines.podman.mount import mount as mount_layer_store
from snapshot.image.mount.daemon import mount, mount_settings

__all__ = ["mount_command", "umount_command"]


@click.command("mount")
@click.argument("places", nargs=-1, metavar="[IMAGE] MOUNTPOINT")
@click.option(
    "--as",
    "form",
    type=click.Choice(["tree", "layer-store"]),
    default="tree",
    show_default=True,
    help="tree: one image, merged. layer-store: a store in which Podman finds the layers of any image.",
)
@click.option(
    "-o", "options", multiple=True, help="Option of the mount as KEY=VALUE: memory, disk, trace..."
)
@click.option(
    "-f", "--foreground", is_flag=True, help="Stay in the foreground until it is unmounted."
)
@click.option("--log", type=click.Path(dir_okay=False), help="Log file of the daemon.")
def mount_command(
    places: tuple[str, ...],
    form: str,
    options: tuple[str, ...],
    foreground: bool,
    log: str | None,
) -> None:
    """Show IMAGE at MOUNTPOINT, read-only; its bytes are fetched as they are read.

    \b
    Options of a tree:
      mirror, platform, cache, memory, disk, window, slots, allow_other, trusted
      trace            file of hot blocks, which are fetched first, or auto
      record           file for the touches, or auto
      traces           folder for auto, which finds a trace by image and command;
                       nodes may share it; default: in the cache
      peers            HOST:PORT,...: share blocks with these nodes
      serve            HOST:PORT on which this node serves its blocks
      peer_name        entry of this node in peers, if that differs from serve
      peer_token_file  file with the token that all nodes share

    With --as layer-store, give no image: the engine asks for layers as it needs them.

    \b
    Options of a layer-store:
      mirror, platform, cache, traces, memory, disk, window, slots
      registry         HOST:PORT: ask only this registry; repeatable
      index            serve layers without a table of contents, too; each is
                       read whole once

    \b
    Example:
      omniload image mount registry.example:5000/team/torch:2.13 /mnt/torch -o trace=torch.trace
      omniload image mount --as layer-store /var/lib/omniload-layers -o registry=registry.example
    """  # noqa: D301 -- click's own marker
    wanted = 1 if form == "layer-store" else 2
    if len(places) != wanted:
        usage = "MOUNTPOINT" if wanted == 1 else "IMAGE MOUNTPOINT"
        raise ConfigError(f"{len(places)} places given; --as {form} takes {usage}")
    # The text of an unset variable; as an absolute path it would be the working directory.
    if not places[-1]:
        raise ConfigError("the mount point is an empty text; name a folder")
    mountpoint = str(Path(places[-1]).absolute())
    # A daemon in the background outlives the terminal of its command.
    log = log or (None if foreground else os.devnull)
    if form == "layer-store":
        process = mount_layer_store(layer_store_settings(mountpoint, options), log_path=log)
    else:
        process = mount(mount_settings(places[0], mountpoint, options), log_path=log)
    if not foreground:
        what = places[0] if wanted == 2 else "layers"
        click.echo(f"{what} at {mountpoint}, process {process.pid}")
        process.returncode = 0  # the daemon outlives this process, which does not wait for it
        return
    sys.exit(followed(process))


@click.command("umount")
@click.argument("mountpoint")
def umount_command(mountpoint: str) -> None:
    """Unmount an image, and write its recorded trace.

    \b
    Example:
      omniload image umount /mnt/torch
    """  # noqa: D301 -- click's own marker
    umount(mountpoint)
