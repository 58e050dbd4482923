"""When a file that somebody edits is saved whole.

Editors empty a file and write it again, or write another one and rename it: in between it is
short, or not there. A save counts once the file has been the same for a while, and is there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = ["STILL_S", "Mark", "Saves", "mark_of"]

STILL_S = 0.3
"""Seconds for which a saved file stays as it is."""

Mark: TypeAlias = tuple[int, int, int]
"""What tells one state of a file from another: which file it is, its size, and when it was written."""


def mark_of(path: Path) -> Mark | None:
    """Return the mark of a file; ``None`` where there is none, or nothing in it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


@dataclass(slots=True)
class Saves:
    """Tells saves of a file by looking at its mark again and again. Where it has not been looked at yet is a save."""

    _taken: Mark | None = None
    """The mark of the save that was told last."""
    _seen: Mark | None = None
    _since_s: float = 0.0

    def look(self, mark: Mark | None, now_s: float) -> bool:
        """Tell whether the file was saved since that was told last, and is whole.

        Args:
            mark: Of the file now.
            now_s: Seconds of a clock that never goes back.
        """
        if mark != self._seen:
            self._seen, self._since_s = mark, now_s
        if mark is None or mark == self._taken or now_s - self._since_s < STILL_S:
            return False
        self._taken = mark
        return True

    def forget(self) -> None:
        """Have the save that was told last be told again."""
        self._taken = None
