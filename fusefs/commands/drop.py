"""``omniload fs drop``: forget the cached bytes and attributes of files."""

from contextlib import closing

import click

from fusefs.commands.store_options import cache_options, in_store, opened_with_cache, require_store
from fusefs.tools.prefetch import drop_from_mount
from fusefs.tools.statistics import drop_cached
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import StateError
from omniload.base.units import format_bytes

__all__ = ["drop"]


@click.command("drop")
@click.argument("paths", nargs=-1, required=True)
@cache_options
def drop(paths: tuple[str, ...], store: str | None, **cache: str | None) -> None:
    """Drop cached data of files and directories: attributes, blocks in memory, copies on disk.

    \b
    Example:
      omniload fs drop /mnt/jobs/data/train.parquet
    """  # noqa: D301 -- click's own marker
    require_store(store, cache)
    if store is None:
        dropped = [drop_from_mount(path) for path in paths]
    else:
        with closing(opened_with_cache(store, **cache)) as files:
            dropped = [_forgotten(files, in_store(path)) for path in paths]
    for path, (memory, disk) in zip(paths, dropped, strict=True):
        click.echo(f"{path}: {format_bytes(memory)} of memory, {format_bytes(disk)} of the disk")


def _forgotten(files: StripedFiles, path: str) -> tuple[int, int]:
    try:
        return drop_cached(files, path)
    except FileNotFoundError as error:
        raise StateError(f"{path!r} is not in {files.store.location}") from error
