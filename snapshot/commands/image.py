"""``omniload image``: show, convert, mount, umount; serve for containerd."""

import importlib
import json
import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import click

from fusefs.bridge.api.options import require_text
from fusefs.bridge.process.launch import followed, umount
from omniload.base.cli import Verbs
from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.base.log import get_logger, set_up_logging
from omniload.base.units import format_bytes
from snapshot.engines.containerd.images import RegistryImages
from snapshot.engines.containerd.snapshotter import Snapshotter
from snapshot.engines.containerd.views import MountedViews
from snapshot.engines.podman.mount import layer_store_settings
from snapshot.engines.podman.mount import mount as mount_layer_store
from snapshot.image.layer.convert import convert_image
from snapshot.image.layer.toc import format_of
from snapshot.image.mount.daemon import (
    AUTO,
    ImageMount,
    mount,
    mount_settings,
    options_in,
    platform_of,
)
from snapshot.oci.image import Image, open_store, opened_image
from snapshot.oci.manifest import Platform
from snapshot.private_folder import private_folder

__all__ = ["command", "mount_template", "serve_command"]

_log = get_logger(__name__)
_SOCKET = "/run/omniload/snapshotter.sock"
_ROOT = "/var/lib/omniload/snapshotter"
_REFUSED = ("serve", "image", "mountpoint", "command")


_PLACES = {
    "convert": "snapshot.commands.image:convert_command",
    "mount": "snapshot.commands.image:mount_command",
    "prefetch": "snapshot.commands.image_run:prefetch_command",
    "record": "snapshot.commands.image_run:record_command",
    "run": "snapshot.commands.image_run:run_command",
    "serve": "snapshot.commands.image:serve_command",
    "show": "snapshot.commands.image:show_command",
    "startup": "snapshot.commands.startup:startup_command",
    "umount": "snapshot.commands.image:umount_command",
}


@click.group("image", cls=Verbs, places=_PLACES)
def command() -> None:
    """Container images, read lazily."""


@click.command("show")
@click.argument("image")
@click.option("--platform", help="OS/ARCHITECTURE[/VARIANT]; default: this machine's.")
@click.option(
    "--mirror", "mirrors", multiple=True, help="Registry that may hold it too; repeatable."
)
@click.option("--json", "as_json", is_flag=True)
def show_command(image: str, platform: str | None, mirrors: tuple[str, ...], as_json: bool) -> None:
    """Show the layers of IMAGE, their sizes and formats; its files are seen through a mount.

    A registry is spoken to over TLS, unless it is on this machine or http:// stands before it.

    \b
    Example:
      omniload image show registry.example:5000/team/torch:2.13
      omniload image show oci:folder:tag --json
    """  # noqa: D301 -- click's own marker
    with opened_image(image, mirrors=mirrors, platform=_named(platform)) as (_, found):
        described = _described(found)
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    click.echo(f"{described['digest']}  {' '.join(described['command'])}")
    for layer in described["layers"]:
        click.echo(
            f"  {layer['digest']}  {format_bytes(layer['size_bytes']):>9}  {layer['format']}"
        )


@click.command("mount")
@click.argument("places", nargs=-1, metavar="[IMAGE] MOUNTPOINT")
@click.option(
    "--as",
    "form",
    type=click.Choice(["tree", "layer-store"]),
    default="tree",
    show_default=True,
    help="One image merged, or a store in which Podman finds the layers of any image.",
)
@click.option("-o", "options", multiple=True, help="KEY=VALUE of the mount: memory, disk, trace...")
@click.option("-f", "--foreground", is_flag=True, help="Stay until it is unmounted.")
@click.option("--log", type=click.Path(dir_okay=False), help="Where the daemon logs.")
def mount_command(
    places: tuple[str, ...],
    form: str,
    options: tuple[str, ...],
    foreground: bool,
    log: str | None,
) -> None:
    """Show IMAGE at MOUNTPOINT, read-only; its bytes are fetched as they are read.

    \b
    Options: mirror, platform, cache, memory, disk, trace (hot blocks first), record (where
    touches go; both a file, or auto: by image and command), traces (a folder of them that
    nodes may share; default: in the cache), window, slots, allow_other, trusted;
    peers=HOST:PORT,... (share blocks with these nodes), serve=HOST:PORT (as one of them),
    peer_name (which, if not serve), peer_token_file.

    \b
    With --as layer-store no image is named: the engine asks for layers as it needs them.
    Options: mirror, platform, cache, traces, memory, disk, window, slots; registry=HOST:PORT
    (ask only this one; repeatable), index (also layers without a table of contents, each read
    whole once).

    \b
    Example:
      omniload image mount registry.example:5000/team/torch:2.13 /mnt/torch -o trace=torch.trace
      omniload image mount --as layer-store /var/lib/omniload-layers -o registry=registry.example
    """  # noqa: D301 -- click's own marker
    wanted = 1 if form == "layer-store" else 2
    if len(places) != wanted:
        usage = "MOUNTPOINT" if wanted == 1 else "IMAGE MOUNTPOINT"
        raise ConfigError(f"{len(places)} places given; --as {form} takes {usage}")
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
        process.returncode = 0  # it outlives us, and nobody here waits for it
        return
    sys.exit(followed(process))


