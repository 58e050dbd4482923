"""The file of a journal: appended to by one planner, continued by the next.

A differential checkpoint: a base state, then what each step changed. Folding the
records into the base gives the state before any step, so a run resumes from the last
record, and "what was in step 1234?" is answered by planning that step again.

The file is JSON lines. The first line is the base, each line ends in a checksum of the
checksum before it and of its own text, so that no line can go missing, move, or stand twice::

    {"version": 3, "base": {...}, "after": "..."}<TAB>xxh64
    {"step": 0, "revision": 0, "digest": "...", "after": "...", "drawn": {"web": [...]}, "carried": [...]}<TAB>xxh64
    ...
    {"kind": "base", "step": 1024, "state": {...}, "after": "..."}<TAB>xxh64
    {"step": 1024, ...}<TAB>xxh64
    {"kind": "world", "step": 1020, "generation": 1, "sizes": {"pp": 1, "dp": 3, "cp": 1, "tp": 1}}<TAB>xxh64

``drawn`` holds, for each source drawn from, the cursor afterwards (position, sub, token)
and what was drawn; ``after`` is ``MixState.digest`` of the state that the line leads to. A missing *last*
line shows only in what outlives it: the state that a run resumes from says how many steps there were.
A base now and then lets whoever needs the last steps only read from there. A world says which ranks steps were
placed on, from its step on: none does for those that the plane was opened for, unless there was another before.

A torn last line, as a kill leaves it, is cut off; any other that does not fit is an
``IntegrityError``.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import orjson

from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject
from omniload.base.units import format_bytes
from omniload.mix.journal.lines import (
    BASE,
    JOURNAL_VERSION,
    WORLD,
    JournalLine,
    Since,
    base_of,
    chained,
    line_of,
    sound_lines,
)
from omniload.mix.journal.reading import Tail

__all__ = ["Journal"]

_LOG = get_logger(__name__)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class _Head:
    """The part of a journal that is kept."""

    size_bytes: int
    checksum: bytes
    """Of its last line."""
    digest: Json
    """``MixState.digest`` of the state that it leads to."""
    has_worlds: bool = False
    """Whether ranks are noted in it."""


class Journal:
    """An open journal, appended to by one planner."""

    def __init__(self, path: Path, head: _Head, *, durable: bool = True) -> None:
        """Open a file whose first lines are those of ``head``; what is behind them is cut off."""
        self.path, self._durable = path, durable
        self.has_worlds = head.has_worlds
        """Whether ranks are noted in it: those that go on are noted as well."""
        with _writing(path, 0):
            self._file: BinaryIO = path.open("r+b", buffering=0)
            self._last = head.checksum
            self._end = self._cut_to(head.size_bytes)
        self._known: dict[int, bytes] = {}
        self._base_step = -1
        self._base: Since | None = None

    @classmethod
    def leading_up(
        cls, path: Path, state: JsonObject, digest: str, *, durable: bool = True
    ) -> Self:
        """Open a journal at ``path`` for a run that continues from ``state``.

        Records of earlier steps of the same mix stay where they are; those of ``state["step"]``
        and later belong to work that was lost and are cut off. A journal that does not lead up
        to ``state`` is moved aside. Memory does not grow with the journal.

        Args:
            path: The file.
            state: State before the next step.
            digest: ``MixState.digest`` of ``state``.
            durable: Whether what is appended survives a power cut, and every record is kept. Without that it survives
                the end of the process that wrote it, and records that nobody can ask for are dropped in time.

        Raises:
            StateError: The journal leads up to this step of this mix, and to another state.
            StateError: The disk, or a quota, is full.
            UnavailableError: The file cannot be written.
        """
        head = _leading_up(path, state, digest)
        if head is None:
            with _writing(path, len(bytes(_first_line(state, digest)))):
                head = _begun(path, state, digest)
        return cls(path, head, durable=durable)

    @classmethod
    def taken_over(cls, path: Path, tail: Tail, step: int, *, durable: bool = True) -> Self:
        """Open the journal of a planner that was lost, for one that plans from ``step`` on again.

        What was recorded stays. Steps that are planned again must be what their records say.

        Args:
            path: The file.
            tail: Its end.
            step: First step that is planned again.
            durable: As for ``leading_up``.

        Raises:
            StateError: The disk, or a quota, is full.
            UnavailableError: The file cannot be written.
        """
        size = tail.since.offset + sum(len(bytes(line)) for line in tail.lines)
        journal = cls(path, _Head(size, tail.lines[-1].checksum, ""), durable=durable)
        journal._known = dict(tail.texts_from(step))
        journal._base_step = tail.next_step
        return journal

    def append(self, record: JsonObject) -> None:
        """Write the record of a step and wait until it is on the disk; one that is there already is compared.

        Raises:
            IntegrityError: The step was recorded by a planner that was lost, as another one.
            StateError: The disk, or a quota, is full; the file ends with the record before.
            UnavailableError: It could not be written whole for another reason; likewise.
        """
        step = record["step"]
        assert isinstance(step, int), "the planner made it"
        known = self._known.pop(step, None)
        if known is None:
            self._append(line_of(record, self._last))
        elif known != orjson.dumps(record):
            raise IntegrityError(
                f"{self.path}: step {step} planned again has digest {record['digest']}, not the one of "
                f"its record ({orjson.loads(known).get('digest')!r:.40}): its data changed meanwhile; "
                "put back the data of before and start again from the last checkpoint"
            )

    def append_base(self, state: JsonObject, digest: str) -> None:
        """Write the state before the next step, for whoever reads from there on.

        Raises:
            StateError: As for ``append``.
            UnavailableError: As for ``append``.
        """
        step = state["step"]
        assert isinstance(step, int), "the planner made it"
        if step <= self._base_step:
            return  # it was written before, or its place is taken
        before, self._base_step = self._base, step
        note: JsonObject = {"kind": BASE, "step": step, "state": state, "after": digest}
        self._base = Since(self._end, self._last)
        self._append(line_of(note, self._last))
        if before is not None and not self._durable:
            self._drop(before)

    def append_world(self, world: JsonObject) -> None:
        """Write which ranks there are from a step on: what ``World.to_json`` gives.

        Raises:
            StateError: As for ``append``.
            UnavailableError: As for ``append``.
        """
        self._append(line_of({"kind": WORLD, **world}, self._last))

    def _append(self, line: JournalLine) -> None:
        content = bytes(line)
        with _writing(self.path, len(content)):
            try:
                _write_whole(self._file, content, self._end)
                if self._durable:
                    os.fsync(self._file.fileno())
            except OSError:
                # Should cutting fail too, the rest is a torn last line, and the next record is
                # written over it.
                with suppress(OSError):
                    self._file.truncate(self._end)
                raise
        self._end, self._last = self._end + len(content), line.checksum

    def _drop(self, since: Since) -> None:
        """Begin the file anew with the base at ``since``; no planner takes over from further back."""
        base, *lines = sound_lines(self.path, since)
        state, _ = base_of(base)
        written = [_first_line(state, str(base.parsed()["after"]))]
        for line in lines:
            written.append(chained(line.text, written[-1].checksum))
        content = b"".join(map(bytes, written))
        partial = self.path.with_name(self.path.name + ".partial")
        with _writing(self.path, len(content)):
            partial.write_bytes(content)
            partial.replace(self.path)
            self._file.close()
            self._file = self.path.open("r+b", buffering=0)
        self._end, self._last = len(content), written[-1].checksum
        last = written[-1]
        self._base = Since(self._end - len(bytes(last)), written[-2].checksum)

    def _cut_to(self, kept: int) -> int:
        """Make ``kept`` bytes, their newline too where a kill left it out, all of the file; return their number."""
        _write_whole(self._file, b"\n", kept - 1)
        self._file.truncate(kept)
        os.fsync(self._file.fileno())
        return kept

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _leading_up(path: Path, state: JsonObject, digest: str) -> _Head | None:
    """Return the base and the records before ``state``, where the file leads up to it.

    A file that does not (another mix, a gap, damage) is moved aside, never overwritten.
    """
    if not path.exists():
        return None
    try:
        found = _head_before(path, state)
    except (StateError, IntegrityError) as error:
        number = next(n for n in itertools.count(1) if not _aside(path, n).exists())
        _LOG.warning("%s is moved to %s: %s", path, _aside(path, number).name, error)
        path.rename(_aside(path, number))
        return None
    if found.digest != digest:
        # One of both was tampered with, or this release draws otherwise; which of them cannot be told here.
        raise StateError(
            f"the state before step {state['step']} has digest {digest}, {path} says {found.digest!r:.40}: "
            "it is not the state that this run reached; resume from another checkpoint, or move the journal away"
        )
    return found


def _head_before(path: Path, state: JsonObject) -> _Head:
    """Check every line, and add up those that come before ``state``; records are not parsed.

    Raises:
        StateError: The file does not lead up to ``state``.
        IntegrityError: A line is damaged, or missing, or where it does not belong.
    """
    lines = sound_lines(path)
    first = next(lines)
    base, reached = base_of(first)
    step = state["step"]
    assert isinstance(step, int), "the planner wrote it"
    if not _is_of(base.get("fingerprint"), state["fingerprint"]):
        raise StateError("it is of another mix or other data")
    if reached > step:
        raise StateError(f"it starts at step {reached}, the run goes on from step {step}")
    size, last, record, has_worlds = len(bytes(first)), first, first, False
    for line in lines:
        if reached < step or (reached == step and line.is_note):
            size, last = size + len(bytes(line)), line
            has_worlds |= line.is_world
        if not line.is_note:  # what follows is checked, and cut off
            record = line if reached < step else record
            reached += 1
    if reached < step:
        raise StateError(
            f"it ends before step {reached}, the run goes on from step {step}: its last lines are missing"
        )
    return _Head(size, last.checksum, record.parsed().get("after"), has_worlds)


def _is_of(begun: Json, now: Json) -> bool:
    """Tell whether a journal that began with one fingerprint may go on with another: edits may have added sources."""
    return isinstance(begun, dict) and isinstance(now, dict) and begun.items() <= now.items()


def _begun(path: Path, state: JsonObject, digest: str) -> _Head:
    """Write a journal of a base alone, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    head = _first_line(state, digest)
    with partial.open("wb", buffering=0) as file:
        _write_whole(file, bytes(head), 0)
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)
    return _Head(len(bytes(head)), head.checksum, digest)


