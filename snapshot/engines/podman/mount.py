"""The process behind a layer store: ``python -m`` this module with READY_FD, settings on standard input.

It fetches the hot blocks of an image first, and traces the reads of its first start.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from fusefs.bridge import server
from fusefs.bridge.api.options import require_text
from fusefs.bridge.process.launch import run_daemon, start_daemon
from omniload.base.clock import SystemClock
from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from snapshot.engines.podman.images import (
    ImageOpener,
    LayerStoreMount,
    RoutedTier,
    ServedImage,
    ServedImages,
)
from snapshot.engines.podman.layer_store import LayerStore, LayerStoreFileSystem
from snapshot.engines.podman.uses import LayerUses
from snapshot.image.block.fetcher import FetchSettings
from snapshot.image.block.loader import BlockLoader
from snapshot.image.block.prefetch import want_blocks
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import LayerIndex
from snapshot.image.mount.daemon import note_option, options_in, settings_of, traces_of
from snapshot.image.trace.store import Recording, TraceStore
from snapshot.image.trace.trace import hot_blocks
from snapshot.image.tree.merge import layer_tree, merge
from snapshot.image.tree.tree import ROOT, Tree
from snapshot.image.view.view import ImageView

__all__ = ["ImageStarts", "layer_store_settings", "main", "mount", "serve"]


def layer_store_settings(mountpoint: str, options: tuple[str, ...]) -> LayerStoreMount:
    """Return the settings of a layer store from ``KEY=VALUE`` options.

    Raises:
        ConfigError: An option is unknown, or its value is wrong.
    """
    require_text(mountpoint, *options)
    fields: dict[str, Any] = {"mountpoint": mountpoint}
    for key, value in options_in(options):
        note_option(LayerStoreMount, fields, key, value)
    return settings_of(LayerStoreMount, fields)


def mount(settings: LayerStoreMount, *, log_path: str | None = None) -> "subprocess.Popen[bytes]":
    """Mount a layer store in a process of its own; return when it is usable.

    Raises:
        ConfigError: The mount point does not exist, or this process is not root.
        StateError: The mount point cannot be mounted on.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            f"user {os.geteuid()} cannot serve layers with their owners and devices; run it as root"
        )
    data = settings.model_dump_json(by_alias=True).encode()
    return start_daemon(__name__, data, settings.mountpoint, log_path=log_path)


def serve(settings: LayerStoreMount, ready: Callable[[], None]) -> None:
    """Show the layers of every image that is asked for, until unmounted."""
    with closing(_Parts(settings)) as parts:
        options, name = settings.bridge, "omniload-layers"
        server.serve(parts.shown, settings.mountpoint, options, name=name, ready=ready)


class _Parts:
    """The parts of a layer store, with their start and their end."""

    def __init__(self, settings: LayerStoreMount) -> None:
        self._settings, self._cache = settings, Path(settings.cache)
        self._clock = SystemClock()
        self._traces = traces_of(settings)
        self._tier = RoutedTier()
        self._starts: dict[int, ImageStarts] = {}
        self._lock = threading.Lock()
        self._loader = BlockLoader(
            {"registry": self._tier},
            BlockStore(self._cache / "blocks", settings.disk),
            FetchSettings(
                tiers=("registry",), slots=settings.slots, reserved_slots=settings.reserved_slots
            ),
            memory_bytes=settings.memory,
        )
        uses = LayerUses(self._cache / "layer-uses", settings.mountpoint)
        self._images = ServedImages(ImageOpener(settings), uses.image_of, self._opened, self._clock)
        store = LayerStore(
            self._images, self._view, uses, registries=settings.registries, scratch=settings.cache
        )
        self.shown = LayerStoreFileSystem(store)

    def close(self) -> None:
        """Stop fetching; keep the recording."""
        # From the kernel inwards, so that no request reaches a closed part.
        self.shown.close()
        self._loader.close()
        for starts in self._starts.values():
            starts.finish()
        self._images.close()

    def _opened(self, served: ServedImage) -> None:
        """Begin to fetch the hot blocks of an image."""
        # Now, because the engine looks up an image before it starts anything from it.
        self._tier.add(served)
        if not any(served.indexes):
            return
        starts = ImageStarts(
            served, self._loader, self._traces, self._clock.now_s, self._settings.window
        )
        with self._lock:
            # Keyed by identity, because one reference may mean two images, one after the other.
            self._starts[id(served)] = starts
        starts.prefetch()

    def _view(self, served: ServedImage, place: int) -> ImageView:
        """Return the files of one layer."""
        index = served.indexes[place]
        assert index is not None, "only layers that can be read in parts are shown"
        layers = [known.entries if known else () for known in served.indexes]
        tree = layer_tree(layers, place)
        note = self._starts[id(served)].noting(place, tree)
        return ImageView(tree, [index], self._loader, note)


