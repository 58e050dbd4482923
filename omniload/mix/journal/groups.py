"""Decisions on groups of answers: ``groups.jsonl`` in the run's folder, with a line for each batch; and their sums.

::

    {"version": 1, "batch": 3, "groups": 64, "surplus": "carry",
     "rounds": [{"step": 7, "source": [0, 1], "position": [31, 7], "sub": [0, 0], "verdicts": "kw"}],
     "answers": {"0": [8, 3], "1": [8, 0]}, "digest": "5f...", "blake2b": "c0..."}

``verdicts`` has a letter for each prompt of a round: kept, all right, or all wrong. ``answers`` counts the answers of
each source, and the right ones. Sources have their numbers in the run.

A batch is durable here before it is handed out, so a run can be replayed without a model and without rewards.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError, StateError, system_refusals
from omniload.base.log import get_logger
from omniload.base.reading import open_file
from omniload.base.state import JsonObject, require_version, sealed, unsealed, whole_number
from omniload.base.writing import sync_folder
from omniload.mix.journal.storage import FileStorage

__all__ = [
    "GROUPS_NAME",
    "Answers",
    "BatchDecision",
    "GroupJournal",
    "GroupProgress",
    "RoundDecision",
    "SourceGroups",
    "Surplus",
    "answers_json",
    "answers_of",
    "decision_of",
    "group_progress",
]

_LOG = get_logger(__name__)
GROUPS_NAME = "groups.jsonl"
VERSION = 1
Surplus = Literal["carry", "drop"]
"""Treatment of groups beyond those of a batch: they begin the next batch, or are left out."""
_LETTERS = "krw"
# As orjson writes a line. Batches that are not asked for are skipped by these first bytes.
_BATCH = re.compile(rb'\{"version":1,"batch":([0-9]{1,18}),')
_LARGEST_LINE_BYTES = 1 << 28
_LIMIT = 1 << 62
_KEY = ("source", "position", "sub")
_VERDICTS = ("differing", "all_right", "all_wrong")
"""Verdicts in the order of their numbers in a decision."""


class Answers(NamedTuple):
    """Answers of a source in some rounds."""

    answers: int
    right: int
    """Number of right answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """The verdicts on the prompts of one step."""

    step: int
    keys_N3: NDArray[np.int64]
    """Source, position and sub of each prompt, in the order of their groups."""
    verdicts_N: NDArray[np.int8]
    """0 kept, 1 all right, 2 all wrong."""

    def as_json(self) -> JsonObject:
        """Return the decision as JSON: columns of keys, and a letter for each verdict."""
        columns = zip(_KEY, self.keys_N3.T, strict=True)
        return {
            "step": self.step,
            **{name: column.tolist() for name, column in columns},
            "verdicts": "".join(_LETTERS[verdict] for verdict in self.verdicts_N.tolist()),
        }

    @classmethod
    def of(cls, found: Any) -> Self:  # noqa: ANN401 -- JSON of another process
        """Read the output of ``as_json``.

        Raises:
            KeyError: A part is missing.
            TypeError: A part is of another type.
            ValueError: A part is out of its range.
        """
        verdicts = found["verdicts"]
        columns = [_whole_numbers(found[name]) for name in _KEY]
        if any(len(column) != len(verdicts) or (column < 0).any() for column in columns):
            raise ValueError(f"a round has {len(verdicts)} verdicts, and keys that are not theirs")
        return cls(
            step=whole_number(found["step"], below=_LIMIT),
            keys_N3=np.column_stack(columns),
            verdicts_N=np.array([_LETTERS.index(letter) for letter in verdicts], np.int8),
        )


def _whole_numbers(found: Any) -> NDArray[np.int64]:  # noqa: ANN401 -- JSON of another process
    column = np.array(found).reshape(-1)
    # Checked by type, because a conversion to integers would truncate 0.5 to 0, which is another source.
    if len(column) and column.dtype.kind != "i":
        raise ValueError(f"a column of keys is of type {column.dtype}, not of whole numbers")
    return column.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """How the groups of a batch came about."""

    batch: int
    groups: int
    """Number of groups."""
    surplus: Surplus
    rounds: tuple[RoundDecision, ...]
    """Steps that were drawn for the batch, in order; empty if enough groups were waiting."""
    digest: str
    """Digest of the keys and tokens of its prompts, in order."""
    answers: Mapping[int, Answers] = field(default_factory=dict)
    """Answers of these rounds, by number of the source."""

    def line(self) -> bytes:
        """Return the line for the journal."""
        content: JsonObject = {
            "version": VERSION,
            "batch": self.batch,
            "groups": self.groups,
            "surplus": self.surplus,
            "rounds": [each.as_json() for each in self.rounds],
            "answers": answers_json(self.answers),
            "digest": self.digest,
        }
        return orjson.dumps(sealed(content), option=orjson.OPT_APPEND_NEWLINE)


