"""The journal: one small record per step, durable before the step's batch is handed out.

A differential checkpoint: a base state, then what each step changed. Folding the
records into the base gives the state before any step, so a run resumes from the last
record, and "what was in step 1234?" is answered by planning that step again.

The file is JSON lines. The first line is the base, each line ends in a checksum of the
checksum before it and of its own text, so that no line can go missing, move, or stand twice::

    {"version": 2, "base": {...}, "after": "..."}<TAB>xxh64
    {"step": 0, "revision": 0, "digest": "...", "after": "...", "drawn": {"web": [...]}, "carried": [...]}<TAB>xxh64

``drawn`` holds, for each source drawn from, the cursor afterwards (position, sub, token)
and what was drawn; ``after`` is ``MixState.digest`` of the state that the line leads to. A missing *last*
line shows only in what outlives it: the state that a run resumes from says how many steps there were.

A torn last line, as a kill leaves it, is cut off; any other that does not fit is an
``IntegrityError``.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject, whole_number
from omniload.base.units import format_bytes
from omniload.mix.journal_lines import (
    JOURNAL_VERSION,
    JournalLine,
    base_of,
    line_of,
    sound_lines,
)
from omniload.mix.pieces import PieceTable
from omniload.mix.state import COUNT_LIMIT, Cursor, MixState, cursor_of

__all__ = ["JOURNAL_VERSION", "Journal", "StepRecord", "read_journal", "state_before"]

_LOG = get_logger(__name__)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step changed."""

    step: int
    """The step."""
    revision: int
    """Revision of the mix it was drawn under."""
    digest: str
    """``StepPlan.membership_digest`` of its plan."""
    after: str
    """``MixState.digest`` of the state after it."""
    drawn: Mapping[int, tuple[Cursor, int]]
    """For each source drawn from: its cursor afterwards, and what was drawn, in the unit of the weights."""
    carried: PieceTable
    """All pieces carried to the next step."""

    @classmethod
    def between(cls, before: MixState, after: MixState, digest: str) -> Self:
        """Return the record that leads from one state to the next."""
        return cls(
            step=before.step,
            revision=after.mix_revision,
            digest=digest,
            after=after.digest(),
            drawn={
                s: (after.cursors_S[s], after.drawn_S[s] - before.drawn_S[s])
                for s in range(len(after.cursors_S))
                if after.cursors_S[s] != before.cursors_S[s]
            },
            carried=after.carried,
        )

    def applied_to(self, state: MixState, weights_S: Sequence[int]) -> MixState:
        """Return the state after this step; ``weights_S`` are the integer weights at it.

        Raises:
            StateError: The record belongs to another step than ``state`` stands before, or leads to
                another state than it did when it was written.
        """
        if self.step != state.step:
            raise StateError(
                f"the journal has step {self.step} where step {state.step} was due; resume from a checkpoint"
            )
        idle = [(cursor, 0) for cursor in state.cursors_S]
        for s, change in self.drawn.items():
            idle[s] = change
        after = replace(state, mix_revision=self.revision).after(
            cursors_S=[cursor for cursor, _ in idle],
            served_S=[served for _, served in idle],
            weights_S=weights_S,
            carried=self.carried,
        )
        if (found := after.digest()) != self.after:
            raise StateError(
                f"the state after step {self.step} has digest {found}, its journal says {self.after}: "
                "another release, another mix or another state; resume from a checkpoint"
            )
        return after

    def to_json(self, names: Sequence[str]) -> JsonObject:
        """Return the record as plain JSON, keyed by source name."""
        return {
            "step": self.step,
            "revision": self.revision,
            "digest": self.digest,
            "after": self.after,
            "drawn": {names[s]: [*cursor, served] for s, (cursor, served) in self.drawn.items()},
            "carried": self.carried.to_json(names),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Json], names: Sequence[str]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            StateError: The record names a source that is not in ``names``, or is damaged.
        """
        number_of = {name: s for s, name in enumerate(names)}
        try:
            drawn: Mapping[str, list[Json]] = record["drawn"]  # type: ignore[assignment]
            return cls(
                step=whole_number(record["step"], below=COUNT_LIMIT),
                revision=whole_number(record["revision"], below=COUNT_LIMIT),
                digest=str(record["digest"]),
                after=str(record["after"]),
                drawn={
                    number_of[name]: (cursor_of(cursor), whole_number(served, below=COUNT_LIMIT))
                    for name, (*cursor, served) in drawn.items()
                },
                carried=PieceTable.from_json(record["carried"], names),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"a journal record is damaged or of another mix ({error!r})"
            ) from error


class Journal:
    """An open journal, appended to by one planner."""

    def __init__(self, path: Path, state: JsonObject, digest: str) -> None:
        """Open a journal at ``path`` for a run that continues from ``state``.

        Records of earlier steps of the same mix stay where they are; those of ``state["step"]``
        and later belong to work that was lost and are cut off. A journal that does not lead up
        to ``state`` is moved aside. Memory does not grow with the journal.

        Args:
            path: The file.
            state: State before the next step.
            digest: ``MixState.digest`` of ``state``.

        Raises:
            StateError: The journal leads up to this step of this mix, and to another state.
            StateError: The disk, or a quota, is full.
            UnavailableError: The file cannot be written.
        """
        self.path = path
        head = _leading_up(path, state, digest)
        with _writing(path, 0 if head is not None else len(bytes(_first_line(state, digest)))):
            if head is None:
                head = _begun(path, state, digest)
            self._file: BinaryIO = path.open("r+b", buffering=0)
            self._last = head.checksum
            self._end = self._cut_to(head.size_bytes)

    def append(self, record: JsonObject) -> None:
        """Write one record and wait until it is on the disk.

        Raises:
            StateError: The disk, or a quota, is full; the file ends with the record before.
            UnavailableError: It could not be written whole for another reason; likewise.
        """
        line = line_of(record, self._last)
        content = bytes(line)
        with _writing(self.path, len(content)):
            try:
                _write_whole(self._file, content, self._end)
                os.fsync(self._file.fileno())
            except OSError:
                # Should cutting fail too, the rest is a torn last line, and the next record is
                # written over it.
                with suppress(OSError):
                    self._file.truncate(self._end)
                raise
        self._end, self._last = self._end + len(content), line.checksum

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


def read_journal(path: Path) -> tuple[JsonObject, list[JsonObject]]:
    """Return the base state and the records of a journal.

    Raises:
        StateError: There is no journal, or it has another version.
        IntegrityError: A line is damaged, or missing, or where it does not belong.
    """
    lines = sound_lines(path)
    base, _ = base_of(next(lines))
    return base, [line.parsed() for line in lines]


def state_before(
    step: int,
    base: MixState,
    records: Sequence[StepRecord],
    weights_at_step: Callable[[int], Sequence[int]],
) -> MixState:
    """Fold records into ``base`` until ``step`` is next.

    Raises:
        StateError: The journal does not reach ``step``, or starts after it.
    """
    state = base
    for record in records:
        if state.step == step:
            break
        state = record.applied_to(state, weights_at_step(record.step))
    if state.step != step:
        raise StateError(
            f"the journal covers steps {base.step} to {base.step + len(records)}, step {step} is outside; "
            "choose a step within"
        )
    return state


@dataclass(frozen=True, slots=True)
class _Head:
    """The part of a journal that is kept."""

    size_bytes: int
    checksum: bytes
    """Of its last line."""
    digest: Json
    """``MixState.digest`` of the state that it leads to."""


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
    if base.get("fingerprint") != state["fingerprint"]:
        raise StateError("it is of another mix or other data")
    if reached > step:
        raise StateError(f"it starts at step {reached}, the run goes on from step {step}")
    size, last = len(bytes(first)), first
    for line in lines:
        if reached < step:  # what follows is checked, and cut off
            size, last, reached = size + len(bytes(line)), line, reached + 1
    if reached < step:
        raise StateError(
            f"it ends before step {reached}, the run goes on from step {step}: its last lines are missing"
        )
    return _Head(size, last.checksum, last.parsed().get("after"))


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