def _first_line(state: JsonObject, digest: str) -> JournalLine:
    return line_of({"version": JOURNAL_VERSION, "base": state, "after": digest}, b"")


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.aside-{number}")


def _sync_folder(folder: Path) -> None:
    """Make a renaming durable: without it a power cut may bring the old file back, records appended or not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(file: BinaryIO, content: bytes, offset: int) -> None:
    """Write all of ``content`` at ``offset``: a single write may take a part, as a disk fills up.

    Raises:
        OSError: It cannot be written whole.
    """
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file.fileno(), rest, offset)
        if not written:
            raise OSError(errno.ENOSPC, f"nothing was written of {len(rest)} bytes")
        rest, offset = rest[written:], offset + written


@contextmanager
def _writing(path: Path, need: int) -> Iterator[None]:
    """Tell what went wrong. A full disk is no outage: a restart would train up to the same record.

    Raises:
        StateError: The disk, or a quota, is full; names what ``need`` bytes found.
        UnavailableError: The file cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        if error.errno in _FULL:
            raise StateError(
                f"{path}: needs {need} bytes, {free} bytes ({format_bytes(free)}) are free there: "
                f"{error.strerror}; make room, or raise the quota or the limit of file sizes, and resume"
            ) from error
        raise UnavailableError(
            f"{path}: cannot be written: {error}; {free} bytes are free there; resume once it can be"
        ) from error
