"""``omniload image``: show, convert: the content of a registry, and the layers that can be read in parts."""

import json
from contextlib import closing
from typing import Any

import click

from omniload.base.errors import ConfigError
from omniload.base.units import counted, format_bytes
from snapshot.image.layer.convert import convert_image
from snapshot.image.layer.toc import format_of
from snapshot.image.mount.daemon import platform_of
from snapshot.oci.image import Image, open_store, opened_image
from snapshot.oci.manifest import Platform

__all__ = ["convert_command", "show_command"]

_platform = click.option("--platform", help="OS/ARCHITECTURE[/VARIANT]; default: this machine's.")


@click.command("show")
@click.argument("image")
@_platform
@click.option(
    "--mirror", "mirrors", multiple=True, help="Registry that may have the image, too; repeatable."
)
@click.option("--json", "as_json", is_flag=True)
def show_command(image: str, platform: str | None, mirrors: tuple[str, ...], as_json: bool) -> None:
    """Show the layers of IMAGE, with sizes and formats; to see its files, mount it.

    Registries are reached over TLS, unless the registry is on this machine or its name starts with http://.

    \b
    Example:
      omniload image show registry.example:5000/team/torch:2.13
      omniload image show oci:folder:tag --json
    """  # noqa: D301 -- click's own marker
    with opened_image(image, mirrors=mirrors, platform=_named(platform)) as (_, found):
        described = _described(found)
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    click.echo(f"{described['digest']}  {' '.join(described['command'])}")
    for layer in described["layers"]:
        click.echo(
            f"  {layer['digest']}  {format_bytes(layer['size_bytes']):>9}  {layer['format']}"
        )


@click.command("convert")
@click.argument("image")
@click.argument("target")
@click.option(
    "--level",
    default=3,
    show_default=True,
    type=click.IntRange(1, 19),
    help="Compression level of zstd.",
)
@_platform
@click.option("--json", "as_json", is_flag=True)
def convert_command(
    image: str, target: str, level: int, platform: str | None, as_json: bool
) -> None:
    """Write IMAGE to TARGET as zstd:chunked, of which parts can be read; other tools read it, too.

    \b
    Example:
      omniload image convert registry.example:5000/torch:2.13 registry.example:5000/torch:2.13-lazy
      omniload image convert oci:folder:tag oci:folder:tag-lazy
    """  # noqa: D301 -- click's own marker
    with opened_image(image, platform=_named(platform)) as (source, found):
        goal, tag = open_store(target, create=True)
        with closing(goal):
            # Refuse this before hours of work: nobody can know the new image's digest in advance.
            if tag.startswith("sha256:"):
                raise ConfigError(f"{target!r} names a digest; name the new image by a tag")
            made = convert_image(source, found, goal, tag, level=level)
    before, after = (sum(layer.size for layer in each.layers) for each in (found, made))
    if as_json:
        numbers = {"digest": made.digest, "bytes_before": before, "bytes_after": after}
        click.echo(json.dumps({**numbers, "kept": list(made.kept)}, indent=2))
        return
    click.echo(
        f"{made.digest}  {counted(len(made.layers), 'layer')}, {len(made.kept)} of them as they were, "
        f"{format_bytes(before)} before, {format_bytes(after)} after"
    )


def _described(image: Image) -> dict[str, Any]:
    layers = [
        {"digest": layer.digest, "size_bytes": layer.size, "format": format_of(layer)}
        for layer in image.layers
    ]
    return {
        "digest": image.digest,
        "platform": f"{image.config.os}/{image.config.architecture}",
        "command": list(image.config.command),
        "size_bytes": sum(layer.size for layer in image.layers),
        "layers": layers,
    }


def _named(platform: str | None) -> Platform | None:
    return None if platform is None else platform_of(platform)
