"""An extracted snapshot over a target: a read-only overlay of the kernel.

The tree of the node cache is mounted over the target itself. So the former files are
still visible, whiteouts hide deletions, and every environment of the node reads
the same pages. It takes one ``mount`` call for each target; therefore a warm restore
costs milliseconds, whatever the size.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from omniload.base.errors import StateError, UnavailableError
from omniload.base.linux import calls
from omniload.base.linux.mount_table import Mount, mounts_everywhere, mounts_here
from snapshot.env.node.tree import Tree

__all__ = [
    "keys_mounted",
    "mount_overlay",
    "mount_source",
    "mounts_at",
    "overlay_options",
    "umount",
]

# The kernel's fixed number of its first namespace of processes, PROC_PID_INIT_INO; no call returns it.
_FIRST_PROCESSES = 0xEFFFFFFC
_CANNOT = frozenset(
    {errno.EPERM, errno.EACCES, errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
)
_OPTION_BYTES = 4095  # mount(2) accepts one page


def overlay_options(layers: Sequence[str]) -> str:
    """Return the options of an overlay of ``layers``, the topmost first, without a layer for writes.

    Raises:
        ValueError: They are longer than the kernel allows.
    """
    escaped = (re.sub(r"([\\:,])", r"\\\1", layer) for layer in layers)
    options = "lowerdir=" + ":".join(escaped)
    if len(os.fsencode(options)) > _OPTION_BYTES:
        raise ValueError(f"mount options of {len(options)} bytes, over {_OPTION_BYTES}")
    return options


def mounts_at(path: str) -> list[Mount]:
    """Return our overlays that are mounted on ``path``, the topmost last."""
    return [mount for mount in _ours(mounts_here()) if mount.path == path]


def keys_mounted(proc: Path = Path("/proc")) -> tuple[set[str], bool]:
    """Return the keys of the snapshots that any process sees mounted, and whether all processes could be asked."""
    keys, whole = set[str](), False
    # Only the first namespace of processes sees the processes of every container.
    with suppress(OSError):
        whole = (proc / "self" / "ns" / "pid").stat().st_ino == _FIRST_PROCESSES
    for _, mounts in mounts_everywhere(proc):
        whole = whole and mounts is not None  # only root may look at another user's process
        keys |= {mount.source.partition(":")[2] for mount in _ours(mounts or [])}
    return keys, whole


def mount_source(key: str) -> str:
    """Return the text that stands for the device of a mounted snapshot."""
    return f"omniload-env:{key}"


def mount_overlay(tree: Tree, number: int, path: str, key: str) -> None:
    """Mount target ``number`` of a tree over ``path``.

    Raises:
        UnavailableError: This machine or this user cannot mount overlays.
        StateError: The kernel refuses for another reason.
    """
    if not tree.hides_deletions:
        raise UnavailableError(f"{tree.folder}: what was deleted cannot be marked for an overlay")
    layers = [str(tree.layer(number))]
    # Leave out an empty layer, because each layer is searched for every missing name.
    if any(tree.whiteouts(number).iterdir()):
        layers.append(str(tree.whiteouts(number)))
    try:
        options = overlay_options([*layers, path])
    except ValueError as error:
        raise UnavailableError(f"{path}: {error}") from error
    # Files from a store get no devices and no rights of other users.
    flags = calls.MS_RDONLY | calls.MS_NODEV | calls.MS_NOSUID
    try:
        calls.mount(mount_source(key), path, "overlay", flags, options)
    except OSError as error:
        if error.errno in _CANNOT:
            raise UnavailableError(
                f"{path}: no overlay can be mounted here: {error.strerror}"
            ) from error
        raise StateError(f"{path}: mounting an overlay failed: {error.strerror}") from error


def umount(path: str, *, lazily: bool = False) -> None:
    """Unmount the topmost mount at ``path``; with ``lazily``, it disappears when nobody uses it any more.

    Raises:
        StateError: It is in use, or cannot be unmounted.
    """
    try:
        calls.umount(path, lazily=lazily)
    except OSError as error:
        said = f"cannot be unmounted: {error.strerror}"
        if error.errno == errno.EBUSY:
            said = "is in use; end the processes that work in it, or unmount it with --lazy"
        raise StateError(f"{path} {said}") from error


def _ours(mounts: list[Mount]) -> Iterator[Mount]:
    return (m for m in mounts if m.kind == "overlay" and m.source.startswith(mount_source("")))
