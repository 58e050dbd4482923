"""Options of a mount in the form of ``-o`` and fstab: ``rw,_netdev,count=8,cache=1GiB,watch``."""

import difflib
import json
from collections.abc import Iterable
from typing import Any

from fusefs.bridge.api.options import require_text
from fusefs.config import FilesConfig
from fusefs.mounts.lifecycle import MountConfig
from omniload.base.config import load_yaml, parse_yaml
from omniload.base.errors import ConfigError

__all__ = ["mount_config", "without_log", "without_watch"]

_WATCH, _LOG = "watch", "log"
_OF_MOUNT = frozenset(
    {
        *("", "rw", "defaults", "auto", "noauto", "user", "users", "owner", "group", "nouser"),
        *("nofail", "_netdev", "async", "exec", "silent", "loud"),
        # Access times are not kept, whatever the option.
        *("relatime", "norelatime", "noatime", "nodiratime", "strictatime", "lazytime"),
    }
)
"""Options of mount(8), which passes them to its helpers; here they are always true or have no effect."""
_HELD = frozenset({"nosuid", "nodev"})
"""Options that are in force for every mount that is not ``trusted``."""
_REFUSED = frozenset(
    {"suid", "dev", "noexec", "sync", "dirsync", "remount", "bind", "rbind", "move"}
)
_PLACES = frozenset({"store", "mountpoint", "files"})
"""Fields that cannot be options."""
_NESTED = frozenset({"striping", "directories", "store_options"})
"""Fields that no single option can set."""
_SHORT = {
    "unit": ("striping", "unit"),
    "count": ("striping", "count"),
    "disk_cache": ("disk_cache", "directory"),
    "disk_cache_capacity": ("disk_cache", "capacity"),
}


def without_watch(options: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """Return the options without ``watch``, and whether it was among them."""
    words = [word.strip() for word in ",".join(options).split(",")]
    return tuple(word for word in words if word != _WATCH), _WATCH in words


def without_log(options: Iterable[str]) -> tuple[tuple[str, ...], str | None]:
    """Return the options without ``log=FILE``, and the last such file if one was given.

    Raises:
        ConfigError: ``log`` was given without a file.
    """
    words = [word.strip() for word in ",".join(options).split(",")]
    given = [word.partition("=")[2] for word in words if word.partition("=")[0] == _LOG]
    if "" in given:
        raise ConfigError("option 'log' names no file; give log=FILE")
    rest = tuple(word for word in words if word.partition("=")[0] != _LOG)
    return rest, given[-1] if given else None


def mount_config(
    store: str, mountpoint: str, options: Iterable[str], config: str | None = None
) -> MountConfig:
    """Build the configuration of a mount.

    Args:
        store: URL of the store.
        mountpoint: Directory to mount on.
        options: Words and ``KEY=VALUE``, also several joined by commas. Options that only concern mount(8) and
            systemd are ignored.
        config: A file of ``files:`` settings, which the options override.

    Raises:
        ConfigError: An option is unknown, out of range, or asks for something that is not supported.
    """
    options = tuple(options)
    require_text(store, mountpoint, *options)
    files = load_yaml(config, FilesConfig).model_dump() if config is not None else {}
    fields: dict[str, Any] = {"store": store, "mountpoint": mountpoint}
    for option in ",".join(options).split(","):
        name, given, value = option.strip().partition("=")
        if name in _OF_MOUNT or name == "comment" or name.lower().startswith("x-"):
            continue
        if name in _HELD and not given:
            fields.setdefault("trusted", False)
        elif name == "ro":
            fields["read_only"] = True
        elif name in _SHORT:
            group, key = _SHORT[name]
            files[group] = {**(files.get(group) or {}), key: value}
        elif name in FilesConfig.model_fields:
            files[name] = value
        elif name in MountConfig.model_fields and name not in _PLACES:
            fields[name] = value if given else True
        else:
            raise ConfigError(_unknown(name))
    text = json.dumps({**fields, "files": files})  # JSON is YAML: faults name the key
    return parse_yaml(text, MountConfig, name="-o")


def _unknown(name: str) -> str:
    if name in _REFUSED:
        return f"option {name!r} is not supported: this mount cannot keep what it promises; leave it out"
    fields = {*FilesConfig.model_fields, *MountConfig.model_fields} - _PLACES - _NESTED
    known = sorted({"ro", _WATCH, _LOG, *_SHORT, *fields})
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"option {name!r} is not known; {meant}There are {', '.join(known)}"
