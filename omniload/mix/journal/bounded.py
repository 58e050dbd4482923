"""Files of figures that a trainer reports: appended lines, of bounded size, and never at the cost of the run."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from omniload.base.log import get_logger

__all__ = [
    "BoundedLog",
    "LinesSince",
    "last_lines",
    "last_told",
    "logs_of_ranks",
    "opened_logs",
    "take_from",
]

_LOG = get_logger(__name__)
_MOST_BYTES = 32 << 20
"""Largest size of one file; the previous file is kept as well."""
_TAIL_BYTES = 1 << 20
"""Size of the end of each file in which its last lines are searched."""
_STEP = re.compile(rb'\{"step":([0-9]{1,18}),(?:"at":([0-9]{1,12}(?:\.[0-9]+)?),)?')


class BoundedLog:
    """Appends lines. A full disk costs the figures, never the run; a line torn by a kill stays a line of its own."""

    def __init__(self, path: Path, what: str) -> None:
        """Append to ``path``; ``what`` names the content in messages."""
        self._path, self._what = path, what
        self._failed = False

    def append(self, line: bytes) -> None:
        """Append a line, with its newline."""
        if self._failed:
            return
        # Reported once, after which nothing more is kept, because on a full disk every step would report it.
        try:
            self._append(line)
        except OSError as error:
            self._failed = True
            _LOG.warning("%s are kept no more: %s: %s", self._what, self._path, error)

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # In this mode writes go to the end, wherever the position for reading is.
        with self._path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                # A line torn by a kill is ended first; otherwise both lines would become one bad line.
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
        if size + len(line) > _MOST_BYTES:
            self._path.replace(self._path.with_name(self._path.name + ".1"))


def take_from(
    folder: Path, first: int, take: Callable[[bytes], None], stop: int | None = None
) -> int:
    """Pass on every whole line of a step from ``first`` on; return the step after the last one passed on.

    Args:
        folder: Folder of the ranks' files, each line of which begins with its step.
        first: First step to read.
        take: Receives a line. If it raises KeyError, TypeError, ValueError or IndexError, the line is damaged; a
            warning is logged and the line is skipped.
        stop: First step not to read: if a run went back, the files contain steps that are still to come.
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
    """Pass on lines, as in ``take_from``."""
    behind = first
    for line in lines:
        # Only the first bytes are matched, because few lines of a long run are wanted and the others need no parsing.
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
    """Return the highest step among the last lines of ranks that appended since a time; ``None`` if there are none.

    Args:
        folder: Folder of the ranks' files.
        since_s: Seconds since 1970. If a run went back, files that were not written since then name steps to come.
    """
    steps = list[int]()
    for _, file in opened_logs(folder):
        held = os.fstat(file.fileno())
        *_, last = [None, *map(_STEP.match, last_lines(file)[0])]
        # Without a time in the line, the file's own time is used, which goes back with its host's clock.
        if last is not None and float(last[2] or held.st_mtime) >= since_s:
            steps.append(int(last[1]))
    return max(steps, default=None)


def last_lines(file: BinaryIO, room: int = _TAIL_BYTES) -> tuple[list[bytes], int]:
    """Return the last whole lines of a file that fit into ``room`` bytes, and the number of bytes left."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - room)
    # From one byte before: if that byte is a newline, the first line is whole.
    file.seek(max(0, start - 1))
    latest = file.read(size - max(0, start - 1))
    if start:
        latest = latest[latest.find(b"\n") + 1 :]
    lines = [line for line in latest.splitlines(keepends=True) if line.endswith(b"\n")]
    return lines, room - min(size, room)


class LinesSince:
    """Passes on the lines that ranks appended since the last call, each line once, even if its file is renamed."""

    def __init__(self, folder: Path) -> None:
        """Begin with everything in the ranks' files of ``folder``."""
        self._folder = folder
        self._read_to: dict[tuple[int, int, bytes], int] = {}
        """Number of bytes passed on of each file, by its device, its inode, and its first line."""

    def take(self, first: int, take: Callable[[bytes], None]) -> None:
        """Pass on every new whole line, as in ``take_from``; lines before ``first`` are skipped for good."""
        read_to: dict[tuple[int, int, bytes], int] = {}
        for path, file in opened_logs(self._folder):
            held = os.fstat(file.fileno())
            # The inode of a removed file may be reused. First lines differ, because lines contain their time, or at
            # least a step.
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
        """Yield lines up to the first incomplete line, and leave the file before it, so that the next call reads it."""
        while line := file.readline():
            if not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_CUR)
                return
            yield line


def logs_of_ranks(folder: Path) -> list[str]:
    """Return the names of the files of all ranks, sorted; for a file that was moved aside, its original name."""
    return sorted({path.name.removesuffix(".1") for path in folder.glob("rank-*.jsonl*")})


def opened_logs(
    folder: Path, names: Iterable[str] | None = None
) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield the files of ranks, open for reading, each once; ranks may write and move them meanwhile.

    Args:
        folder: Folder of the ranks' files.
        names: Names of files from ``logs_of_ranks``; all by default.
    """
    for path in (folder / name for name in (logs_of_ranks(folder) if names is None else names)):
        with ExitStack() as opened:
            files: list[tuple[Path, BinaryIO]] = []
            # The newer file first: if it is moved in between, it is found under the other name too and not counted
            # twice.
            for each in (path, path.with_name(f"{path.name}.1")):
                try:
                    file = opened.enter_context(each.open("rb"))
                except FileNotFoundError:
                    continue
                if not any(os.path.sameopenfile(file.fileno(), f.fileno()) for _, f in files):
                    files.append((each, file))
            yield from files
