"""The process behind a layer store: ``python -m`` this module with READY_FD, settings on standard input."""

import json
import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from fusefs.bridge import server
from fusefs.bridge.api.options import BridgeOptions, require_text
from fusefs.bridge.process.launch import run_daemon, start_daemon
from omniload.base.clock import SystemClock
from omniload.base.config import StrictModel, parse_yaml
from omniload.base.errors import ConfigError
from omniload.base.units import Bytes, Seconds
from snapshot.engines.podman.images import (
    ImageOpener,
    RoutedTier,
    ServedImage,
    ServedImages,
)
from snapshot.engines.podman.layer_store import LayerStore, LayerStoreFileSystem
from snapshot.engines.podman.starts import ImageStarts
from snapshot.engines.podman.uses import LayerUses
from snapshot.image.block.fetcher import FetchSettings
from snapshot.image.block.loader import BlockLoader
from snapshot.image.block.store import BlockStore
from snapshot.image.mount.daemon import READ_AHEAD_BYTES
from snapshot.image.mount.options import cache_folder, option_value, options_in, platform_of
from snapshot.image.trace.store import TraceStore
from snapshot.image.tree.single_layer import layer_tree
from snapshot.image.view.view import ImageView
from snapshot.oci.image import platform_here
from snapshot.oci.manifest import Platform
from snapshot.oci.reference import Reference

__all__ = ["LayerStoreMount", "layer_store_settings", "main", "mount", "serve"]

_REPEATED = {"mirror": "mirrors", "registry": "registries", "plain": "plain"}
_NO_OPTIONS = frozenset({"mountpoint", "mirrors", "registries", "bridge"})
"""Fields that are set in another way."""


class LayerStoreMount(StrictModel):
    """What a layer store needs to know."""

    mountpoint: str
    cache: str
    """Folder of indexes, blocks and traces, shared by all mounts of a node."""
    registries: tuple[str, ...] = ()
    """Whose images are shown; those of all where none is given."""
    plain: tuple[str, ...] = ()
    """Registries that are spoken to without TLS, besides those of this machine."""
    mirrors: tuple[str, ...] = ()
    platform: Platform | None = None
    index: bool = False
    """Show layers without a table of contents, too; each is read whole, once, to index it."""
    memory: Bytes = 256 << 20
    """Blocks kept in memory."""
    disk: Bytes = 20 << 30
    """Blocks kept on disk."""
    window: Seconds = 120.0
    """How long after its first read a start is recorded; 0 records nothing."""
    slots: int = Field(default=16, ge=2, le=256)
    """Requests on their way."""
    bridge: BridgeOptions = BridgeOptions(
        allow_other=True, trusted=True, kernel_read_ahead=READ_AHEAD_BYTES
    )

    @field_validator("registries", "plain", "mirrors")
    @classmethod
    def _name_hosts(cls, hosts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # What is none would match no image, ever, without a word.
        for host in hosts:
            bare = host.removeprefix("http://") if info.field_name == "mirrors" else host
            Reference(registry=bare, repository="any", tag="any")
        return hosts


def layer_store_settings(mountpoint: str, options: tuple[str, ...]) -> LayerStoreMount:
    """Return the settings of a layer store from ``KEY=VALUE`` options.

    Raises:
        ConfigError: An option is none, or its value.
    """
    require_text(mountpoint, *options)
    fields: dict[str, Any] = {"mountpoint": mountpoint, "cache": str(cache_folder())}
    for key, value in options_in(options):
        if key in _REPEATED:
            fields.setdefault(_REPEATED[key], []).append(option_value(key, value))
        elif key == "platform":
            fields[key] = json.loads(
                (platform_of(value or "") or platform_here()).model_dump_json()
            )
        else:
            fields[key] = option_value(key, value, LayerStoreMount, _NO_OPTIONS)
    fields["cache"] = str(Path(fields["cache"]).absolute())
    return parse_yaml(json.dumps(fields), LayerStoreMount, name="-o")


def mount(settings: LayerStoreMount, *, log_path: str | None = None) -> "subprocess.Popen[bytes]":
    """Mount a layer store in a process of its own; return when it is usable.

    Raises:
        ConfigError: The mount point is not there, or this is not root.
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
    with ExitStack() as opened:
        parts = _Parts(settings)
        opened.callback(parts.close)
        options, name = settings.bridge, "omniload-layers"
        server.serve(parts.shown, settings.mountpoint, options, name=name, ready=ready)


class _Parts:
    """The parts of a layer store, put together and taken apart."""

    def __init__(self, settings: LayerStoreMount) -> None:
        self._settings, self._cache = settings, Path(settings.cache)
        self._clock = SystemClock()
        self._traces = TraceStore(self._cache / "traces")
        self._tier = RoutedTier()
        self._starts: dict[int, ImageStarts] = {}
        self._lock = threading.Lock()
        self._loader = BlockLoader(
            {"registry": self._tier},
            BlockStore(self._cache / "blocks", settings.disk),
            FetchSettings(
                tiers=("registry",),
                slots=settings.slots,
                reserved_slots=max(settings.slots // 4, 1),
            ),
            memory_bytes=settings.memory,
            clock=self._clock,
        )
        uses = LayerUses(self._cache / "layer-uses", settings.mountpoint)
        opener = ImageOpener(
            cache=settings.cache,
            mirrors=settings.mirrors,
            plain=settings.plain,
            platform=settings.platform,
            index_whole=settings.index,
        )
        self._images = ServedImages(opener, uses.image_of, self._opened, self._clock)
        store = LayerStore(
            self._images,
            self._view,
            uses,
            registries=settings.registries,
            scratch=settings.cache,
        )
        self.shown = LayerStoreFileSystem(store)

    def close(self) -> None:
        """Stop fetching; keep what was recorded."""
        self.shown.close()
        self._loader.close()
        for starts in self._starts.values():
            starts.finish()
        self._images.close()

    def _opened(self, served: ServedImage) -> None:
        """Begin to fetch the hot blocks of an image: the engine asks before it starts anything from it."""
        self._tier.add(served)
        if not any(served.indexes):
            return
        starts = ImageStarts(
            served, self._loader, self._traces, self._clock.now_s, self._settings.window
        )
        with self._lock:
            self._starts[id(served)] = starts
        starts.prefetch()

    def _view(self, served: ServedImage, place: int) -> ImageView:
        """Return the files of one layer."""
        index = served.indexes[place]
        assert index is not None, "only layers that can be read in parts are shown"
        layers = [known.entries if known else () for known in served.indexes]
        tree = layer_tree(layers, place)
        recorder = self._starts[id(served)].recorder_of(place, tree)
        return ImageView(tree, [index], self._loader, recorder)


def main() -> None:
    """Be the daemon."""
    run_daemon(
        lambda settings, ready: serve(LayerStoreMount.model_validate_json(settings), ready),
        role="layers",
    )


if __name__ == "__main__":
    main()
