"""``omniload fs export``: copy striped files to plain files in any place."""

import json
from contextlib import closing
from pathlib import Path

import click

from fusefs.commands.store_options import in_store, opened
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import open_store
from fusefs.tools.display import progress
from fusefs.tools.export import (
    copies_of,
    export_file,
    parted,
    place_on_mount,
    require_free,
    require_no_others,
)
from omniload.base.errors import StateError
from omniload.base.secrets import without_secrets
from omniload.base.units import format_bytes

__all__ = ["export"]


@click.command("export")
@click.argument("file")
@click.argument("target")
@click.option("--store", help="Store that contains FILE; not needed on a mount.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option("--json", "as_json", is_flag=True)
def export(file: str, target: str, store: str | None, force: bool, as_json: bool) -> None:
    """Copy FILE, or all files below it, to plain files at TARGET: a path or any store's URL.

    Missing parent folders of TARGET are created. Symbolic links below FILE are left out.

    \b
    Example:
      omniload fs export ckpt/model.safetensors /data/model.safetensors --store hdfs://namenode:9000/jobs
      omniload fs export /mnt/jobs/ckpt s3://bucket/ckpt
    """  # noqa: D301 -- click's own marker
    url, path = (store, in_store(file)) if store is not None else place_on_mount(Path(file))
    folder, name = parted(target)
    try:
        with closing(opened(url)) as files, closing(RetryingStore(open_store(folder))) as out:
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
