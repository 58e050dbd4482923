"""``omniload fs``: mount, umount, stat, verify, prefetch, drop, export."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fusefs.bridge.process.launch import followed
from fusefs.config import FilesConfig
from fusefs.mounts.lifecycle import is_watched, start
from fusefs.mounts.lifecycle import umount as unmount
from fusefs.mounts.options import mount_config, without_log, without_watch
from fusefs.stores.protocol import checked_path
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import check_root, open_store
from fusefs.tools.display import progress, show_kept, show_report, waiting_line
from fusefs.tools.export import (
    copies_of,
    export_file,
    parted,
    place_on_mount,
    require_free,
    require_no_mount,
    require_no_others,
)
from fusefs.tools.fsck import verify
from fusefs.tools.prefetch import (
    drop_from_mount,
    mounted_files,
    prefetch_from_store,
    prefetch_on_mount,
    store_files,
    with_disk_cache,
)
from fusefs.tools.statistics import LAYOUT_XATTR, drop_cached, layout_of
from fusefs.tree.namespace import StripedFiles
from omniload.base.cli import FiniteRange
from omniload.base.config import load_yaml
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.secrets import without_secrets
from omniload.base.units import format_bytes, parse_seconds

__all__ = ["command"]


@click.group("fs")
def command() -> None:
    """Striped files over HDFS and any store."""


@command.command("mount")
@click.argument("store")
@click.argument("mountpoint")
@click.option(
    "-c", "--config", type=click.Path(exists=True, dir_okay=False), help="YAML of files: settings."
)
@click.option("-o", "options", multiple=True, help="ro, allow_other, or KEY=VALUE of the mount.")
@click.option("-f", "--foreground", is_flag=True, help="Stay until it is unmounted.")
@click.option("--log", type=click.Path(dir_okay=False), help="Where the daemon logs.")
@click.option(
    "--bridge",
    type=click.Choice(["auto", "pyfuse3", "device"]),
    help="How the kernel is spoken to.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Go on with the mount a daemon has there, and with its watch; always by bridge=device.",
)
@click.option("--watch", is_flag=True, help="Mount again whenever the daemon dies.")
def mount(  # noqa: PLR0913, PLR0917 -- one per option
    store: str,
    mountpoint: str,
    config: str | None,
    options: tuple[str, ...],
    foreground: bool,
    log: str | None,
    bridge: str | None,
    take_over: bool,
    watch: bool,
) -> None:
    """Show STORE as a tree of files at MOUNTPOINT.

    \b
    Example:
      omniload fs mount hdfs://namenode:9000/jobs /mnt/jobs -o cache=1GiB
      omniload fs mount --watch --foreground hdfs://namenode:9000/jobs /mnt/jobs
      omniload fs mount --take-over hdfs://namenode:9000/jobs /mnt/jobs
    """  # noqa: D301 -- click's own marker
    if not mountpoint:
        raise ConfigError("the mount point is an empty text; name a folder")
    target = os.path.abspath(mountpoint)  # noqa: PTH100 -- resolve() would ask the mount
    folder, name = os.path.split(target)
    if not os.path.isdir(folder) or name not in os.listdir(folder):  # noqa: PTH112, PTH208 -- nor stat a dead mount
        raise ConfigError(f"{target}: no such folder; make it, then mount there")
    given = [*options, *([f"bridge={bridge}"] if bridge else [])]
    given += ["take_over"] if take_over else []
    words, asked = without_watch(given)
    words, logged = without_log(words)
    settings = mount_config(store, target, words, config)
    log = log or logged or (None if foreground else os.devnull)
    # A watch ends with the daemon it started, so the process that takes over goes on with it.
    watch = watch or asked or (settings.take_over and is_watched(target))
    process = start(settings, log_path=log, watched=watch)
    if not foreground:
        beside = ", watched" if watch else ""
        shown = without_secrets(settings.store)
        click.echo(f"{shown} at {target}, process {process.pid}{beside}")
        process.returncode = 0  # it outlives us, and nobody here waits for it
        return
    sys.exit(followed(process))


@command.command("umount")
@click.argument("mountpoint")
@click.option(
    "--within", default="5m", show_default=True, help="Most time to wait for its process."
)
def umount(mountpoint: str, within: str) -> None:
    """Unmount, and return when the process behind it is gone and everything is published.

    Files that are being written must be closed first. Ends with 3 where the process is still
    there, and with 5 where something could not be published.

    \b
    Example:
      omniload fs umount /mnt/jobs
    """  # noqa: D301 -- click's own marker
    try:
        within_s = float(str(parse_seconds(within)))
    except ValueError as error:
        raise ConfigError(f"--within: {error}") from error
    unmount(mountpoint, within_s=within_s, report=waiting_line(mountpoint))


@command.command("stat")
@click.argument("file")
@click.option("--store", help="Look into this store instead of a mount.")
@click.option("--json", "as_json", is_flag=True)
def stat(file: str, store: str | None, as_json: bool) -> None:
    """Show how FILE is stored: plain or striped, unit, count, objects.

    \b
    Example:
      omniload fs stat /mnt/jobs/model.pt
      omniload fs stat model.pt --store hdfs://namenode:9000/jobs
    """  # noqa: D301 -- click's own marker
    found = _layout(file, store)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if found["kind"] == "directory":
        click.echo(f"{found['path']}: directory, mode {found['mode']}")
        return
    click.echo(f"{found['path']}: {found['kind']}, {found['size_bytes']} bytes, {found['stored']}")
    for segment in found.get("segments", ()):
        size, unit = format_bytes(segment["size_bytes"]), format_bytes(segment["unit_bytes"])
        click.echo(f"  {size} in units of {unit} over {segment['stripe_count']} objects")
        for path in segment["objects"]:
            click.echo(f"    {path}")
    if (most := found.get("num_segments")) is not None:
        shown = len(found["segments"])
        click.echo(f"  the first {shown} of {most} segments; give --store to see all")


def _layout(file: str, store: str | None) -> dict[str, Any]:
    if store is None:
        try:
            found: dict[str, Any] = json.loads(os.getxattr(file, LAYOUT_XATTR))
        except FileNotFoundError as error:
            raise StateError(f"{file!r} is not there; name a file, or give --store") from error
        except OSError as error:
            raise StateError(f"{file!r} lies on no mount of ours: {error}; give --store") from error
        return found
    files = _open(store)
    try:
        return layout_of(files, _in_store(file))
    except FileNotFoundError as error:
        raise StateError(f"{file!r} is not in {store}") from error
    finally:
        files.close()


@command.command("verify")
@click.argument("store")
@click.option("--repair", is_flag=True, help="End interrupted replacements, remove orphans.")
@click.option("--read-data", is_flag=True, help="Read every unit and compare its checksum.")
@click.option(
    "--grace",
    type=FiniteRange(min=0),
    default=3600.0,
    show_default=True,
    help="Seconds a write may take.",
)
@click.option("--json", "as_json", is_flag=True)
def verify_command(store: str, repair: bool, read_data: bool, grace: float, as_json: bool) -> None:
    """Check that every object a manifest of STORE names is there and whole.

    \b
    Example:
      omniload fs verify hdfs://namenode:9000/jobs --read-data
    """  # noqa: D301 -- click's own marker
    require_no_mount(store)
    files = _open(store)
    try:
        check_root(files.store)
        report = verify(files, read_data=read_data, repair=repair, grace_s=grace)
    finally:
        files.close()
    show_report(report, as_json=as_json)
    if report.harmful:
        raise IntegrityError(f"{len(report.harmful)} faults cost data; restore those files")


def _cached_store(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a store and its disk cache instead of a mount."""
    options = (
        click.option("--store", help="PATHS lie in this store; not needed on a mount."),
        click.option("--disk-cache", help="Directory of the disk cache, with --store."),
        click.option("--capacity", help="Most bytes of it, 64GiB unless given."),
        click.option(
            "-c",
            "--config",
            type=click.Path(exists=True, dir_okay=False),
            help="YAML of files: settings, with --store.",
        ),
    )
    for option in options:
        verb = option(verb)
    return verb


