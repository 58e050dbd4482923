"""The mounts of lazy layers: one process for each chain that containers use, started for the first container.

The process is ``python -m`` this module with READY_FD, settings on standard input.
"""

import os
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ConfigDict

from fusefs.bridge.process.launch import run_daemon, start_daemon, umount
from omniload.base.config import StrictModel
from omniload.base.errors import StateError
from omniload.base.linux.mount_table import mount_point, mounts_here
from omniload.base.log import get_logger
from omniload.base.units import decimal_of
from snapshot.image.mount import daemon as mounting
from snapshot.image.mount.daemon import ImageMount
from snapshot.oci.image import Image, KeptImage
from snapshot.oci.reference import address_of

__all__ = ["ChainMount", "MountedViews", "lowest_layers", "main", "serve"]


class ChainMount(StrictModel):
    """What a mount of the lowest layers of an image needs to know; its registry is asked for blocks only."""

    # An image's digest covers its bytes, which JSON cannot hold.
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    mount: ImageMount
    kept: KeptImage
    layers: int
    """How many of them, from the lowest."""


def lowest_layers(image: Image, layers: int) -> Image:
    """Return an image of the lowest layers of another."""
    # Keep the digest, because traces are found by it, whichever of its layers are read lazily.
    rootfs = image.config.rootfs
    rootfs = rootfs.model_copy(update={"diff_ids": rootfs.diff_ids[:layers]})
    return Image(
        digest=image.digest,
        manifest=image.manifest.model_copy(update={"layers": image.layers[:layers]}),
        config=image.config.model_copy(update={"rootfs": rootfs}),
    )


def serve(settings: ChainMount, ready: Callable[[], None]) -> None:
    """Show the layers, merged, until they are unmounted.

    Raises:
        IntegrityError: The documents do not match their digests.
    """
    shown = lowest_layers(settings.kept.image(), settings.layers)
    mounting.serve(settings.mount, ready, shown)


def main() -> None:
    """Run as the daemon."""
    run_daemon(
        lambda settings, ready: serve(ChainMount.model_validate_json(settings), ready), role="chain"
    )


_log = get_logger(__name__)


class MountedViews:
    """Shows the lazy layers of a chain, merged: FUSE mounts under a folder, by number. Safe in threads.

    All mounts log to one file next to ``folder``; image and mount point of ``template`` are ignored.
    """

    def __init__(self, folder: Path, template: ImageMount) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._log_path = str(folder.with_suffix(".log"))
        bridge = template.bridge.model_copy(update={"allow_other": True, "trusted": True})
        self._template = template.model_copy(update={"bridge": bridge})
        # One lock for each chain: a mount may wait for a registry, but must not delay other chains.
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._daemons: dict[int, subprocess.Popen[bytes]] = {}

    def path(self, number: int) -> str:
        """Return the path at which a chain is or will be shown."""
        return str(self._folder / str(number))

    def show(self, number: int, image: KeptImage, layers: int) -> None:
        """Show a chain, unless it is already shown.

        Raises:
            UnavailableError: The registry is needed, and does not answer.
            StateError: It cannot be mounted.
        """
        with self._locks[number]:
            self._reap()
            where = self.path(number)
            if _is_alive(where):
                return
            # pathlib would report a dead mount as missing.
            with suppress(FileExistsError):
                os.mkdir(where, 0o755)  # noqa: PTH102
            changed = {"image": address_of(image.reference), "mountpoint": where}
            mount = self._template.model_copy(update=changed)
            chain = ChainMount(mount=mount, kept=image, layers=layers)
            settings = chain.model_dump_json(by_alias=True).encode()
            # The daemon outlives this process, so that a kill or an update of the snapshotter disturbs no container.
            # Keep it, because while this process lives, the daemon is its child and must be reaped.
            self._daemons[number] = start_daemon(__name__, settings, where, log_path=self._log_path)
            _log.info("%d layers of %s at %s", layers, image.reference, where)

    def drop(self, number: int) -> None:
        """Stop showing a chain; a process that still uses it keeps it until that process ends."""
        with self._locks[number]:
            where = self.path(number)
            while _is_mounted(where):  # a live mount may cover a dead one
                try:
                    umount(where)
                except StateError:
                    # A container that is about to end still uses it. The container keeps its files, and the daemon ends
                    # after the last one.
                    done = subprocess.run(["umount", "-l", where], check=False)  # noqa: S603, S607
                    if done.returncode:
                        raise
            with suppress(FileNotFoundError):
                Path(where).rmdir()
            self._reap()

    def numbers(self) -> set[int]:
        """Return the chains that are shown, or have a folder for it, including those of a killed snapshotter."""
        names = os.listdir(self._folder)  # noqa: PTH208 -- a dead mount has no attributes
        return {number for number in map(decimal_of, names) if number is not None}

    def _reap(self) -> None:
        """Reap daemons that have ended."""
        for number, process in list(self._daemons.items()):
            if process.poll() is not None:
                self._daemons.pop(number, None)


def _is_mounted(where: str) -> bool:
    """Return whether anything is mounted there."""
    # Read the table of mounts, because ``os.path.ismount`` does not see a dead mount.
    target = mount_point(where)
    return any(mount.path == target for mount in mounts_here())


def _is_alive(where: str) -> bool:
    """Return whether a mount is there and its process answers."""
    if not _is_mounted(where):
        return False
    try:
        # For a mount whose process died, the kernel answers ENOTCONN.
        os.statvfs(where)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
