"""Whether a node can show images as EROFS, found out by doing it once, small."""

import os
import tempfile
from pathlib import Path

from omniload.base.errors import OmniloadError
from snapshot.image.entries import Entry
from snapshot.image.erofs_blobs import blob_layout
from snapshot.image.erofs_writer import plan_metadata, write_metadata
from snapshot.image.precontent_kernel import PreContent, open_erofs
from snapshot.image.tree import merge

__all__ = ["why_no_erofs", "why_no_filling"]

_FIRST_PROCESSES = "pid:[4026531836]"
"""The process namespace in which a kernel starts; the number is part of its interface."""


def why_no_erofs(cache: str | Path) -> str | None:
    """Return what keeps this process from mounting EROFS from files of a folder; None for nothing."""
    if os.geteuid() != 0:
        return f"user {os.geteuid()} is not root, and only root mounts EROFS"
    if "\terofs\n" not in Path("/proc/filesystems").read_text(encoding="ascii"):
        return f"kernel {os.uname().release} has no EROFS"
    entries = (Entry(path="", kind="directory", mode=0o755),)
    plan = plan_metadata(merge([entries]), [blob_layout(entries)])
    try:
        with tempfile.NamedTemporaryFile(dir=_made(cache), prefix="probe-") as file:
            file.writelines(write_metadata(plan, uuid=bytes(16)))
            file.flush()
            os.close(open_erofs(file.name, (), trusted=False))
    except (OSError, OmniloadError) as error:
        release = os.uname().release
        return f"kernel {release} mounts no EROFS from files of {str(cache)!r} (6.12 can): {error}"
    return None


def why_no_filling(cache: str | Path) -> str | None:
    """Return what keeps a mounted image from being filled while it is read; None for nothing."""
    if (reason := why_no_erofs(cache)) is not None:
        return reason
    if (space := os.readlink("/proc/self/ns/pid")) != _FIRST_PROCESSES:  # noqa: PTH115 -- no path
        return (
            f"this process is in a process namespace of its own ({space}), whose end kills the "
            "guard together with it"
        )
    try:
        group = PreContent()
    except OSError as error:
        return f"kernel {os.uname().release} gives no pre-content events (6.14 can): {error}"
    try:
        with tempfile.NamedTemporaryFile(dir=_made(cache), prefix="probe-") as file:
            group.mark(file.name)
    except OSError as error:
        return f"the file system of {str(cache)!r} gives no pre-content events (ext4 can): {error}"
    finally:
        group.close()
    return None


def _made(cache: str | Path) -> Path:
    folder = Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
