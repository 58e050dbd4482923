"""Show an extracted snapshot over a target: a read-only overlay of the kernel.

The tree of the node cache lies over the target itself, so what was there before is
still there, deletions are hidden by whiteouts, and every environment of the node reads
the same pages. One ``mount`` call for each target: this is what makes a warm restore
cost milliseconds, whatever the size.
"""

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from omniload.base.errors import StateError, UnavailableError
from omniload.base.units import decimal_of
from snapshot.env.node.cache import Tree

__all__ = [
    "Mount",
    "keys_mounted",
    "mount_overlay",
    "mount_source",
    "mounts_at",
    "overlay_options",
    "parse_mounts",
    "umount",
]

_FIRST_PROCESSES = 0xEFFFFFFC
"""Number that the kernel gives to its first namespace of processes."""
_READ_ONLY = 1
_NO_DEVICES = 4
_NO_SETUID = 2
_DETACH = 2
_CANNOT = frozenset(
    {errno.EPERM, errno.EACCES, errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
)
_OPTION_BYTES = 4095  # mount(2) takes one page


class Mount(NamedTuple):
    """A line of the kernel's list of mounts."""

    path: str
    kind: str
    source: str
    options: str


def overlay_options(layers: Sequence[str]) -> str:
    """Return the options of an overlay of ``layers``, the topmost first, with nothing to write to.

    Raises:
        ValueError: They are longer than the kernel takes.
    """
    escaped = (re.sub(r"([\\:,])", r"\\\1", layer) for layer in layers)
    options = "lowerdir=" + ":".join(escaped)
    if len(os.fsencode(options)) > _OPTION_BYTES:
        raise ValueError(f"mount options of {len(options)} bytes, over {_OPTION_BYTES}")
    return options


def parse_mounts(text: str) -> list[Mount]:
    """Read ``/proc/self/mountinfo``; the last mount of a path is the one that is seen."""
    found = []
    for line in text.splitlines():
        words = line.split(" ")
        rest = words[words.index("-", 6) + 1 :]
        found.append(Mount(_plain(words[4]), rest[0], _plain(rest[1]), _plain(rest[2])))
    return found


def mounts_at(path: str) -> list[Mount]:
    """Return the overlays of ours that lie on ``path``, the topmost last."""
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    ours = (m for m in parse_mounts(text) if m.kind == "overlay" and m.path == path)
    return [mount for mount in ours if mount.source.startswith(mount_source(""))]


def keys_mounted(proc: Path = Path("/proc")) -> tuple[set[str], bool]:
    """Return the keys of the snapshots that any process sees mounted, and whether all could be asked.

    Only the first namespace of processes holds those of every container; and only root may
    look at what others have mounted.
    """
    keys, asked, whole = set[str](), set[str](), False
    with suppress(OSError):
        whole = (proc / "self" / "ns" / "pid").stat().st_ino == _FIRST_PROCESSES
    for process in proc.iterdir():
        if decimal_of(process.name) is None:
            continue
        try:
            space = os.readlink(process / "ns" / "mnt")  # noqa: PTH115
            if space in asked:
                continue
            text = (process / "mountinfo").read_text("utf-8", errors="surrogateescape")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            whole = False
            continue
        asked.add(space)
        sources = (m.source for m in parse_mounts(text) if m.kind == "overlay")
        keys |= {
            source.partition(":")[2] for source in sources if source.startswith(mount_source(""))
        }
    return keys, whole


def mount_source(key: str) -> str:
    """Return what stands for the device of a mounted snapshot."""
    return f"omniload-env:{key}"


def mount_overlay(tree: Tree, number: int, path: str, key: str) -> None:
    """Lay target ``number`` of a tree over ``path``.

    Raises:
        UnavailableError: This machine or this user cannot mount overlays.
        StateError: The kernel refuses for another reason.
    """
    if not tree.hides_deletions:
        raise UnavailableError(f"{tree.folder}: what was deleted cannot be marked for an overlay")
    layers = [str(tree.layer(number))]
    if any(tree.whiteouts(number).iterdir()):
        layers.append(str(tree.whiteouts(number)))
    try:
        options = overlay_options([*layers, path])
    except ValueError as error:
        raise UnavailableError(f"{path}: {error}") from error
    flags = _READ_ONLY | _NO_DEVICES | _NO_SETUID
    code = _call("mount", mount_source(key), path, "overlay", flags, options)
    if code in _CANNOT:
        raise UnavailableError(f"{path}: no overlay can be mounted here: {os.strerror(code)}")
    if code:
        raise StateError(f"{path}: mounting an overlay failed: {os.strerror(code)}")


def umount(path: str, *, lazily: bool = False) -> None:
    """Take the topmost mount off ``path``.

    Args:
        path: Where it lies.
        lazily: Take it out of the tree now and let go of it when nobody uses it any more.

    Raises:
        StateError: It is in use, or cannot be unmounted.
    """
    code = _call("umount2", path, _DETACH if lazily else 0)
    if code == errno.EBUSY:
        raise StateError(
            f"{path} is in use; end the processes that work in it, or unmount it with --lazy"
        )
    if code:
        raise StateError(f"{path} cannot be unmounted: {os.strerror(code)}")


def _call(name: str, *arguments: str | int) -> int:
    """Call the C library; return 0 or the error number."""
    library = ctypes.CDLL(None, use_errno=True)
    words: list[ctypes.c_char_p | ctypes.c_ulong] = [
        ctypes.c_char_p(os.fsencode(word)) if isinstance(word, str) else ctypes.c_ulong(word)
        for word in arguments
    ]
    return 0 if getattr(library, name)(*words) == 0 else ctypes.get_errno()


def _plain(word: str) -> str:
    """Undo the octal escapes of the kernel's list."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