@command.command("prefetch")
@click.argument("paths", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True)
@_cached_store
def prefetch(paths: tuple[str, ...], as_json: bool, store: str | None, **cache: str | None) -> None:
    """Bring files and directories close before they are read: to the disk cache, else into memory.

    \b
    Example:
      omniload fs prefetch /mnt/jobs/ckpt/step-1000
      omniload fs prefetch ckpt/step-1000 --store hdfs://namenode:9000/jobs --disk-cache /nvme/omnifs
    """  # noqa: D301 -- click's own marker
    _require_store(store, cache)
    if store is None:
        found = list(mounted_files(paths))
        with progress("prefetching", sum(size for _, size in found)) as report:
            kept = prefetch_on_mount(found, report)
    else:
        with closing(_open_cached(store, **cache)) as files:
            found = list(store_files(files, [_in_store(path) for path in paths]))
            with progress("prefetching", sum(size for _, size in found)) as report:
                kept = prefetch_from_store(files, found, report)
        # What lies in the memory of this process ends with it.
        kept = [replace(file, memory_bytes=0) for file in kept]
    show_kept(kept, as_json=as_json)


@command.command("drop")
@click.argument("paths", nargs=-1, required=True)
@_cached_store
def drop(paths: tuple[str, ...], store: str | None, **cache: str | None) -> None:
    """Forget what is cached of files and directories: attributes, blocks in memory, copies on the disk.

    \b
    Example:
      omniload fs drop /mnt/jobs/data/train.parquet
    """  # noqa: D301 -- click's own marker
    _require_store(store, cache)
    if store is None:
        dropped = [drop_from_mount(path) for path in paths]
    else:
        with closing(_open_cached(store, **cache)) as files:
            dropped = [_forgotten(files, _in_store(path)) for path in paths]
    for path, (memory, disk) in zip(paths, dropped, strict=True):
        click.echo(f"{path}: {format_bytes(memory)} of memory, {format_bytes(disk)} of the disk")


