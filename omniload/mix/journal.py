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

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
import xxhash

from omniload.base.errors import IntegrityError, StateError
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

        Records of earlier steps of the same mix stay; those of ``state["step"]`` and later
        belong to work that was lost and are dropped. A journal that does not lead up to
        ``state`` is moved aside. The new file takes the old one's place in one move, so a
        kill leaves one or the other.
        """
        base, records = _history(path, state)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            file.write(_line({"version": JOURNAL_VERSION, "base": base}))
            file.writelines(_line(record) for record in records)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def append(self, record: JsonObject) -> None:
        """Write one record and wait until it is on the disk."""
        self._file.write(_line(record))
        os.fsync(self._file.fileno())

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
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise StateError(f"{path}: no journal; give the folder of a run") from None
    values = list(_values(path, lines))
    if not values:
        raise StateError(f"{path}: the journal is empty; resume from a checkpoint")
    head = values[0]
    require_version(head, JOURNAL_VERSION, of="journal")
    base = head["base"]
    assert isinstance(base, dict)
    return base, values[1:]


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


def _history(path: Path, state: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
    """Return the base and the records before ``state``, where the file at ``path`` leads up to it.

    A file that does not (another mix, a gap, damage) is moved aside, never overwritten.
    """
    if not path.exists():
        return state, []
    try:
        base, records = read_journal(path)
        first, step = base.get("step"), state["step"]
        if (
            base.get("fingerprint") == state["fingerprint"]
            and isinstance(first, int)
            and isinstance(step, int)
            and first <= step <= first + len(records)
        ):
            return base, records[: step - first]
        reason = f"it does not lead up to step {step} of this mix"
    except (StateError, IntegrityError) as error:
        reason = str(error)
    number = next(n for n in itertools.count(1) if not _aside(path, n).exists())
    _LOG.warning("%s is moved to %s: %s", path, _aside(path, number).name, reason)
    path.rename(_aside(path, number))
    return state, []


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


def _values(path: Path, lines: Sequence[bytes]) -> Iterator[JsonObject]:
    for number, line in enumerate(lines, start=1):
        text, _, checksum = line.rpartition(b"\t")
        if xxhash.xxh64_hexdigest(text).encode() != checksum:
            if number == len(lines):
                return  # torn by a kill in mid-write; its batch was never handed out
            raise IntegrityError(
                f"{path}:{number}: the line does not match its checksum {checksum[:16]!r}; "
                "the journal is damaged, resume from a checkpoint"
            )
        yield orjson.loads(text)
