"""A merged image shown by EROFS: as it is where its blobs are whole, else filled while it is read."""

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal

from fusefs.bridge.options import BridgeOptions
from fusefs.bridge.tuning import mount_table
from omniload.base.errors import ConfigError, StateError
from omniload.base.log import get_logger
from snapshot.image.erofs_blobs import BlobLayout, blob_layout
from snapshot.image.erofs_cache import BlobCache
from snapshot.image.erofs_filling import BlobFilling
from snapshot.image.erofs_probe import why_no_erofs, why_no_filling
from snapshot.image.erofs_writer import plan_metadata
from snapshot.image.layer_index import LayerIndex
from snapshot.image.loader import BlockLoader
from snapshot.image.precontent_kernel import mount_erofs, unmount
from snapshot.image.tree import Tree

__all__ = ["ErofsImage", "Through", "chosen"]

_log = get_logger(__name__)

Through = Literal["fuse", "erofs", "auto"]
"""What shows an image: a process of ours, the kernel, or the kernel where it can alone."""

_BACKINGS = Path("/sys/class/bdi")
_LOOK_S, _LOOK_SOON_S = 1.0, 0.02
"""Between two looks whether a mount is gone; and how often for the second after mounts changed."""


class ErofsImage:
    """One image in the cache folder, on its way to a mount point.

    Raises:
        ConfigError: EROFS cannot hold something of it.
        StateError: The cache folder cannot be used for it.
    """

    def __init__(self, tree: Tree, indexes: Sequence[LayerIndex], cache: str | Path) -> None:
        self._cache = BlobCache(cache)
        self._filling: BlobFilling | None = None
        self._layers: list[tuple[LayerIndex, BlobLayout]] = []
        self._missing: list[tuple[LayerIndex, BlobLayout]] = []
        self._kept: list[Path] = []
        if (found := self._cache.whole(indexes)) is not None:
            self._image, self._kept = found
            return
        layouts = [blob_layout(index.entries) for index in indexes]
        plan = plan_metadata(tree, layouts)
        self._image = self._cache.metadata(plan, indexes)
        self._layers = [(indexes[n], layouts[n]) for n in plan.layers]
        self._missing = [layer for layer in self._layers if self._cache.complete(*layer) is None]

    @property
    def is_complete(self) -> bool:
        """Everything is in whole blobs: the kernel needs nobody."""
        return not self._missing

    def fill_from(self, loader: BlockLoader, *, slots: int) -> None:
        """Have what is missing filled as it is read; before the mount.

        Raises:
            StateError: The kernel does not let itself be asked.
        """
        if not self._missing:
            return
        if removed := self._cache.clear():
            _log.info("%d blobs of mounts that died are removed", removed)
        try:
            self._filling = BlobFilling(self._missing, loader, self._cache, slots=slots)
        except OSError as error:
            raise StateError(
                f"reads of the image cannot be waited for: {error}; mount it through FUSE"
            ) from error

    def settled(self, digest: str, came: bool) -> None:
        """Note that a block came, so that it can be filled in behind."""
        if self._filling is not None:
            self._filling.settled(digest, came)

    def at_hand(self, digests: Iterable[str]) -> None:
        """Note blocks that are here already."""
        if self._filling is not None:
            self._filling.at_hand(digests)

    def serve(self, mountpoint: str, options: BridgeOptions, *, ready: Callable[[], None]) -> None:
        """Mount; return when it is unmounted, or when the kernel needs nobody any more.

        For the main thread: a signal to end unmounts it.

        Args:
            mountpoint: An empty directory.
            options: Of these, ``trusted`` and the kernel's read-ahead.
            ready: Called once it is usable.

        Raises:
            StateError: It cannot be mounted.
        """
        target = os.path.realpath(mountpoint)
        try:
            _check_place(target)
            with _read_ahead(options.kernel_read_ahead):
                mount_erofs(str(self._image), self._blobs(), target, trusted=options.trusted)
        except BaseException:
            self._close(is_safe=True)
            raise
        if self._filling is None:
            ready()
            return
        with _ending_by_signal() as told:
            ready()
            is_safe = self._wait(self._filling, told, target)
        self._close(is_safe=is_safe)

    def _blobs(self) -> list[str]:
        filled = iter(self._filling.paths if self._filling is not None else ())
        found = [str(path) for path in self._kept]
        for layer in self._layers:
            if layer in self._missing:
                found.append(next(filled))
            else:
                kept = self._cache.complete(*layer)
                if kept is None:
                    raise StateError(
                        f"the blob of layer {layer[0].blob_digest} was removed; mount again"
                    )
                found.append(str(kept))
        return found

    def _wait(self, filling: BlobFilling, told: int, target: str) -> bool:
        """Wait for the end of the mount, or of the work; tell whether no reader is left without it."""
        with Path("/proc/self/mountinfo").open("rb") as mounts:
            poll = select.poll()
            poll.register(mounts, select.POLLPRI | select.POLLERR)
            poll.register(told, select.POLLIN)
            poll.register(filling.wake, select.POLLIN)
            soon_until_s = 0.0
            while True:
                now_s = time.monotonic()
                pause_s = _LOOK_SOON_S if now_s < soon_until_s else _LOOK_S
                ready = {descriptor for descriptor, _ in poll.poll(pause_s * 1000)}
                if filling.is_complete:
                    return True
                if told in ready:
                    return self._unmount(filling, target)
                if mounts.fileno() in ready:
                    soon_until_s = time.monotonic() + _LOOK_S
                if filling.is_unused:
                    return True

    def _unmount(self, filling: BlobFilling, target: str) -> bool:
        try:
            unmount(target, lazily=False)
        except OSError:
            with suppress(OSError):
                unmount(target, lazily=True)
            _log.warning("%s was in use when it was unmounted; its readers get errors", target)
        return filling.is_unused

    def _close(self, *, is_safe: bool) -> None:
        if self._filling is not None:
            self._filling.close(is_safe=is_safe)