@click.command("umount")
@click.argument("mountpoint")
def umount_command(mountpoint: str) -> None:
    """Unmount an image; what was recorded is written then.

    \b
    Example:
      omniload image umount /mnt/torch
    """  # noqa: D301 -- click's own marker
    umount(mountpoint)


@click.command("convert")
@click.argument("image")
@click.argument("target")
@click.option("--level", default=3, show_default=True, type=click.IntRange(1, 19), help="Of zstd.")
@click.option("--platform", help="OS/ARCHITECTURE[/VARIANT]; default: this machine's.")
@click.option("--json", "as_json", is_flag=True)
def convert_command(
    image: str, target: str, level: int, platform: str | None, as_json: bool
) -> None:
    """Write IMAGE as zstd:chunked to TARGET: parts of it can then be read; other tools read it too.

    \b
    Example:
      omniload image convert registry.example:5000/torch:2.13 registry.example:5000/torch:2.13-lazy
      omniload image convert oci:folder:tag oci:folder:tag-lazy
    """  # noqa: D301 -- click's own marker
    with opened_image(image, platform=_named(platform)) as (source, found):
        goal, tag = open_store(target, create=True)
        with closing(goal):
            if tag.startswith("sha256:"):
                raise ConfigError(f"{target!r} names a digest; name the new image by a tag")
            made = convert_image(source, found, goal, tag, level=level)
    before, after = (sum(layer.size for layer in each.layers) for each in (found, made))
    if as_json:
        numbers = {"digest": made.digest, "bytes_before": before, "bytes_after": after}
        click.echo(json.dumps({**numbers, "kept": list(made.kept)}, indent=2))
        return
    click.echo(
        f"{made.digest}  {len(made.layers)} layers, {len(made.kept)} of them as they were, "
        f"{format_bytes(before)} before, {format_bytes(after)} after"
    )


def _described(image: Image) -> dict[str, Any]:
    layers = [
        {"digest": layer.digest, "size_bytes": layer.size, "format": format_of(layer)}
        for layer in image.layers
    ]
    return {
        "digest": image.digest,
        "platform": f"{image.config.os}/{image.config.architecture}",
        "command": list(image.config.command),
        "size_bytes": sum(layer.size for layer in image.layers),
        "layers": layers,
    }


@click.command("serve")
@click.option("--socket", default=_SOCKET, show_default=True, help="Where containerd finds it.")
@click.option("--root", default=_ROOT, show_default=True, help="Folder of what is kept.")
@click.option(
    "-o", "options", multiple=True, help="KEY=VALUE of the mounts: cache, disk, mirror..."
)
@click.option(
    "--lazy-from",
    multiple=True,
    help="REGISTRY or REGISTRY/FOLDER whose images are read lazily; repeatable; default: all.",
)
def serve_command(
    socket: str, root: str, options: tuple[str, ...], lazy_from: tuple[str, ...]
) -> None:
    """Be a snapshotter of containerd: containers start from images that are read lazily; needs root.

    \b
    Options: those of 'omniload image mount', for every image alike. What a start touches is
    recorded, and comes first the next time (trace=auto, record=auto), unless other values
    are given. Mounts stay when this ends, and with them the containers on them. Where not
    all images that run here may share layers, name in --lazy-from the registries that
    may.

    \b
    Example:
      omniload image serve -o cache=/data/omniload,disk=100GiB
    """  # noqa: D301 -- click's own marker
    if os.geteuid() != 0:
        raise ConfigError(f"user {os.geteuid()} cannot mount for containers; run it as root")
    require_text(socket, root)
    try:
        # gRPC is of an extra: most commands on images do without.
        start_server = importlib.import_module("snapshot.engines.containerd.server").start_server
    except ModuleNotFoundError as error:
        raise missing_extra("containerd", error) from error
    template, place = mount_template(options), Path(root).absolute()
    # Better said now than by the first mount, to whoever starts a container.
    try:
        indexes = private_folder(Path(template.cache) / "indexes")
    except NotADirectoryError as error:
        raise ConfigError(f"{template.cache} is no folder; name another cache") from error
    set_up_logging("INFO", role="snapshotter")
    place.mkdir(parents=True, exist_ok=True)
    images = RegistryImages(indexes, template.mirrors, template.platform, lazy_from)
    snapshotter = Snapshotter(place, images, MountedViews(place / "views", template))
    ended = threading.Event()

    def end(number: int, _: FrameType | None) -> None:
        _log.info("ending by signal %d", number)
        ended.set()

    # A signal is only noted: calls under way have their grace below.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        running = start_server(snapshotter, Path(socket).absolute())
        click.echo(f"snapshotter on {socket}")
        snapshotter.restore()  # each is shown when it is asked for, too, so nobody need wait
        ended.wait()
        running.stop(grace=5).wait()
    finally:
        snapshotter.close()


def _named(platform: str | None) -> Platform | None:
    return None if platform is None else platform_of(platform)


def mount_template(options: tuple[str, ...]) -> ImageMount:
    """Return the settings of every mount.

    Raises:
        ConfigError: An option is none, or belongs to one mount.
    """
    for key, _ in options_in(options):
        if key in _REFUSED:
            raise ConfigError(f"option {key!r} belongs to one mount, and there will be several")
    return mount_settings("", "", (f"trace={AUTO}", f"record={AUTO}", *options))