def main() -> None:
    """Run as the daemon."""
    run_daemon(
        lambda settings, ready: serve(LayerStoreMount.model_validate_json(settings), ready),
        role="layers",
    )


_log = get_logger(__name__)


class ImageStarts:
    """The reads of starts of one image, mapped from its layers to the files of the merged image.

    A start is recorded for ``window_s``; 0 records nothing.
    """

    def __init__(
        self,
        served: ServedImage,
        loader: BlockLoader,
        traces: TraceStore,
        now_s: Callable[[], float],
        window_s: float,
    ) -> None:
        self._served, self._loader, self._traces = served, loader, traces
        self._now_s, self._window_s = now_s, window_s
        self._indexes = [index for index in served.indexes if index is not None]
        self._tree = merge([index.entries if index else () for index in served.indexes])
        self._recording: Recording | None = None
        self._lock = threading.Lock()

    def prefetch(self) -> int:
        """Request the hot blocks, if a trace is known; return the number of blocks that are not here."""
        image = self._served.image
        trace = self._traces.any_of(image.digest, image.config.command)
        if trace is None:
            return 0
        # A layer that is left to the engine has no files here, so its index is never used.
        filled: list[LayerIndex] = [i or self._indexes[0] for i in self._served.indexes]
        refs = hot_blocks(trace, self._tree, filled)
        absent = want_blocks(self._loader, self._indexes, refs)
        _log.info(
            "%s: %d of %d hot blocks are on their way",
            self._served.reference,
            len(absent),
            len(refs),
        )
        return len(absent)

    def noting(self, place: int, tree: Tree) -> Callable[[int, int, int], None]:
        """Return a function that notes reads of a layer's own ``tree`` under the numbers of the merged image."""
        merged = _numbers(tree, self._tree, place) if self._window_s else {}

        def note(number: int, offset: int, size_bytes: int) -> None:
            if number in merged:
                self.note(merged[number], offset, size_bytes)

        return note

    def note(self, number: int, offset: int, size_bytes: int) -> None:
        """Remember a read of a file of the merged image."""
        # The first read opens the only window: the kernel keeps files, so later starts would show no reads.
        recording = self._recording
        if recording is None:
            with self._lock:
                recording = self._recording = self._recording or self._begun()
        recording.note(number, offset, size_bytes)

    def finish(self) -> None:
        """Keep the recording, if the end of its window has not done so."""
        if self._recording is not None:
            self._recording.finish()

    def _begun(self) -> Recording:
        # The engine does not say which command it starts, so all starts count as of the image's own command.
        image, keep = self._served.image, self._traces.add
        command, window_s = image.config.command, self._window_s
        recording = Recording(self._tree, image.digest, command, keep, self._now_s, window_s)
        recording.start()
        return recording


def _numbers(layer: Tree, merged: Tree, place: int) -> dict[int, int]:
    """Return, by number in a layer, the numbers of files that the merged image has from it."""
    found: dict[int, int] = {}
    waiting = [(ROOT, ROOT)]
    while waiting:
        here, there = (tree.node(n) for tree, n in zip((layer, merged), waiting.pop(), strict=True))
        for name, number in here.children.items():
            other = there.children.get(name)
            if other is None:  # an upper layer has removed it, so no start can read it
                continue
            node = merged.node(other)
            if node.entry.kind == "directory":
                waiting.append((number, other))
            elif node.layer == place:
                found[number] = other
    return found


if __name__ == "__main__":
    main()
