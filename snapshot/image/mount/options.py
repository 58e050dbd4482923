"""Options of the commands on images, made into settings."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fusefs.bridge.api.options import BridgeOptions, require_text
from omniload.base.config import StrictModel, parse_yaml
from omniload.base.errors import ConfigError
from snapshot.image.mount.daemon import AUTO, READ_AHEAD_BYTES, ImageMount
from snapshot.image.peer.node import PeerSettings
from snapshot.oci.image import platform_here
from snapshot.oci.manifest import Platform
from snapshot.private_folder import cache_folder

__all__ = ["cache_at", "mount_settings", "option_value", "options_in", "platform_of"]

_NO_OPTIONS = frozenset({"image", "mountpoint", "mirrors", "command", "sharing"})
"""Fields of a mount that are set in another way."""


def mount_settings(image: str, mountpoint: str, options: tuple[str, ...]) -> ImageMount:
    """Return the settings of a mount from ``KEY=VALUE`` options; those of the kernel's side too.

    Raises:
        ConfigError: An option is none, or its value.
    """
    require_text(image, mountpoint, *options)
    fields: dict[str, Any] = {"image": image, "mountpoint": mountpoint}
    bridge: dict[str, Any] = {"read_only": True, "kernel_read_ahead": READ_AHEAD_BYTES}
    sharing: dict[str, Any] = {}
    for key, value in options_in(options):
        if key in BridgeOptions.model_fields:
            bridge[key] = option_value(key, value, BridgeOptions)
        elif key == "platform":
            fields[key] = json.loads(
                (platform_of(value or "") or platform_here()).model_dump_json()
            )
        elif key == "peers" or (sharing.get("peers") and value is None and ":" in key):
            sharing.setdefault("peers", []).append(value or key)  # a list, parted by commas too
        elif key in PeerSettings.model_fields:
            sharing[key] = option_value(key, value, PeerSettings)
        elif key == "mirror":
            fields.setdefault("mirrors", []).append(option_value(key, value))
        else:
            fields[key] = option_value(key, value, ImageMount, _NO_OPTIONS)
    for key in ("trace", "record"):
        if key in fields and fields[key] != AUTO:
            fields[key] = str(Path(fields[key]).absolute())
    if "peer_token_file" in sharing:
        sharing["peer_token_file"] = str(Path(sharing["peer_token_file"]).absolute())
    fields |= {"sharing": sharing, "bridge": bridge}
    fields["cache"] = cache_at(fields.get("cache"))
    text = json.dumps(fields)  # JSON is YAML: faults name the key
    return parse_yaml(text, ImageMount, name="-o")


def cache_at(named: str | None) -> str:
    """Return where indexes and blocks are kept: what the user named, else in the user's cache."""
    place = named or cache_folder("image", remedy="name one with -o cache=FOLDER")
    return str(Path(place).absolute())


def options_in(texts: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield keys and values of ``KEY=VALUE,KEY,...``; None for the value of a key alone."""
    for option in filter(None, ",".join(texts).split(",")):
        key, given, value = option.strip().partition("=")
        yield key, value if given else None


def option_value(
    key: str,
    value: str | None,
    model: type[StrictModel] | None = None,
    closed: Collection[str] = (),
) -> str | bool:
    """Return the value of an option; only of one that is a yes or no it may be left out.

    Args:
        key: The option.
        value: As it was given.
        model: Whose field it is; without one it needs a value.
        closed: Fields that are no options.

    Raises:
        ConfigError: There is no such option, or its value is missing.
    """
    fields = {} if model is None else model.model_fields
    if model is not None and (key not in fields or key in closed):
        raise ConfigError(f"-o {key}: there is no such option; the command's --help lists them")
    if value is None and key in fields and fields[key].annotation is bool:
        return True
    if not value:
        raise ConfigError(f"-o {key} has no value; write {key}=VALUE")
    return value


def platform_of(text: str | None) -> Platform | None:
    """Return the platform that a text names.

    Raises:
        ConfigError: It names none.
    """
    if text is None:
        return None
    parts = text.split("/")
    if len(parts) not in {2, 3} or not all(parts):
        raise ConfigError(f"platform {text!r} is not OS/ARCHITECTURE or OS/ARCHITECTURE/VARIANT")
    return Platform(
        os=parts[0], architecture=parts[1], variant=parts[2] if len(parts) == 3 else None
    )
