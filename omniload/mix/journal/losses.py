"""Losses as a trainer reported them: ``losses/rank-R.jsonl`` in the run's folder, of bounded size.

A line for each call, columns by piece::

    {"step": 12, "at": 1.7e9, "names": ["code", "web"], "source": [0, 1], "position": [31, 7], "sub": [0, 0],
     "first": [0, 0], "loss": [41.5, 12.25], "labels": [12, 9]}

``"over": "row"`` or ``"rows"`` says that the mean went over more than the piece, and each of its labels has it;
``"cp": [0, 2048]``, that the labels are those of a cp peer's slice: the column that it begins with, and how many it
has. ``"over": "source"`` is a word on a source as a whole, called by its first piece among the rows that the word is
of; by the position -1, where it is of the whole step.

They are figures, not state: nothing is resumed from them, and a line that cannot be read is passed over with a
warning. What a kill tore off stays a line of its own.
"""

import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.errors import system_refusals
from omniload.base.log import get_logger
from omniload.mix.journal.bounded import BoundedLog, LinesSince, opened_logs, take_from

__all__ = [
    "LossLog",
    "PieceKey",
    "PieceLoss",
    "SourceLoss",
    "StepLosses",
    "TurnLosses",
    "latest_losses",
    "losses_by_source",
    "losses_of_step",
]

_LOG = get_logger(__name__)
_COLUMNS = ("source", "position", "sub", "first")

PieceKey = tuple[str, int, int, int]
"""Source, position, sub and first token of a piece."""
_OVER = ("document", "row", "rows", "source")
_WHOLE_STEP = (-1, 0, 0)
"""Position, sub and first token that a word on a source in the whole step is called by."""
_TAIL_BYTES = 1 << 20
"""Of each rank's lines, what its latest step is looked for in."""


class PieceLoss(NamedTuple):
    """What was reported of a piece."""

    loss: float
    """Sum over its labels."""
    labels: int
    over: str = "document"
    """What the reported mean went over: the document, its row, all rows of a call, or its source."""

    @property
    def mean(self) -> float | None:
        """Loss of a label; ``None`` without one."""
        return self.loss / self.labels if self.labels else None


