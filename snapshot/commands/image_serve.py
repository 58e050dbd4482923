"""``omniload image serve``: the snapshotter of containerd."""

import importlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType

import click

from fusefs.bridge.api.options import require_text
from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.base.log import get_logger, set_up_logging
from snapshot.engines.containerd.images import RegistryImages
from snapshot.engines.containerd.snapshotter import Snapshotter
from snapshot.engines.containerd.views import MountedViews
from snapshot.image.mount.daemon import AUTO, ImageMount, mount_settings, options_in
from snapshot.private_folder import private_folder

__all__ = ["mount_template", "serve_command"]

_log = get_logger(__name__)
_SOCKET = "/run/omniload/snapshotter.sock"
_ROOT = "/var/lib/omniload/snapshotter"
_REFUSED = ("serve", "image", "mountpoint", "command")


@click.command("serve")
@click.option(
    "--socket", default=_SOCKET, show_default=True, help="Socket on which containerd finds it."
)
@click.option("--root", default=_ROOT, show_default=True, help="Folder for its data.")
@click.option(
    "-o", "options", multiple=True, help="Option of the mounts as KEY=VALUE: cache, disk, mirror..."
)
@click.option(
    "--lazy-from",
    multiple=True,
    help="REGISTRY or REGISTRY/FOLDER whose images may be read lazily; repeatable; default: all.",
)
def serve_command(
    socket: str, root: str, options: tuple[str, ...], lazy_from: tuple[str, ...]
) -> None:
    """Serve containerd as a snapshotter: containers start from lazily read images; needs root.

    Options are those of 'omniload image mount'; they are the same for all images. The touches of a start are recorded
    and their blocks come first the next time (trace=auto, record=auto), unless other values are given. Mounts, and the
    containers on them, stay when this command ends. If not all images that run here may share layers, use --lazy-from
    to name the registries that may.

    \b
    Example:
      omniload image serve -o cache=/data/omniload,disk=100GiB
    """  # noqa: D301 -- click's own marker
    if os.geteuid() != 0:
        raise ConfigError(f"user {os.geteuid()} cannot mount for containers; run it as root")
    require_text(socket, root)
    try:
        # gRPC belongs to an extra, because most commands on images do not need it.
        start_server = importlib.import_module("snapshot.engines.containerd.server").start_server
    except ModuleNotFoundError as error:
        raise missing_extra("containerd", error) from error
    template, place = mount_template(options), Path(root).absolute()
    # Report it now, rather than at the first mount, to a user who starts a container.
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

    # A signal is only noted, so that calls under way have the grace period below.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        running = start_server(snapshotter, Path(socket).absolute())
        click.echo(f"snapshotter on {socket}")
        snapshotter.restore()  # a snapshot is also shown when it is asked for, so nobody need wait
        ended.wait()
        running.stop(grace=5).wait()
    finally:
        snapshotter.close()


def mount_template(options: tuple[str, ...]) -> ImageMount:
    """Return the settings of every mount.

    Raises:
        ConfigError: An option is unknown, or belongs to one mount.
    """
    # The same value for all mounts would put them at one place, or on one port.
    for key, _ in options_in(options):
        if key in _REFUSED:
            raise ConfigError(f"option {key!r} belongs to one mount, and there will be several")
    return mount_settings("", "", (f"trace={AUTO}", f"record={AUTO}", *options))
