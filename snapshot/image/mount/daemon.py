"""The process behind one mounted image: ``python -m snapshot.image.mount.daemon READY_FD``, settings on stdin."""

import gc
import json
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from fusefs.bridge import server
from fusefs.bridge.api.blocking import Threaded
from fusefs.bridge.api.options import BridgeOptions, require_text
from fusefs.bridge.process.launch import run_daemon, start_daemon
from omniload.base.clock import SystemClock
from omniload.base.config import StrictModel, parse_yaml
from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.base.reading import read_small_file
from omniload.base.settings.quantities import Bytes, Seconds
from snapshot.image.block.fetcher import FetchSettings
from snapshot.image.block.loader import BlockLoader, RegistryTier
from snapshot.image.block.prefetch import Outstanding, want_blocks
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.image.peer.node import PeerNode, PeerSettings
from snapshot.image.trace.store import (
    Recording,
    TraceStore,
    check_record,
    merge_into,
)
from snapshot.image.trace.trace import MAX_TRACE_BYTES, Trace, decode_trace, hot_blocks
from snapshot.image.tree.merge import merge
from snapshot.image.view.view import ImageView
from snapshot.oci.image import Image, open_store, resolve
from snapshot.oci.manifest import Platform
from snapshot.oci.store import ImageStore
from snapshot.private_folder import cache_folder
from snapshot.startup.events import Tally, stage

__all__ = [
    "AUTO",
    "READ_AHEAD_BYTES",
    "ImageMount",
    "NodeMount",
    "chosen_trace",
    "main",
    "mount",
    "mount_settings",
    "note_option",
    "options_in",
    "platform_of",
    "serve",
    "settings_of",
    "traces_of",
]

_log = get_logger(__name__)

AUTO = "auto"
"""Value of trace or record: the file for this image and command in the folder of traces."""
_PLACES = {"cache", "traces", "trace", "record", "peer_token_file"}
# A library that is mapped and used in scattered places mostly does not use a longer read-ahead.
READ_AHEAD_BYTES = 512 << 10


