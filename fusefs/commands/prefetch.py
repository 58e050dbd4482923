"""``omniload fs prefetch``: fetch files into caches before they are read."""

from contextlib import closing
from dataclasses import replace

import click

from fusefs.commands.store_options import cache_options, in_store, opened_with_cache, require_store
from fusefs.tools.display import progress, show_kept
from fusefs.tools.prefetch import (
    mounted_files,
    prefetch_from_store,
    prefetch_on_mount,
    store_files,
)

__all__ = ["prefetch"]


@click.command("prefetch")
@click.argument("paths", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True)
@cache_options
def prefetch(paths: tuple[str, ...], as_json: bool, store: str | None, **cache: str | None) -> None:
    """Load files and directories before they are read: into the disk cache, or else into memory.

    \b
    Example:
      omniload fs prefetch /mnt/jobs/ckpt/step-1000
      omniload fs prefetch ckpt/step-1000 --store hdfs://namenode:9000/jobs --disk-cache /nvme/omnifs
    """  # noqa: D301 -- click's own marker
    require_store(store, cache)
    if store is None:
        found = list(mounted_files(paths))
        with progress("prefetching", sum(size for _, size in found)) as report:
            kept = prefetch_on_mount(found, report)
    else:
        with closing(opened_with_cache(store, **cache)) as files:
            found = list(store_files(files, [in_store(path) for path in paths]))
            with progress("prefetching", sum(size for _, size in found)) as report:
                kept = prefetch_from_store(files, found, report)
        # Bytes in the memory of this process disappear when it ends.
        kept = [replace(file, memory_bytes=0) for file in kept]
    show_kept(kept, as_json=as_json)