@command.command("export")
@click.argument("file")
@click.argument("target")
@click.option("--store", help="FILE lies in this store; not needed on a mount.")
@click.option("--force", is_flag=True, help="Replace what is there already.")
@click.option("--json", "as_json", is_flag=True)
def export(file: str, target: str, store: str | None, force: bool, as_json: bool) -> None:
    """Copy FILE, or all files below it, to plain files at TARGET: a path or any store's URL.

    Folders on the way to TARGET are made. Symbolic links below FILE are left out.

    \b
    Example:
      omniload fs export ckpt/model.safetensors /data/model.safetensors --store hdfs://namenode:9000/jobs
      omniload fs export /mnt/jobs/ckpt s3://bucket/ckpt
    """  # noqa: D301 -- click's own marker
    url, path = (store, _in_store(file)) if store is not None else place_on_mount(Path(file))
    folder, name = parted(target)
    try:
        with closing(_open(url)) as files, closing(RetryingStore(open_store(folder))) as out:
            copies = list(copies_of(files, path.strip("/"), name))
            (require_no_others if force else require_free)(out, copies)
            with progress("exporting", sum(copy.size_bytes for copy in copies)) as report:
                done = [(c, export_file(files, c.source, out, c.target, report)) for c in copies]
    except FileNotFoundError as error:
        raise StateError(f"{path!r} is not in {url}") from error
    for copy, exported in done:
        numbers = {"target": copy.target, "size_bytes": exported.size_bytes, "xxh3": exported.xxh3}
        shown = without_secrets(f"{target.rstrip('/')}{copy.target[len(name) :]}")
        short = f"{shown}: {format_bytes(exported.size_bytes)}, xxh3 {exported.xxh3}"
        click.echo(json.dumps(numbers) if as_json else short)


def _forgotten(files: StripedFiles, path: str) -> tuple[int, int]:
    try:
        return drop_cached(files, path)
    except FileNotFoundError as error:
        raise StateError(f"{path!r} is not in {files.store.location}") from error


def _in_store(path: str) -> str:
    try:
        return checked_path(path)
    except ValueError as error:
        raise ConfigError(f"{error} from the root of the store") from error


def _require_store(store: str | None, cache: Mapping[str, str | None]) -> None:
    """Refuse settings of a cache where the mount has its own."""
    given = [f"--{name.replace('_', '-')}" for name, value in cache.items() if value is not None]
    if store is None and given:
        raise ConfigError(
            f"{', '.join(given)} goes with --store only: a mount has the cache it was mounted with"
        )


def _open(store: str, config: FilesConfig | None = None) -> StripedFiles:
    return StripedFiles(RetryingStore(open_store(store)), config)


def _open_cached(
    store: str, *, disk_cache: str | None, capacity: str | None, config: str | None
) -> StripedFiles:
    known = load_yaml(config, FilesConfig) if config is not None else FilesConfig()
    return _open(store, with_disk_cache(known, disk_cache, capacity))