class NodeMount(StrictModel):
    """What a mount of layers needs to know, of one image or of many."""

    repeated: ClassVar[Mapping[str, str]] = {"mirror": "mirrors"}
    """Options that may be given several times, and the fields that hold all of their values."""
    closed: ClassVar[frozenset[str]] = frozenset({"mountpoint"})
    """Fields that no option sets."""

    mountpoint: str
    cache: str
    """Folder of indexes, blocks and traces, shared by all mounts of a node."""
    traces: str | None = None
    """Folder of traces, such as one that all nodes see; in ``cache`` if not given."""
    mirrors: tuple[str, ...] = ()
    platform: Platform | None = None
    memory: Bytes = 256 << 20
    """Blocks kept in memory."""
    disk: Bytes = 20 << 30
    """Blocks kept on disk."""
    window: Seconds = 120.0
    """How long touches of a start are recorded."""
    slots: int = Field(default=16, ge=2, le=256)
    """Requests on their way."""

    @property
    def reserved_slots(self) -> int:
        """Slots that prefetch leaves free."""
        return max(self.slots // 4, 1)


class ImageMount(NodeMount):
    """What a mount of an image needs to know."""

    closed: ClassVar[frozenset[str]] = frozenset({"image", "mountpoint", "command", "sharing"})

    image: str
    """Reference or layout."""
    trace: str | None = None
    """Hot blocks: fetched first, in this order. A file, or ``auto``."""
    record: str | None = None
    """Where the touches of this start go, merged with those of earlier ones. A file, or ``auto``."""
    command: tuple[str, ...] | None = None
    """What is started from it, by which traces are found; any of its starts if not given."""
    sharing: PeerSettings = PeerSettings()
    """Nodes that blocks are shared with."""
    bridge: BridgeOptions = BridgeOptions(read_only=True, kernel_read_ahead=READ_AHEAD_BYTES)


def mount(settings: ImageMount, *, log_path: str | None = None) -> "subprocess.Popen[bytes]":
    """Mount an image in a process of its own; return when the mount is usable.

    Raises:
        ConfigError: The image, or the mount point, does not exist.
        UnavailableError: The registry does not answer.
        StateError: The mount point cannot be mounted on.
    """
    data = settings.model_dump_json(by_alias=True).encode()
    return start_daemon(__name__, data, settings.mountpoint, log_path=log_path)


def serve(settings: ImageMount, ready: Callable[[], None], resolved: Image | None = None) -> None:
    """Show an image until it is unmounted; the recording is written when its window ends.

    The stage ``image`` of a start-up ends when the mount is usable and the hot blocks are here.
    A ``resolved`` image is not asked for again.
    """
    with ExitStack() as opened, ExitStack() as begun:
        tally = begun.enter_context(stage("image"))
        store, name = open_store(settings.image, mirrors=settings.mirrors)
        opened.callback(store.close)
        image = resolved or resolve(store, name, settings.platform)
        tally.note("image", image.digest)
        # objects made until the mount is usable stay, and collecting garbage among them takes a third of the time
        gc.disable()
        try:
            parts = _Serving(settings, store, image)
        finally:
            gc.freeze()
            gc.enable()
        parts.run(ready, tally, begun)


class _Serving:
    """The parts of one mounted image, with their start and their end."""

    def __init__(self, settings: ImageMount, store: ImageStore, image: Image) -> None:
        self._settings, self._image = settings, image
        cache = Path(settings.cache)
        if settings.record not in {None, AUTO}:
            check_record(Path(str(settings.record)))
        # Before layers are read to index them, so that an unusable trace is reported at once.
        self._trace = chosen_trace(settings, image)
        self._indexes = index_image(store, image, IndexCache(cache / "indexes"))
        self._tree = merge([index.entries for index in self._indexes])
        self._hot = Outstanding()
        # Compressed bytes, in which fetches are counted, too, because both are shares of one sum.
        self._here_bytes = 0
        disk = BlockStore(cache / "blocks", settings.disk)
        registry = RegistryTier(store)
        self._peers = PeerNode(settings.sharing, registry, disk, self._indexes)
        self._loader = BlockLoader(
            self._peers.tiers,
            disk,
            FetchSettings(
                tiers=tuple(self._peers.tiers),
                slots=settings.slots,
                reserved_slots=settings.reserved_slots,
            ),
            memory_bytes=settings.memory,
            on_settled=self._hot.settled,
        )
        self._recording = self._begun()
        note = None if self._recording is None else self._recording.note
        self._shown = Threaded(ImageView(self._tree, self._indexes, self._loader, note))

    def run(self, ready: Callable[[], None], tally: Tally, begun: ExitStack) -> None:
        """Prefetch, mount, answer until unmounted, and clean up."""
        watcher = threading.Thread(target=self._end_stage, args=(tally, begun), name="omniload-hot")
        settings = self._settings
        try:
            self._prefetch()
            if self._recording is not None:
                self._recording.start()

            def usable() -> None:
                ready()
                watcher.start()

            name = "omniload-image"
            server.serve(self._shown, settings.mountpoint, settings.bridge, name=name, ready=usable)
        finally:
            self._hot.close()
            # If mounting failed, the watcher was never started.
            if watcher.ident is not None:
                watcher.join()
            self._close()

    def _prefetch(self) -> None:
        if self._trace is not None:
            refs = hot_blocks(self._trace, self._tree, self._indexes)
            self._hot.expect(ref.digest for ref in refs)
            absent = want_blocks(self._loader, self._indexes, refs)
            self._hot.keep_only(ref.digest for ref in absent)
            self._here_bytes = sum(ref.size_bytes for ref in {*refs} - {*absent})

    def _end_stage(self, tally: Tally, begun: ExitStack) -> None:
        self._hot.wait()
        for tier, size in (self._loader.bytes_of | {"disk": self._here_bytes}).items():
            tally.add(tier, size)
        begun.close()

    def _begun(self) -> Recording | None:
        settings = self._settings
        if settings.record is None:
            return None
        keep: Callable[[Trace], object] = traces_of(settings).add
        if settings.record != AUTO:
            keep = partial(merge_into, Path(settings.record))
        command, now_s = settings.command or self._image.config.command, SystemClock().now_s
        return Recording(self._tree, self._image.digest, command, keep, now_s, settings.window)

    def _close(self) -> None:
        # From the kernel inwards, so that no request reaches a closed part.
        self._shown.close()
        self._peers.close()
        self._loader.close()
        if numbers := self._peers.numbers():
            _log.info("bytes of peers: %s", numbers)
        if self._recording is not None:
            self._recording.finish()


def chosen_trace(settings: ImageMount, image: Image) -> Trace | None:
    """Return the trace that a mount starts from, if there is one.

    Raises:
        ConfigError: The settings name a file that does not exist.
        IntegrityError: The settings name a file that is no trace.
    """
    if settings.trace is None:
        return None
    if settings.trace == AUTO:
        if settings.command is None:
            return traces_of(settings).any_of(image.digest, image.config.command)
        return traces_of(settings).get(image.digest, settings.command)
    held = read_small_file(Path(settings.trace), most_bytes=MAX_TRACE_BYTES, what="a trace")
    trace = decode_trace(held, name=settings.trace)
    # The trace is only a hint.
    if trace.image != image.digest:
        _log.warning(
            "trace %s is of image %s, this is %s; its files may differ",
            *(settings.trace, trace.image, image.digest),
        )
    return trace


def traces_of(settings: NodeMount) -> TraceStore:
    """Return the store of the traces of this node's starts."""
    return TraceStore(settings.traces or Path(settings.cache) / "traces")


def main() -> None:
    """Run as the daemon."""
    run_daemon(
        lambda settings, ready: serve(ImageMount.model_validate_json(settings), ready), role="image"
    )


Settings = TypeVar("Settings", bound=StrictModel)


def mount_settings(image: str, mountpoint: str, options: tuple[str, ...]) -> ImageMount:
    """Return the settings of a mount from ``KEY=VALUE`` options, including options of the kernel's side.

    Raises:
        ConfigError: An option is unknown, or its value is wrong.
    """
    require_text(image, mountpoint, *options)
    fields: dict[str, Any] = {"image": image, "mountpoint": mountpoint}
    bridge: dict[str, Any] = {"read_only": True, "kernel_read_ahead": READ_AHEAD_BYTES}
    sharing: dict[str, Any] = {}
    for key, value in options_in(options):
        if key in BridgeOptions.model_fields:
            bridge[key] = _option_value(key, value, BridgeOptions)
        elif key == "peers" or (sharing.get("peers") and value is None and ":" in key):
            # a list, which may also be separated by commas
            sharing.setdefault("peers", []).append(value or key)
        elif key in PeerSettings.model_fields:
            sharing[key] = _option_value(key, value, PeerSettings)
        else:
            note_option(ImageMount, fields, key, value)
    return settings_of(ImageMount, fields | {"sharing": sharing, "bridge": bridge})


def settings_of(model: type[Settings], fields: Mapping[str, Any]) -> Settings:
    """Return checked settings; if no cache is named, it is in the user's cache.

    Raises:
        ConfigError: A value does not fit its field.
    """
    if "cache" not in fields:
        cache = cache_folder("image", remedy="name one with -o cache=FOLDER")
        fields = {**fields, "cache": str(cache.absolute())}
    return parse_yaml(json.dumps(fields), model, name="-o")  # JSON is YAML: faults name the key


def options_in(texts: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield keys and values of ``KEY=VALUE,KEY,...``; the value of a key alone is None."""
    for option in filter(None, ",".join(texts).split(",")):
        key, given, value = option.strip().partition("=")
        yield key, value if given else None


def note_option(
    model: type[NodeMount], fields: dict[str, Any], key: str, value: str | None
) -> None:
    """Add an option to the fields of a mount.

    Raises:
        ConfigError: There is no such option, or its value is missing.
    """
    if key in model.repeated:
        fields.setdefault(model.repeated[key], []).append(_option_value(key, value))
    elif key == "platform":
        fields[key] = platform_of(value or "").model_dump(exclude_none=True)
    elif key not in model.model_fields or key in {*model.closed, *model.repeated.values()}:
        raise ConfigError(f"-o {key}: there is no such option; the command's --help lists them")
    else:
        fields[key] = _option_value(key, value, model)


def _option_value(
    key: str, value: str | None, model: type[StrictModel] | None = None
) -> str | bool:
    """Return the value of an option; only the value of a yes-or-no field may be left out."""
    if value is None and model is not None and model.model_fields[key].annotation is bool:
        return True
    if not value:
        raise ConfigError(f"-o {key} has no value; write {key}=VALUE")
    if key in _PLACES and not (value == AUTO and key in {"trace", "record"}):
        return str(Path(value).absolute())  # the daemon has another working directory
    return value


def platform_of(text: str) -> Platform:
    """Return the platform that a text names.

    Raises:
        ConfigError: It names none.
    """
    parts = text.split("/")
    if len(parts) not in {2, 3} or not all(parts):
        raise ConfigError(f"platform {text!r} is not OS/ARCHITECTURE or OS/ARCHITECTURE/VARIANT")
    return Platform(
        os=parts[0], architecture=parts[1], variant=parts[2] if len(parts) == 3 else None
    )


if __name__ == "__main__":
    main()