class LossLog:
    """Takes the losses that one rank reports. A disk that is full costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        # Both files that are kept hold about 1.5 million documents of a rank.
        self._log = BoundedLog(run_dir / "losses" / f"rank-{rank}.jsonl", "losses of documents")

    def add(  # noqa: PLR0913 -- columns of one line
        self,
        step: int,
        names: Sequence[str],
        keys_K4: NDArray[np.int64],
        sums_K: NDArray[np.float64],
        labels_K: NDArray[np.int64],
        *,
        over: str = "document",
        columns: tuple[int, int] | None = None,
    ) -> None:
        """Note the losses of some pieces of a step.

        Args:
            step: The step.
            names: Names of the sources, by number.
            keys_K4: Source, position, sub and first token of each piece.
            sums_K: Sum of the losses of each.
            labels_K: Labels of each.
            over: What the reported means went over.
            columns: Of a cp peer: the first column of its slice, and how many it has.
        """
        # Copied side by side: orjson takes no array with gaps between its values.
        held = dict(zip(_COLUMNS, (np.ascontiguousarray(c) for c in keys_K4.T), strict=True))
        line: dict[str, object] = {"step": step, "at": time.time(), "names": list(names), **held}
        line |= {"loss": sums_K, "labels": labels_K}
        line |= {} if over == "document" else {"over": over}
        line |= {} if columns is None else {"cp": columns}
        self._log.append(
            orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        )

    def add_source(
        self,
        step: int,
        name: str,
        told: "SourceLoss",
        first: NDArray[np.int64] | None,
        *,
        columns: tuple[int, int] | None = None,
    ) -> None:
        """Note what was said of a source as a whole.

        Args:
            step: The step.
            name: Name of the source.
            told: Its losses and labels.
            first: Key of the first piece of it that they are of, ``[4]``: a word that a resume says again has the same,
                and all others have not. ``None`` where they are of the whole step.
            columns: Of a cp peer, as for ``add``.
        """
        key = np.asarray([0, *(_WHOLE_STEP if first is None else first[1:].tolist())])[None]
        sums, labels = np.asarray([told.loss]), np.asarray([told.labels])
        self.add(step, [name], key, sums, labels, over="source", columns=columns)


@dataclass(slots=True)
class SourceLoss:
    """What was reported of a source."""

    loss: float = 0.0
    """Sum over its labels."""
    labels: int = 0
    pairs: int = 0
    """Preference pairs, where it is of such: their loss is one of a pair, of whatever length."""
    pair_losses: float = 0.0
    """Sum over them."""

    def add(self, loss: float, labels: int, *, is_pair: bool = False) -> None:
        """Add labels and what was lost on them; what is no number counts in neither."""
        if isfinite(loss):
            self.loss += loss
            self.labels += labels
            if is_pair and labels:
                self.pairs += 1
                self.pair_losses += loss / labels

    def add_sums(self, other: "SourceLoss") -> None:
        """Add the sums of another."""
        self.loss, self.labels = self.loss + other.loss, self.labels + other.labels
        self.pairs += other.pairs
        self.pair_losses += other.pair_losses

    @property
    def mean(self) -> float | None:
        """Loss of a label, of pairs that of a pair; ``None`` without one."""
        if self.pairs:
            return self.pair_losses / self.pairs
        return self.loss / self.labels if self.labels else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """What was reported of a step: of what was told twice, as behind a resume, the later report."""

    pieces: dict[PieceKey, PieceLoss] = field(default_factory=dict)
    sources: dict[str, SourceLoss] = field(default_factory=dict)
    """Words on sources as a whole, of all ranks."""

    def of_piece(self, key: PieceKey) -> PieceLoss | None:
        """Return what was reported of a piece, or of its source; ``None`` for nothing."""
        if (own := self.pieces.get(key)) is not None:
            return own
        told = self.sources.get(key[0])
        return None if told is None else PieceLoss(told.loss, told.labels, "source")

    def by_source(self, pairs: Container[str] = ()) -> dict[str, SourceLoss]:
        """Return the sums of each source: of its pieces, or what was said of it as a whole where none was told of.

        Args:
            pairs: Names of the sources whose pieces are preference pairs.
        """
        found: dict[str, SourceLoss] = {}
        for (name, *_), piece in self.pieces.items():
            told = found.setdefault(name, SourceLoss())
            told.add(piece.loss, piece.labels, is_pair=name in pairs)
        return self.sources | dict(sorted(found.items()))

    def __bool__(self) -> bool:
        return bool(self.pieces or self.sources)


@system_refusals("the losses of a run")
def losses_of_step(run_dir: Path, step: int) -> StepLosses:
    """Return what was reported of a step."""
    opened = opened_logs(run_dir / "losses")
    return _step_of(((path, line) for path, file in opened for line in file), step)


@system_refusals("the losses of a run")
def latest_losses(run_dir: Path) -> tuple[int, StepLosses] | None:
    """Return the step that was last reported of, and what was; ``None`` for none.

    Only the ends of the files are read, a MiB of each rank: of more reports of one step, the later ones.
    """
    tails: list[tuple[Path, list[bytes]]] = []
    latest = (0.0, -1)
    for path, file in opened_logs(run_dir / "losses"):
        lines = list(_ending(file))
        tails.append((path, lines))
        if lines:
            # By the clock, not the highest: a run that went back goes on at an earlier step.
            try:
                last = orjson.loads(lines[-1])
                latest = max(latest, (float(last["at"]), int(last["step"])))
            except (KeyError, TypeError, ValueError):
                continue  # told by whoever reads the step
    step = latest[1]
    found = _step_of(((path, line) for path, lines in tails for line in lines), step)
    return (step, found) if found else None


def _ending(file: BinaryIO) -> Iterator[bytes]:
    """Yield the whole lines of a file's last MiB."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    if size > _TAIL_BYTES:
        file.readline()  # of which the beginning is not here
    yield from (line for line in file if line.endswith(b"\n"))


def _step_of(lines: Iterable[tuple[Path, bytes]], step: int) -> StepLosses:
    # By the part of its labels that a report is of: of one that was made again, the later counts.
    found: dict[PieceKey, dict[tuple[int, int], tuple[float, PieceLoss]]] = {}
    words: dict[PieceKey, dict[tuple[int, int], tuple[float, PieceLoss]]] = {}
    begins = b'{"step":%d,' % step
    for path, line in lines:
        if not (line.startswith(begins) and line.endswith(b"\n")):
            continue
        try:
            at, part, pieces = _pieces_in(line)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            _LOG.warning("%s: a line of step %d is damaged and passed over: %r", path, step, error)
            continue
        for key, loss in pieces:
            parts = (words if loss.over == "source" else found).setdefault(key, {})
            if part not in parts or parts[part][0] <= at:
                parts[part] = at, loss
    sources: dict[str, SourceLoss] = {}
    for (name, *_), parts in sorted(words.items()):
        told = _joined(parts)
        sources.setdefault(name, SourceLoss()).add(told.loss, told.labels)
    return StepLosses(
        pieces={key: _joined(parts) for key, parts in found.items()},
        sources={name: told for name, told in sources.items() if told.labels},
    )