def answers_json(answers: Mapping[int, Answers]) -> JsonObject:
    """Return answers by source as JSON."""
    return {str(source): list(found) for source, found in answers.items()}


def answers_of(found: Any) -> dict[int, Answers]:  # noqa: ANN401 -- JSON of another process
    """Read the output of ``answers_json``; raises the errors of ``RoundDecision.of``."""
    read: dict[int, Answers] = {}
    for source, (answers, right) in found.items():
        most = whole_number(answers, below=_LIMIT)
        read[int(source)] = Answers(most, whole_number(right, below=most + 1))
    return read


def decision_of(line: bytes, where: str) -> BatchDecision:
    """Read a line.

    Args:
        line: A line as from ``BatchDecision.line``.
        where: Place of the line, for messages.

    Raises:
        StateError: The line is of another version.
        IntegrityError: The line is damaged.
    """
    try:
        held = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _damaged(where, error) from error
    if not isinstance(held, dict):
        raise _damaged(where, TypeError(f"it is of type {type(held).__name__}"))
    require_version(held, VERSION, of=f"{where}: groups")
    try:
        content: dict[str, Any] = unsealed(held, of="it")
        surplus = content["surplus"]
        if surplus not in ("carry", "drop"):
            raise ValueError(f"surplus is {surplus!r:.40}")
        return BatchDecision(
            batch=whole_number(content["batch"], below=_LIMIT),
            groups=whole_number(content["groups"], least=1, below=_LIMIT),
            surplus=surplus,
            rounds=tuple(map(RoundDecision.of, content["rounds"])),
            digest=str(content["digest"]),
            answers=answers_of(content["answers"]),
        )
    except (
        *(KeyError, TypeError, ValueError, AttributeError, OverflowError),
        StateError,  # the digest does not fit
    ) as error:
        raise _damaged(where, error) from error


def _damaged(where: str, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"{where}: the line of a batch of groups is damaged ({error!r:.160}); resume from a checkpoint of a batch "
        "before it, which writes it anew"
    )


