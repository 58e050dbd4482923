"""``omniload fs stat``: show how a file is stored."""

import json
import os
from typing import Any

import click

from fusefs.commands.store_options import in_store, opened
from fusefs.tools.statistics import LAYOUT_XATTR, layout_of
from omniload.base.errors import StateError
from omniload.base.units import counted, format_bytes

__all__ = ["stat"]


@click.command("stat")
@click.argument("file")
@click.option("--store", help="Store that contains FILE; not needed on a mount.")
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
        click.echo(f"  {size} in units of {unit} over {counted(segment['stripe_count'], 'object')}")
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
    files = opened(store)
    try:
        return layout_of(files, in_store(file))
    except FileNotFoundError as error:
        raise StateError(f"{file!r} is not in {store}") from error
    finally:
        files.close()
