"""Options of the commands on images, made into settings."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fusefs.bridge.api.options import BridgeOptions, require_text
from omniload.base.config import StrictModel, parse_yaml
from omniload.base.errors import ConfigError
from snapshot.image.mount.daemon import AUTO, READ_AHEAD_BYTES, ImageMount, NodeMount
from snapshot.image.peer.node import PeerSettings
from snapshot.oci.manifest import Platform
from snapshot.private_folder import cache_folder

__all__ = ["mount_settings", "note_option", "options_in", "platform_of", "settings_of"]

Settings = TypeVar("Settings", bound=StrictModel)


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
            bridge[key] = _option_value(key, value, BridgeOptions)
        elif key == "peers" or (sharing.get("peers") and value is None and ":" in key):
            sharing.setdefault("peers", []).append(value or key)  # a list, parted by commas too
        elif key in PeerSettings.model_fields:
            sharing[key] = _option_value(key, value, PeerSettings)
        else:
            note_option(ImageMount, fields, key, value)
    for key in ("trace", "record"):
        if key in fields and fields[key] != AUTO:
            fields[key] = str(Path(fields[key]).absolute())
    if "peer_token_file" in sharing:
        sharing["peer_token_file"] = str(Path(sharing["peer_token_file"]).absolute())
    return settings_of(ImageMount, fields | {"sharing": sharing, "bridge": bridge})


def settings_of(model: type[Settings], fields: Mapping[str, Any]) -> Settings:
    """Return checked settings; where no cache is named, it lies in the user's.

    Raises:
        ConfigError: A value is none that its field takes.
    """
    cache = fields.get("cache") or cache_folder("image", remedy="name one with -o cache=FOLDER")
    text = json.dumps({**fields, "cache": str(Path(cache).absolute())})
    return parse_yaml(text, model, name="-o")  # JSON is YAML: faults name the key


def options_in(texts: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield keys and values of ``KEY=VALUE,KEY,...``; None for the value of a key alone."""
    for option in filter(None, ",".join(texts).split(",")):
        key, given, value = option.strip().partition("=")
        yield key, value if given else None


def note_option(
    model: type[NodeMount], fields: dict[str, Any], key: str, value: str | None
) -> None:
    """Put an option among the fields of a mount.

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
    """Return the value of an option; only of a field that is a yes or no it may be left out."""
    if value is None and model is not None and model.model_fields[key].annotation is bool:
        return True
    if not value:
        raise ConfigError(f"-o {key} has no value; write {key}=VALUE")
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