class GroupJournal:
    """The decisions of a run, as written and read by one process."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / GROUPS_NAME
        self._next: int | None = None
        """The batch after the last line, once this process has read it."""
        self._is_mine = False
        """Whether this process wrote the last lines."""

    @system_refusals("the decisions on groups")
    def append(self, decision: BatchDecision) -> None:
        """Save a decision durably; lines of the same batch and later belong to lost work and are removed.

        Lines are moved aside in two cases: if this process begins at batch 0 and another process wrote them, or if
        they do not lead up to the batch. Only the model of that time could decide these batches again.

        Raises:
            StateError: The line would be longer than any line that can be read.
            OmniloadError: The file cannot be written.
        """
        line = decision.line()
        if len(line) > _LARGEST_LINE_BYTES:
            raise StateError(
                f"batch {decision.batch} took {len(decision.rounds)} rounds, a line of {len(line)} bytes, more than "
                f"{_LARGEST_LINE_BYTES}; ask for fewer groups or rounds"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Read once, and again after a failure. A run that continues in order reads nothing.
        if self._next != decision.batch:
            self._cut_before(decision.batch)
            self._is_mine = True
        # Unknown until all is done: after an error or Ctrl-C, half of the line or the whole line may be there.
        is_first, self._next = self._next is None, None
        with self._path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if is_first:  # the name is new, or a killed process did not make it durable
            sync_folder(self._path.parent)
        self._next = decision.batch + 1

    def every(self) -> Iterator[BatchDecision]:
        """Yield all decisions from the first one in the file; raises the errors of ``since``."""
        return self._from(0, None)

    def since(self, batch: int) -> Iterator[BatchDecision]:
        """Yield the decisions from a batch on, up to the end or to a line torn by a kill.

        Raises:
            StateError: There are no decisions, or a line is missing or of another version.
            IntegrityError: A line is damaged.
            OmniloadError: The file cannot be read.
        """
        return self._from(batch, batch)

    def _from(self, batch: int, due: int | None) -> Iterator[BatchDecision]:
        with system_refusals("the decisions on groups"):
            for number, line, is_last in self._lines():
                where = f"{self._path}:{number}"
                if is_last and not line.endswith(b"\n"):
                    return  # incomplete: its batch was never handed out
                at = _BATCH.match(line)
                if at is not None and int(at[1]) < batch:
                    continue
                found = decision_of(line, where)
                if due is not None and found.batch != due:
                    raise StateError(
                        f"{where}: has batch {found.batch} where batch {due} is due; resume from a checkpoint"
                    )
                due = found.batch + 1
                yield found

    def _lines(self) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the number and the text of each line, and whether it is the last one."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            raise StateError(
                f"{self._path}: no decisions on groups; give the folder of a run that sampled, or a rollout"
            ) from None
        with file:
            # Reads one line ahead: a line without an end is torn if it is the last line, and damaged otherwise.
            number, line = 1, file.readline(_LARGEST_LINE_BYTES + 1)
            while line:
                if len(line) > _LARGEST_LINE_BYTES:
                    raise IntegrityError(
                        f"{self._path}:{number}: the line is longer than {_LARGEST_LINE_BYTES} bytes; remove the file"
                    )
                following = file.readline(_LARGEST_LINE_BYTES + 1)
                yield number, line, not following
                number, line = number + 1, following

    def _cut_before(self, batch: int) -> None:
        """Cut the file before the line of a batch, and before a torn line."""
        if not self._path.exists():
            return
        end, last = 0, None
        for number, line, is_last in self._lines():
            if is_last and not line.endswith(b"\n"):
                break
            at = _BATCH.match(line)
            if at is None:
                # A line that is of another version or damaged is reported and not cut away.
                decision_of(line, f"{self._path}:{number}")
            elif int(at[1]) >= batch:
                last = 0 if batch == 0 and not self._is_mine else last
                break
            else:
                end, last = end + len(line), int(at[1])
        if last in (None, batch - 1):
            os.truncate(self._path, end)
            return
        # As in the journal of steps: most often a state was not given, or was of another folder.
        _LOG.warning(
            "%s holds batch %d of a run, and this one goes on with batch %d: its lines are moved to %s. To go on with "
            "them, move them back with the journal, and give the state; another run_dir leaves them where they are",
            *(self._path, last, batch, FileStorage(self._path).move_aside()),
        )


@dataclass(slots=True, kw_only=True)
class SourceGroups:
    """Groups of one source; each drawn group is in one of the three counts."""

    name: str
    drawn: int = 0
    differing: int = 0
    """Groups whose rewards differ: they are in a batch, wait for one, or were left out."""
    all_right: int = 0
    all_wrong: int = 0
    answers: int = 0
    right: int = 0
    """Number of right answers."""


@dataclass(slots=True, kw_only=True)
class GroupProgress:
    """Progress of a run that draws groups."""

    batches: int = 0
    """Number of decided batches, whether or not the trainer finished them."""
    rounds: int = 0
    """Number of steps drawn for these batches."""
    groups: int = 0
    """Number of groups in these batches."""
    next_batch: int = 0
    sources: dict[str, SourceGroups] = field(default_factory=dict)
    """Groups of each source, by name."""


def group_progress(run_dir: Path, names: Sequence[str]) -> GroupProgress | None:
    """Sum up the decisions of a run; ``None`` if the run drew no groups.

    Args:
        run_dir: Folder of the run.
        names: Names of the run's sources, in the order of their numbers.

    Raises:
        StateError: A line is missing, of another version, or of a source that the run does not have.
        IntegrityError: A line is damaged.
        OmniloadError: The file cannot be read.
    """
    if not (run_dir / GROUPS_NAME).exists():
        return None
    found = GroupProgress()
    for decision in GroupJournal(run_dir).every():
        found.batches += 1
        found.rounds += len(decision.rounds)
        found.groups += decision.groups
        found.next_batch = decision.batch + 1
        for each in decision.rounds:
            sources_N = each.keys_N3[:, 0]
            for number in np.unique(sources_N).tolist():
                of_source = _of_source(found, number, names, run_dir)
                counts = np.bincount(each.verdicts_N[sources_N == number], minlength=3).tolist()
                of_source.drawn += sum(counts)
                for verdict, count in zip(_VERDICTS, counts, strict=True):
                    setattr(of_source, verdict, getattr(of_source, verdict) + count)
        for number, answers in decision.answers.items():
            of_source = _of_source(found, number, names, run_dir)
            of_source.answers += answers.answers
            of_source.right += answers.right
    return found


def _of_source(
    found: GroupProgress, number: int, names: Sequence[str], run_dir: Path
) -> SourceGroups:
    if not 0 <= number < len(names):
        raise StateError(
            f"{run_dir / GROUPS_NAME}: has groups of source {number}, and the run has {len(names)} sources; it is of "
            "another run: move it away"
        )
    return found.sources.setdefault(names[number], SourceGroups(name=names[number]))
