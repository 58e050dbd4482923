"""The mounts of lazy layers: one process for each chain that a container uses, made when the first one does."""

import os
import subprocess
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from fusefs.bridge.process.launch import start_daemon, umount
from omniload.base.errors import StateError
from omniload.base.linux.mount_table import mounts_here
from omniload.base.log import get_logger
from omniload.base.units import decimal_of
from snapshot.engines.containerd import daemon as snapshotter_daemon
from snapshot.engines.containerd.daemon import ChainMount
from snapshot.engines.containerd.store import KeptImage
from snapshot.image.mount.daemon import ImageMount
from snapshot.oci.reference import address_of

__all__ = ["MountedViews"]

_log = get_logger(__name__)


class MountedViews:
    """Shows the lazy layers of a chain, merged: FUSE mounts under a folder, by number. Safe in threads.

    Args:
        folder: Of the mount points; made where it is not there. All log to a file beside it.
        template: Settings of every mount; image and mount point are not looked at.
    """

    def __init__(self, folder: Path, template: ImageMount) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._log_path = str(folder.with_suffix(".log"))
        bridge = template.bridge.model_copy(update={"allow_other": True, "trusted": True})
        self._template = template.model_copy(update={"bridge": bridge})
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._daemons: dict[int, subprocess.Popen[bytes]] = {}

    def path(self, number: int) -> str:
        """Return where a chain is shown, or will be."""
        return str(self._folder / str(number))

    def show(self, number: int, image: KeptImage, layers: int) -> None:
        """Show a chain, unless it is shown.

        Raises:
            UnavailableError: The registry is needed, and does not answer.
            StateError: It cannot be mounted.
        """
        with self._locks[number]:
            self._reap()
            where = self.path(number)
            if _is_alive(where):
                return
            with suppress(
                FileExistsError
            ):  # of a dead mount pathlib would say that it is not there
                os.mkdir(where, 0o755)  # noqa: PTH102
            changed = {"image": address_of(image.reference), "mountpoint": where}
            mount = self._template.model_copy(update=changed)
            chain = ChainMount(mount=mount, kept=image, layers=layers)
            settings = chain.model_dump_json(by_alias=True).encode()
            self._daemons[number] = start_daemon(
                snapshotter_daemon.__name__, settings, where, log_path=self._log_path
            )
            _log.info("%d layers of %s at %s", layers, image.reference, where)

    def drop(self, number: int) -> None:
        """Show a chain no longer; a process that still uses it goes on until it ends."""
        with self._locks[number]:
            where = self.path(number)
            while _is_mounted(where):
                try:
                    umount(where)
                except StateError:
                    # Held by a container that is on its way out. It keeps what it has; the
                    # daemon ends after the last one.
                    done = subprocess.run(["umount", "-l", where], check=False)  # noqa: S603, S607
                    if done.returncode:
                        raise
            with suppress(FileNotFoundError):
                Path(where).rmdir()
            self._reap()

    def numbers(self) -> set[int]:
        """Return which chains are shown, or have a place for it: also what a killed snapshotter had begun."""
        names = os.listdir(self._folder)  # noqa: PTH208 -- a dead mount has no attributes
        return {number for number in map(decimal_of, names) if number is not None}

    def _reap(self) -> None:
        """Take leave of daemons that have ended."""
        for number, process in list(self._daemons.items()):
            if process.poll() is not None:
                self._daemons.pop(number, None)


def _is_mounted(where: str) -> bool:
    """Return whether anything is mounted there, by the table: a dead mount would not say."""
    target = os.path.realpath(where)
    return any(mount.path == target for mount in mounts_here())


def _is_alive(where: str) -> bool:
    """Return whether a mount is there and its process answers."""
    if not _is_mounted(where):
        return False
    try:
        os.statvfs(where)
    except OSError:
        return False
    return True
