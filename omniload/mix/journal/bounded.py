"""Files of figures that a trainer reports: lines appended, of bounded size, never at the cost of the run."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from omniload.base.log import get_logger

__all__ = ["BoundedLog", "LinesSince", "last_told", "logs_of_ranks", "opened_logs", "take_from"]

_LOG = get_logger(__name__)
_MOST_BYTES = 32 << 20
"""Of one file; the one before it is kept."""
_TAIL_BYTES = 1 << 20
"""Of each file, what its last line is looked for in."""
_STEP = re.compile(rb'\{"step":([0-9]{1,18}),')


class BoundedLog:
    """Takes lines. A full disk costs the figures, never the run; what a kill tore off stays a line of its own."""

    def __init__(self, path: Path, what: str) -> None:
        """Append to ``path``; ``what`` it holds is for messages."""
        self._path, self._what = path, what
        self._failed = False

    def append(self, line: bytes) -> None:
        """Append a line, with its newline."""
        if self._failed:
            return
        # Told once, and then kept no more: on a full disk every step would tell it.
        try:
            self._append(line)
        except OSError as error:
            self._failed = True
            _LOG.warning("%s are kept no more: %s: %s", self._what, self._path, error)

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # In this mode writes go to the end, wherever was sought for reading.
        with self._path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                # What a kill tore off stays a line of its own: with this one it would be one bad line.
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
        if size + len(line) > _MOST_BYTES:
            self._path.replace(self._path.with_name(self._path.name + ".1"))


def take_from(
    folder: Path, first: int, take: Callable[[bytes], None], stop: int | None = None
) -> int:
    """Hand on every whole line of a step from ``first`` on that ranks have appended; return the step behind the last.

    Args:
        folder: Of the ranks' files, each line of which begins with its step.
        first: The first step that is asked for.
        take: Takes a line. One that it raises KeyError, TypeError, ValueError or IndexError for is damaged: that is
            told, and it is passed over.
        stop: The first step that is not; of a run that went back the files tell of steps to come.
    """
    return max(
        (_take(path, file, first, take, stop) for path, file in opened_logs(folder)), default=first
    )


def _take(
    path: Path,
    lines: Iterable[bytes],
    first: int,
    take: Callable[[bytes], None],
    stop: int | None = None,
) -> int:
    """Hand on lines as ``take_from``."""
    behind = first
    for line in lines:
        # By its first bytes: of a long run few lines are asked for, and the others are not parsed.
        at = _STEP.match(line)
        if at is None or not line.endswith(b"\n"):
            continue
        step = int(at[1])
        if step < first or (stop is not None and step >= stop):
            continue
        try:
            take(line)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            _LOG.warning("%s: a damaged line is passed over: %r", path, error)
            continue
        behind = max(behind, step + 1)
    return behind


def last_told(folder: Path, since_s: float) -> int | None:
    """Return the highest step among the last lines of ranks that have appended since a time; ``None`` for none.

    Args:
        folder: Of the ranks' files.
        since_s: Seconds since 1970: of a run that went back, a file that was not written since tells of steps to come.
    """
    steps = list[int]()
    for _, file in opened_logs(folder):
        held = os.fstat(file.fileno())
        if held.st_mtime < since_s:
            continue
        file.seek(max(0, held.st_size - _TAIL_BYTES))
        *_, last = [None, *(_STEP.match(line) for line in file if line.endswith(b"\n"))]
        if last is not None:
            steps.append(int(last[1]))
    return max(steps, default=None)


class LinesSince:
    """Hands on lines that ranks appended since they were asked for last: each once, under whichever name it lies."""

    def __init__(self, folder: Path) -> None:
        """Begin with all that there is in the ranks' files of ``folder``."""
        self._folder = folder
        self._read_to: dict[tuple[int, int, bytes], int] = {}
        """Bytes of each file that were handed on, by its device, its number there, and its first line."""

    def take(self, first: int, take: Callable[[bytes], None]) -> None:
        """Hand on every whole line that is new, as ``take_from``; what is before ``first`` is passed over for good."""
        read_to: dict[tuple[int, int, bytes], int] = {}
        for path, file in opened_logs(self._folder):
            held = os.fstat(file.fileno())
            # A number of a file that is gone is given to another one; lines have their time, or a step at least.
            head = file.readline()
            if not head.endswith(b"\n"):
                continue
            key = held.st_dev, held.st_ino, head
            at = self._read_to.get(key, 0)
            file.seek(at if at <= held.st_size else 0)
            _take(path, self._whole(file), first, take)
            read_to[key] = file.tell()
        self._read_to = read_to

    @staticmethod
    def _whole(file: BinaryIO) -> Iterator[bytes]:
        """Yield lines up to the first that is not whole, and leave the file before it: the next look reads it."""
        while line := file.readline():
            if not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_CUR)
                return
            yield line


def logs_of_ranks(folder: Path) -> list[str]:
    """Return the names of the files of all ranks, sorted; of those that were moved aside, the ones that they had."""
    return sorted({path.name.removesuffix(".1") for path in folder.glob("rank-*.jsonl*")})


def opened_logs(
    folder: Path, names: Iterable[str] | None = None
) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield the files of ranks, open to be read, each once; ranks go on writing and moving them meanwhile.

    Args:
        folder: Of the ranks' files.
        names: Of files as ``logs_of_ranks`` gives them; all by default.
    """
    for path in (folder / name for name in (logs_of_ranks(folder) if names is None else names)):
        with ExitStack() as opened:
            files: list[tuple[Path, BinaryIO]] = []
            # The newer one first: what is moved in between is found again under the other name, and is no second file.
            for each in (path, path.with_name(f"{path.name}.1")):
                try:
                    file = opened.enter_context(each.open("rb"))
                except FileNotFoundError:
                    continue
                if not any(os.path.sameopenfile(file.fileno(), f.fileno()) for _, f in files):
                    files.append((each, file))
            yield from files
