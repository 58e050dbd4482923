"""When every file of a tree was last compared with its digest.

Kept beside the tree as JSON, ``{"version": 1, "checked_s": seconds since 1970}``. What is missing,
damaged, of another version or of a time to come counts as never: the tree is checked once more.
"""

import json
from pathlib import Path

from omniload.base.errors import IntegrityError
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole

__all__ = ["CHECKED", "VERSION", "is_due", "note_check"]

VERSION = 1
CHECKED = "checked.json"
_MOST_BYTES = 4096
_DAY_S = 24 * 60 * 60
"""Age of the last check from which on a tree is checked again."""


def note_check(folder: Path, now_s: float) -> None:
    """Note that the tree in ``folder`` was found sound at ``now_s``."""
    text = json.dumps({"version": VERSION, "checked_s": int(now_s)})
    write_whole(folder / CHECKED, text.encode("ascii"))


def is_due(folder: Path, now_s: float) -> bool:
    """Tell whether the last check of the tree in ``folder`` is older than a day, or is not known."""
    checked_s = _checked_s(folder)
    return checked_s is None or not 0 <= now_s - checked_s < _DAY_S


def _checked_s(folder: Path) -> int | None:
    try:
        fields = json.loads(
            read_kept_file(folder / CHECKED, most_bytes=_MOST_BYTES, what="the time of a check")
        )
    except (OSError, ValueError, RecursionError, IntegrityError):
        return None
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        return None
    checked_s = fields.get("checked_s")
    return checked_s if type(checked_s) is int and 0 <= checked_s < 1 << 40 else None
