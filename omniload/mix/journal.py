"""The journal: one small record per step, durable before the step's batch is handed out.

A differential checkpoint: a base state, then what each step changed. Folding the
records into the base gives the state before any step, so a run resumes from the last
record, and "what was in step 1234?" is answered by planning that step again.

The file is JSON lines. The first line is the base, each line ends in its own checksum::

    {"version": 1, "base": {...}}<TAB>xxh64
    {"step": 0, "revision": 0, "digest": "...", "drawn": {"web": [...]}, "carried": [...]}<TAB>xxh64

``drawn`` holds, for each source drawn from, the cursor afterwards (position, sub, token)
and what was drawn.

A torn last line, as a kill leaves it, is cut off; a damaged line before it is an
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

import orjson
import xxhash

from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject, require_version
from omniload.mix.pieces import PieceTable
from omniload.mix.state import Cursor, MixState

__all__ = ["JOURNAL_VERSION", "Journal", "StepRecord", "read_journal", "state_before"]

JOURNAL_VERSION = 1

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step changed."""

    step: int
    """The step."""
    revision: int
    """Revision of the mix it was drawn under."""
    digest: str
    """``StepPlan.membership_digest`` of its plan."""
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
            StateError: The record belongs to another step than ``state`` stands before.
        """
        if self.step != state.step:
            raise StateError(
                f"the journal has step {self.step} where step {state.step} was due; resume from a checkpoint"
            )
        idle = [(cursor, 0) for cursor in state.cursors_S]
        for s, change in self.drawn.items():
            idle[s] = change
        return replace(state, mix_revision=self.revision).after(
            cursors_S=[cursor for cursor, _ in idle],
            served_S=[served for _, served in idle],
            weights_S=weights_S,
            carried=self.carried,
        )

    def to_json(self, names: Sequence[str]) -> JsonObject:
        """Return the record as plain JSON, keyed by source name."""
        return {
            "step": self.step,
            "revision": self.revision,
            "digest": self.digest,
            "drawn": {names[s]: [*cursor, served] for s, (cursor, served) in self.drawn.items()},
            "carried": self.carried.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Json], names: Sequence[str]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            StateError: The record names a source that is not in ``names``, or is damaged.
        """
        number_of = {name: s for s, name in enumerate(names)}
        try:
            drawn: Mapping[str, tuple[int, int, int, int]] = record["drawn"]  # type: ignore[assignment]
            return cls(
                step=int(record["step"]),  # type: ignore[arg-type]
                revision=int(record["revision"]),  # type: ignore[arg-type]
                digest=str(record["digest"]),
                drawn={
                    number_of[name]: ((p, sub, at), served)
                    for name, (p, sub, at, served) in drawn.items()
                },
                carried=PieceTable.from_json(record["carried"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"a journal record is damaged or of another mix ({error!r})"
            ) from error


class Journal:
    """An open journal, appended to by one planner."""

    def __init__(self, path: Path, state: JsonObject) -> None:
        """Open a journal at ``path`` for a run that continues from ``state``.

        Records of earlier steps of the same mix stay where they are; those of ``state["step"]``
        and later belong to work that was lost and are cut off. A journal that does not lead up
        to ``state`` is moved aside. Memory does not grow with the journal.

        Raises:
            UnavailableError: The file cannot be written.
        """
        self.path = path
        kept = _leading_up(path, state)
        with _writing(path):
            if kept is None:
                kept = _begun(path, state)
            self._file: BinaryIO = path.open("r+b", buffering=0)
            self._end = self._cut_to(kept)

    def append(self, record: JsonObject) -> None:
        """Write one record and wait until it is on the disk.

        Raises:
            UnavailableError: It could not be written whole, as on a full disk; the file ends
                with the record before.
        """
        line = _line(record)
        with _writing(self.path):
            try:
                _write_whole(self._file, line, self._end)
                os.fsync(self._file.fileno())
            except OSError:
                # Should cutting fail too, the rest is a torn last line, and the next record is
                # written over it.
                with suppress(OSError):
                    self._file.truncate(self._end)
                raise
        self._end += len(line)

    def _cut_to(self, kept: int) -> int:
        """Make ``kept`` bytes, then a newline where a kill left it out, all of the file; return its size."""
        self._file.truncate(kept)
        if os.pread(self._file.fileno(), 1, kept - 1) != b"\n":
            _write_whole(self._file, b"\n", kept)
            kept += 1
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
        IntegrityError: A line before the last is damaged.
    """
    lines = _sound_lines(path)
    base = _base_in(path, next(lines, b""))
    return base, [orjson.loads(_text_of(line)) for line in lines]


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


def _leading_up(path: Path, state: JsonObject) -> int | None:
    """Return the bytes of the base and the records before ``state``, where the file leads up to it.

    A file that does not (another mix, a gap, damage) is moved aside, never overwritten.
    """
    if not path.exists():
        return None
    try:
        return _bytes_before(path, state)
    except (StateError, IntegrityError) as error:
        number = next(n for n in itertools.count(1) if not _aside(path, n).exists())
        _LOG.warning("%s is moved to %s: %s", path, _aside(path, number).name, error)
    path.rename(_aside(path, number))
    return None


def _bytes_before(path: Path, state: JsonObject) -> int:
    """Check every line, and add up those that come before ``state``; records are not parsed.

    Raises:
        StateError: The file does not lead up to ``state``.
        IntegrityError: A line before the last is damaged.
    """
    lines = _sound_lines(path)
    head = next(lines, b"")
    base, step = _base_in(path, head), state["step"]
    first = base.get("step")
    size, reached = len(head), first
    for line in lines:
        # The journal has no gap: the i-th record is that of the i-th step from the base.
        if isinstance(reached, int) and isinstance(step, int) and reached < step:
            size, reached = size + len(line), reached + 1
    if base.get("fingerprint") != state["fingerprint"] or reached != step:
        raise StateError(f"it does not lead up to step {step} of this mix")
    return size


def _begun(path: Path, state: JsonObject) -> int:
    """Write a journal of a base alone, whole or not at all; return its size."""
    partial = path.with_name(path.name + ".partial")
    head = _line({"version": JOURNAL_VERSION, "base": state})
    with partial.open("wb", buffering=0) as file:
        _write_whole(file, head, 0)
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)
    return len(head)


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.aside-{number}")


def _sync_folder(folder: Path) -> None:
    """Make a renaming durable: without it a power cut may bring the old file back, records appended or not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line(value: JsonObject) -> bytes:
    text = orjson.dumps(value)
    return text + b"\t" + xxhash.xxh64_hexdigest(text).encode() + b"\n"


def _text_of(line: bytes) -> bytes:
    return line.rpartition(b"\t")[0]


def _base_in(path: Path, line: bytes) -> JsonObject:
    """Return the base state, from the first line of a journal."""
    if not line:
        raise StateError(f"{path}: the journal is empty; resume from a checkpoint")
    head: JsonObject = orjson.loads(_text_of(line))
    require_version(head, JOURNAL_VERSION, of="journal")
    base = head["base"]
    assert isinstance(base, dict)
    return base


def _sound_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that match their checksums, up to one torn by a kill.

    Raises:
        StateError: There is no journal.
        IntegrityError: A line before the last is damaged.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise StateError(f"{path}: no journal; give the folder of a run") from None
    with file:
        for number, line in enumerate(file, start=1):
            text, _, checksum = line.rstrip(b"\n").rpartition(b"\t")
            if xxhash.xxh64_hexdigest(text).encode() != checksum:
                if not file.read(1):
                    return  # torn by a kill in mid-write; its batch was never handed out
                raise IntegrityError(
                    f"{path}:{number}: the line does not match its checksum {checksum[:16]!r}; "
                    "the journal is damaged, resume from a checkpoint"
                )
            yield line


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
def _writing(path: Path) -> Iterator[None]:
    """Say what went wrong, and what room there is: mostly it is a full disk."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"{path}: cannot be written: {error}; {shutil.disk_usage(path.parent).free} bytes are free there; "
            "make room and resume"
        ) from error
