"""``omniload image``: serve (be a snapshotter of containerd) and export (have containerd know an image)."""

import importlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType, ModuleType

import click

from fusefs.bridge.api.options import require_text
from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.base.log import get_logger, set_up_logging
from snapshot.engines.containerd.images import RegistryImages, keep_image
from snapshot.engines.containerd.snapshotter import Snapshotter
from snapshot.engines.containerd.views import MountedViews
from snapshot.image.mount.daemon import AUTO, ImageMount
from snapshot.image.mount.options import mount_settings, platform_of
from snapshot.oci.image import open_store
from snapshot.private_folder import private_folder

__all__ = ["export_command", "mount_template", "serve_command"]

_log = get_logger(__name__)
_SOCKET = "/run/omniload/snapshotter.sock"
_ROOT = "/var/lib/omniload/snapshotter"
_CONTAINERD = "/run/containerd/containerd.sock"
_REFUSED = ("serve", "image", "mountpoint", "command")


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
    start_server = _part("server").start_server
    template, place = mount_template(options), Path(root).absolute()
    # Better said now than by the first mount, to whoever starts a container.
    try:
        indexes = private_folder(Path(template.cache) / "indexes")
    except NotADirectoryError as error:
        raise ConfigError(f"{template.cache} is no folder; name another cache") from error
    set_up_logging("INFO", role="snapshotter")
    place.mkdir(parents=True, exist_ok=True)
    images = RegistryImages(
        indexes,
        template.mirrors,
        template.platform,
        lazy_from,
    )
    snapshotter = Snapshotter(place, images, MountedViews(place / "views", template))
    ended = threading.Event()

    def end(number: int, _: FrameType | None) -> None:
        _log.info("ending by signal %d", number)
        ended.set()

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


@click.command("export")
@click.argument("image")
@click.option("--containerd", default=_CONTAINERD, show_default=True, help="Socket of containerd.")
@click.option("--namespace", default="default", show_default=True, help="k8s.io for Kubernetes.")
@click.option("--snapshotter", default="omniload", show_default=True, help="Its name there.")
@click.option("--platform", help="OS/ARCHITECTURE[/VARIANT]; default: this machine's.")
@click.option("--mirror", "mirrors", multiple=True, help="Registry that may hold it; repeatable.")
def export_command(
    image: str,
    containerd: str,
    namespace: str,
    snapshotter: str,
    platform: str | None,
    mirrors: tuple[str, ...],
) -> None:
    """Have containerd know IMAGE, so that 'ctr run' and nerdctl start it; no layer is downloaded.

    \b
    Needs 'omniload image serve' in containerd's configuration. Kubernetes pulls by itself.

    \b
    Example:
      omniload image export registry.example:5000/team/torch:2.13
      ctr run --rm --snapshotter omniload registry.example:5000/team/torch:2.13 start python
    """  # noqa: D301 -- click's own marker
    require_text(image, containerd, namespace, snapshotter)
    connect = _part("client").Containerd
    store, label = open_store(image, mirrors=mirrors)
    try:
        kept = keep_image(store, image, label, platform_of(platform))
    finally:
        store.close()
    connection = connect(Path(containerd).absolute(), namespace)
    try:
        layers = connection.register(kept, image.removeprefix("http://"), snapshotter)
    finally:
        connection.close()
    click.echo(f"{kept.digest}  {layers} layers, read as they are needed")


def _part(name: str) -> ModuleType:
    """Import what needs gRPC: most commands on images do not.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(f"snapshot.engines.containerd.{name}")
    except ModuleNotFoundError as error:
        raise missing_extra("containerd", error) from error


def mount_template(options: tuple[str, ...]) -> ImageMount:
    """Return the settings of every mount.

    Raises:
        ConfigError: An option is none, or belongs to one mount.
    """
    for option in filter(None, ",".join(options).split(",")):
        key = option.strip().partition("=")[0]
        if key in _REFUSED:
            raise ConfigError(f"option {key!r} belongs to one mount, and there will be several")
    return mount_settings("", "", (f"trace={AUTO}", f"record={AUTO}", *options))