def _joined(parts: dict[tuple[int, int], tuple[float, PieceLoss]]) -> PieceLoss:
    """Return the sum of what cp peers told of their labels of one piece."""
    if len(parts) == 1:
        (only,) = parts.values()
        return only[1]
    # Of peers of one size: what a run told with others, before it was resumed, was told anew since.
    (_, columns), (_, newest) = max(parts.items(), key=lambda part: part[1][0])
    told = [loss for (_, others), (_, loss) in sorted(parts.items()) if others == columns]
    return PieceLoss(sum(t.loss for t in told), sum(t.labels for t in told), newest.over)


@system_refusals("the losses of a run")
def losses_by_source(
    run_dir: Path, first: int, pairs: Container[str] = (), stop: int | None = None
) -> tuple[dict[str, SourceLoss], int]:
    """Return what was reported of each source in the steps from ``first`` on, and the first step of which nothing was.

    Before the step ``stop``, where one is given.

    Of the sources ``pairs``, whose pieces are preference pairs, each pair counts once, whatever its length. A line that
    a resumed run reported again counts again: it is a mean of some thousand documents. A loss that is no number is
    passed over.
    """
    found: dict[str, SourceLoss] = {}

    def take(line: bytes) -> None:
        _add_line(found, orjson.loads(line), pairs)

    return found, take_from(run_dir / "losses", first, take, stop)


class TurnLosses:
    """What was reported of each source in turns of some steps, summed as it comes: a line is read once."""

    def __init__(self, run_dir: Path, first: int, every: int, pairs: Container[str] = ()) -> None:
        """Begin with nothing; turns of ``every`` steps are numbered from 0, the first of them begins at ``first``."""
        self._pairs = pairs
        self._folder, self._first, self._every = run_dir / "losses", first, every
        self._lines = LinesSince(self._folder)
        self._since = 0
        self._found: dict[int, dict[str, SourceLoss]] = {}

    @system_refusals("the losses of a run")
    def since(self, turn: int) -> dict[int, dict[str, SourceLoss]]:
        """Return what was reported by now from a turn on, by turns; none without any. Those before it are forgotten.

        As for ``losses_by_source``.
        """

        def take(written: bytes) -> None:
            line = orjson.loads(written)
            of = (line["step"] - self._first) // self._every
            _add_line(self._found.setdefault(of, {}), line, self._pairs)

        if turn < self._since:  # the run went back, to turns that are forgotten
            self._lines, self._found = LinesSince(self._folder), {}
        self._since = turn
        self._lines.take(self._first + turn * self._every, take)
        self._found = {of: told for of, told in sorted(self._found.items()) if of >= turn and told}
        return dict(self._found)


def _add_line(found: dict[str, SourceLoss], line: dict[str, Any], pairs: Container[str]) -> None:
    losses_K, labels_K = (np.asarray(line[name], np.float64) for name in ("loss", "labels"))
    sources_K = np.asarray(line["source"], np.int64)
    # Below 0 numpy would count from the end: the loss would be another source's.
    if labels_K.min(initial=0) < 0 or sources_K.min(initial=0) < 0:
        raise ValueError(f"labels from {labels_K.min()}, sources from {sources_K.min()}")
    sound_K = np.isfinite(losses_K)
    told: list[tuple[str, SourceLoss]] = []
    for source in np.unique(sources_K).tolist():
        mine_K = (sources_K == source) & sound_K
        name = str(line["names"][source])
        sums = SourceLoss(float(losses_K[mine_K].sum()), int(labels_K[mine_K].sum()))
        # A word on the source as a whole is of labels; of its pieces each is a pair.
        if name in pairs and line.get("over") != "source":
            mine_K &= labels_K > 0
            sums.pairs = int(mine_K.sum())
            sums.pair_losses = float((losses_K[mine_K] / labels_K[mine_K]).sum())
        told.append((name, sums))
    # Once all of it is read: a line that is damaged further on must not count in part.
    for name, sums in told:
        found.setdefault(name, SourceLoss()).add_sums(sums)


def _pieces_in(
    written: bytes,
) -> tuple[float, tuple[int, int], list[tuple[PieceKey, PieceLoss]]]:
    """Return when a line was written, the part of labels that it is of, and its pieces.

    All of them, or the error of the first that is damaged.
    """
    line = orjson.loads(written)
    names, over = line["names"], line.get("over", "document")
    if over not in _OVER:
        raise ValueError(f"over is {over!r:.40}")
    first_column, columns = map(int, line.get("cp", (0, 0)))
    found = zip(*(line[name] for name in (*_COLUMNS, "loss", "labels")), strict=True)
    return (
        float(line["at"]),
        (first_column, columns),
        [
            (
                (str(names[int(source)]), int(position), int(sub), int(first)),
                # JSON has no nan: orjson writes null for it.
                PieceLoss(nan if loss is None else float(loss), int(labels), over),
            )
            for source, position, sub, first, loss, labels in found
        ],
    )