def chosen(
    through: Through,
    tree: Tree,
    indexes: Sequence[LayerIndex],
    cache: str | Path,
    *,
    in_the_way: str | None,
) -> ErofsImage | None:
    """Return the image as EROFS if that is what shows it, and None for FUSE.

    ``auto`` takes EROFS only for what is whole on this node: then no process is behind it, and
    none can die. ``erofs`` also mounts what is not, and fills it while it is read.

    Args:
        through: What was asked for.
        tree: The merged image.
        indexes: Of its layers.
        cache: The folder of this node.
        in_the_way: What else was asked for that only FUSE can do, if anything.

    Raises:
        ConfigError: ``erofs`` was asked for, and cannot be had.
    """
    if through == "fuse":
        return None
    why = in_the_way
    if why is None and through == "auto" and not BlobCache.may_have(cache, indexes):
        why = "some of its layers are not whole here"
    why = why or why_no_erofs(cache)
    found = None
    if why is None:
        try:
            found = ErofsImage(tree, indexes, cache)
        except (ConfigError, StateError, OSError) as error:  # a full disk, too
            why = str(error)
    if found is not None and not found.is_complete:
        why = (
            "some of its layers are not whole here" if through == "auto" else why_no_filling(cache)
        )
    if why is None:
        return found
    if through == "erofs":
        raise ConfigError(f"the image cannot be shown by EROFS: {why}; ask for fuse or auto")
    _log.info("shown through FUSE: %s", why)
    return None


def _check_place(target: str) -> None:
    """Refuse to hide an image under another.

    Raises:
        StateError: There is one at that place.
    """
    name = re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", target)
    for line in filter(None, mount_table().split("\n")):
        if line.split(" ")[4] == name and (" - erofs " in line or " - fuse" in line):
            raise StateError(f"{target!r} is a mount already; unmount it first")


@contextmanager
def _read_ahead(size_bytes: int) -> Iterator[None]:
    """Set the read-ahead of the mount that is made meanwhile; the kernel names it by a count."""
    before = set(_BACKINGS.glob("erofs-*"))
    yield
    made = set(_BACKINGS.glob("erofs-*")) - before
    if len(made) == 1:  # more were made at once: which is ours is not told
        with suppress(OSError):
            (made.pop() / "read_ahead_kb").write_text(str(size_bytes >> 10), encoding="ascii")


@contextmanager
def _ending_by_signal() -> Iterator[int]:
    """Give a descriptor that becomes readable when this process is told to end."""
    told = os.eventfd(0)

    def tell(_: int, __: FrameType | None) -> None:
        os.eventfd_write(told, 1)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, tell) for number in numbers}
    try:
        yield told
    finally:
        for number, action in before.items():
            signal.signal(number, action)
        os.close(told)
