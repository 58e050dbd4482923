"""What the commands on images are told, made into settings."""

import json
import os
from pathlib import Path
from typing import Any

from fusefs.bridge.options import BridgeOptions
from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from snapshot.image.mounting import AUTO, READ_AHEAD_BYTES, ImageMount
from snapshot.image.peer_node import PeerSettings
from snapshot.oci.manifest import Platform
from snapshot.oci.opening import platform_here

__all__ = ["cache_folder", "mount_settings", "platform_of"]


def cache_folder() -> Path:
    """Return where indexes and blocks are kept where nothing else is said."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omniload" / "image"


def mount_settings(image: str, mountpoint: str, options: tuple[str, ...]) -> ImageMount:
    """Return the settings of a mount from ``KEY=VALUE`` options; those of the kernel's side too.

    Raises:
        ConfigError: An option is none, or its value.
    """
    fields: dict[str, Any] = {"image": image, "mountpoint": mountpoint}
    bridge: dict[str, Any] = {"read_only": True, "kernel_read_ahead": READ_AHEAD_BYTES}
    sharing: dict[str, Any] = {}
    for option in filter(None, ",".join(options).split(",")):
        key, given, value = option.strip().partition("=")
        if key in BridgeOptions.model_fields:
            bridge[key] = value if given else True
        elif key == "platform":
            fields[key] = json.loads((platform_of(value) or platform_here()).model_dump_json())
        elif key == "peers" or (sharing.get("peers") and not given and ":" in key):
            sharing.setdefault("peers", []).append(value or key)  # a list, parted by commas too
        elif key in PeerSettings.model_fields:
            sharing[key] = value
        elif key == "mirror":
            fields.setdefault("mirrors", []).append(value)
        else:
            fields[key] = value if given else True
    for key in ("trace", "record", "cache", "index_key_file"):
        if key in fields and (fields[key] != AUTO or key == "cache"):
            fields[key] = str(Path(fields[key]).absolute())
    if "peer_token_file" in sharing:
        sharing["peer_token_file"] = str(Path(sharing["peer_token_file"]).absolute())
    fields |= {"sharing": sharing, "bridge": bridge}
    fields.setdefault("cache", str(cache_folder()))
    text = json.dumps(fields)  # JSON is YAML: faults name the key
    return parse_yaml(text, ImageMount, name="-o")


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
