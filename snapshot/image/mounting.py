"""The process behind one mounted image: ``python -m snapshot.image.mounting READY_FD``, settings on standard input."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from fusefs.bridge import serving
from fusefs.bridge.daemons import run_daemon, start_daemon
from fusefs.bridge.options import BridgeOptions
from omniload.base.clock import SystemClock
from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.log import get_logger
from omniload.base.units import Bytes, Seconds
from snapshot.image.block_store import BlockStore
from snapshot.image.fetcher import BlockRef, FetchSettings, Priority
from snapshot.image.index_file import IndexCache
from snapshot.image.layer_index import LayerIndex
from snapshot.image.layers import index_image
from snapshot.image.loader import BlockLoader, RegistryTier
from snapshot.image.trace import (
    Trace,
    block_refs,
    decode_trace,
    encode_trace,
    hot_blocks,
    merge_traces,
    trace_of,
)
from snapshot.image.tree import merge
from snapshot.image.view import ImageFileSystem, ImageView, Recorder
from snapshot.oci.manifest import Platform
from snapshot.oci.opening import open_store, resolve

__all__ = ["ImageMount", "main", "mount", "serve"]

_log = get_logger(__name__)


class ImageMount(StrictModel):
    """What a mount of an image needs to know."""

    image: str
    """Reference or layout."""
    mountpoint: str
    cache: str
    """Folder of indexes and blocks, shared by all mounts of a node."""
    mirrors: tuple[str, ...] = ()
    platform: Platform | None = None
    memory: Bytes = 256 << 20
    """Blocks kept in memory."""
    disk: Bytes = 20 << 30
    """Blocks kept on disk."""
    trace: str | None = None
    """Hot blocks: fetched first, in this order."""
    record: str | None = None
    """Where the touches of this start go, merged with those of earlier ones."""
    window: Seconds = 120.0
    """How long touches are recorded."""
    stream: bool = False
    """Fetch all that is left, too, behind everything else."""
    bandwidth: Bytes = 32_000_000
    """Cap of those cold blocks, in bytes per second; 0 for none."""
    slots: int = Field(default=16, ge=2, le=256)
    """Requests on their way."""
    bridge: BridgeOptions = BridgeOptions(read_only=True)


def mount(settings: ImageMount, *, log_path: str | None = None) -> "subprocess.Popen[bytes]":
    """Mount an image in a process of its own; return when it is usable.

    Raises:
        ConfigError: The image, or the mount point, is not there.
        UnavailableError: The registry does not answer.
        StateError: The mount point cannot be mounted on.
    """
    data = settings.model_dump_json(by_alias=True).encode()
    return start_daemon(__name__, data, settings.mountpoint, log_path=log_path)


def serve(settings: ImageMount, ready: Callable[[], None]) -> None:
    """Show an image until it is unmounted; then write what was recorded."""
    store, name = open_store(settings.image, mirrors=settings.mirrors)
    cache = Path(settings.cache)
    image = resolve(store, name, settings.platform)
    indexes = index_image(store, image, IndexCache(cache / "indexes"))
    tree = merge([index.entries for index in indexes])
    clock = SystemClock()
    loader = BlockLoader(
        {"registry": RegistryTier(store)},
        BlockStore(cache / "blocks", settings.disk),
        FetchSettings(
            tiers=("registry",),
            slots=settings.slots,
            reserved_slots=max(settings.slots // 4, 1),
            cold_bytes_per_s=float(settings.bandwidth) or None,
        ),
        memory_bytes=settings.memory,
        clock=clock,
    )
    recorder = Recorder(clock.now_s, settings.window) if settings.record else None
    shown = ImageFileSystem(ImageView(tree, indexes, loader, recorder))
    try:
        if settings.trace is not None and (trace := _kept_trace(settings.trace, image.digest)):
            _prefetch(loader, indexes, hot_blocks(trace, tree, indexes), Priority.HOT)
        if settings.stream:
            for index in indexes:
                loader.prefetch(
                    index, list(block_refs(index, range(len(index.blocks_B)))), Priority.COLD
                )
        serving.serve(
            shown, settings.mountpoint, settings.bridge, name="omniload-image", ready=ready
        )
    finally:
        shown.close()
        loader.close()
        store.close()
        _log.info(
            "bytes by tier: %s; %d requests, %d waits",
            loader.bytes_of,
            loader.requests,
            loader.waits,
        )
        if recorder is not None and settings.record is not None:
            new = trace_of(image.digest, image.config.command, recorder.touches(tree))
            _write_merged(Path(settings.record), new)


def _prefetch(
    loader: BlockLoader, indexes: tuple[LayerIndex, ...], refs: tuple[BlockRef, ...], how: Priority
) -> None:
    """Want blocks in their order, in runs of one layer: one call each."""
    by_digest = {index.blob_digest: index for index in indexes}
    run: list[BlockRef] = []
    for ref in refs:
        if run and run[-1].blob != ref.blob:
            loader.prefetch(by_digest[run[-1].blob], run, how)
            run = []
        run.append(ref)
    if run:
        loader.prefetch(by_digest[run[-1].blob], run, how)


def _kept_trace(path: str, image: str) -> Trace | None:
    """Return the trace at ``path``, where it is one of this image; it is a hint and no more.

    Raises:
        ConfigError: Nothing is there.
    """
    try:
        trace = decode_trace(Path(path).read_bytes(), name=path)
    except OSError as error:
        raise ConfigError(f"trace {path!r} cannot be read: {error}") from error
    if trace.image != image:
        _log.warning(
            "trace %s is of image %s, this is %s; its files may differ", path, trace.image, image
        )
    return trace


def _write_merged(path: Path, new: Trace) -> None:
    traces = [new]
    if path.exists():
        try:
            old = decode_trace(path.read_bytes(), name=str(path))
            traces = [old, new] if (old.image, old.command) == (new.image, new.command) else [new]
        except OmniloadError as error:  # a broken trace must not cost the new one
            _log.warning("%s; it is replaced", error)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(encode_trace(merge_traces(traces)))
    temporary.replace(path)


def main() -> None:
    """Be the daemon."""
    run_daemon(
        lambda settings, ready: serve(ImageMount.model_validate_json(settings), ready), role="image"
    )


if __name__ == "__main__":
    main()
