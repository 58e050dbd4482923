"""Losses reported by a trainer: ``losses/rank-R.jsonl`` in the run's folder, of bounded size.

One line for each call, with columns by piece::

    {"step": 12, "at": 1.7e9, "names": ["code", "web"], "source": [0, 1], "position": [31, 7], "sub": [0, 0],
     "first": [0, 0], "loss": [41.5, 12.25], "labels": [12, 9]}

``"over": "row"`` or ``"rows"`` means that the reported mean covers more than the piece, and each label of the piece
has this mean. ``"cp": [0, 2048]`` means that the labels are those of a cp peer's slice: its first column and its
number of columns. ``"over": "source"`` is a report on a whole source. Its key is that of the source's first piece
among the rows that the report covers; if it covers the whole step, its position is -1.

The losses are figures, not state: nothing is resumed from them, and a line that cannot be read is skipped with a
warning. A line torn by a kill stays a line of its own.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.clock import TimeOfDay
from omniload.base.errors import system_refusals
from omniload.base.log import get_logger
from omniload.mix.journal.bounded import (
    BoundedLog,
    LinesSince,
    last_lines,
    opened_logs,
    take_from,
)

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
"""Position, sub and first token of a report on a source in the whole step."""


class PieceLoss(NamedTuple):
    """The reported loss of a piece."""

    loss: float
    """Sum over its labels."""
    labels: int
    over: str = "document"
    """Scope of the reported mean: the document, its row, all rows of a call, or its source."""

    @property
    def mean(self) -> float | None:
        """Mean loss of a label; ``None`` without labels."""
        return self.loss / self.labels if self.labels else None


class LossLog:
    """Writes the losses that one rank reports. A full disk costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        # Both kept files together hold about 1.5 million documents of a rank.
        self._log = BoundedLog(run_dir / "losses" / f"rank-{rank}.jsonl", "losses of documents")
        self._time = TimeOfDay()

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
        """Write the losses of some pieces of a step.

        Args:
            step: The step.
            names: Names of the sources, by number.
            keys_K4: Source, position, sub and first token of each piece.
            sums_K: Sum of the losses of each piece.
            labels_K: Number of labels of each piece.
            over: Scope of the reported means.
            columns: For a cp peer, the first column of its slice and the number of its columns.
        """
        # Copied to be contiguous, because orjson does not accept arrays with gaps between their values.
        held = dict(zip(_COLUMNS, (np.ascontiguousarray(c) for c in keys_K4.T), strict=True))
        line: dict[str, object] = {
            "step": step,
            "at": self._time.now_s(),
            "names": list(names),
            **held,
        }
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
        """Write a report on a whole source.

        Args:
            step: The step.
            name: Name of the source.
            told: Its losses and labels.
            first: Key of the first piece in the report, ``[4]``. A report that a resume repeats has the same key, and
                no other report has it. ``None`` if the report covers the whole step.
            columns: For a cp peer, as in ``add``.
        """
        key = np.asarray([0, *(_WHOLE_STEP if first is None else first[1:].tolist())])[None]
        sums, labels = np.asarray([told.loss]), np.asarray([told.labels])
        self.add(step, [name], key, sums, labels, over="source", columns=columns)


@dataclass(slots=True)
class SourceLoss:
    """The reported losses of a source."""

    loss: float = 0.0
    """Sum over its labels."""
    labels: int = 0
    pairs: int = 0
    """Number of preference pairs, if the source has pairs: each pair has one loss, whatever its length."""
    pair_losses: float = 0.0
    """Sum of the losses of the pairs."""

    def add(self, loss: float, labels: int, *, is_pair: bool = False) -> None:
        """Add labels and their loss; a loss that is not finite is ignored together with its labels."""
        if isfinite(loss):
            self.loss += loss
            self.labels += labels
            if is_pair and labels:
                self.pairs += 1
                self.pair_losses += loss / labels

    def add_sums(self, other: "SourceLoss") -> None:
        """Add the sums of another source loss."""
        self.loss, self.labels = self.loss + other.loss, self.labels + other.labels
        self.pairs += other.pairs
        self.pair_losses += other.pair_losses

    @property
    def mean(self) -> float | None:
        """Mean loss of a label, or of a pair if there are pairs; ``None`` without any."""
        if self.pairs:
            return self.pair_losses / self.pairs
        return self.loss / self.labels if self.labels else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """The reported losses of a step; if something was reported twice, as after a resume, the later report counts."""

    pieces: dict[PieceKey, PieceLoss] = field(default_factory=dict)
    sources: dict[str, SourceLoss] = field(default_factory=dict)
    """Reports on whole sources, summed over all ranks."""

    def of_piece(self, key: PieceKey) -> PieceLoss | None:
        """Return the report on a piece, otherwise the report on its source; ``None`` if there is neither."""
        if (own := self.pieces.get(key)) is not None:
            return own
        told = self.sources.get(key[0])
        return None if told is None else PieceLoss(told.loss, told.labels, "source")

    def by_source(self, pairs: Container[str] = ()) -> dict[str, SourceLoss]:
        """Return the sums of each source: those of its pieces, or the report on the whole source if there are none.

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
    """Return the reported losses of a step."""
    opened = opened_logs(run_dir / "losses")
    return _step_of(((path, line) for path, file in opened for line in file), step)


@system_refusals("the losses of a run")
def latest_losses(run_dir: Path) -> tuple[int, StepLosses] | None:
    """Return the step of the latest report and the reported losses of that step; ``None`` without reports.

    Only the last MiB of each rank's file is read, so the earlier ones of many reports of one step may be missing.
    """
    tails: list[tuple[Path, list[bytes]]] = []
    latest = (0.0, -1)
    for path, file in opened_logs(run_dir / "losses"):
        lines, _ = last_lines(file)
        tails.append((path, lines))
        if lines:
            # By time, not by step, because a run that went back continues at an earlier step.
            try:
                last = orjson.loads(lines[-1])
                latest = max(latest, (float(last["at"]), int(last["step"])))
            except (KeyError, TypeError, ValueError):
                continue  # reported where the step is read
    step = latest[1]
    found = _step_of(((path, line) for path, lines in tails for line in lines), step)
    return (step, found) if found else None


def _step_of(lines: Iterable[tuple[Path, bytes]], step: int) -> StepLosses:
    # Keyed by the part of the labels that a report covers; if a report was repeated, the later one counts.
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
    """Return the sum of the losses that cp peers reported for their labels of one piece."""
    if len(parts) == 1:
        (only,) = parts.values()
        return only[1]
    # Only peers with slices of one size: reports in another size, from before a resume, were repeated since.
    (_, columns), (_, newest) = max(parts.items(), key=lambda part: part[1][0])
    told = [loss for (_, others), (_, loss) in sorted(parts.items()) if others == columns]
    return PieceLoss(sum(t.loss for t in told), sum(t.labels for t in told), newest.over)


@system_refusals("the losses of a run")
def losses_by_source(
    run_dir: Path, first: int, pairs: Container[str] = (), stop: int | None = None
) -> tuple[dict[str, SourceLoss], int]:
    """Return the reported losses of each source from step ``first`` on, and the step after the last reported one.

    Steps from ``stop`` on are left out, if it is given.

    For sources in ``pairs``, whose pieces are preference pairs, each pair counts once, whatever its length. A line
    that a resumed run reported again counts twice, which matters little in a mean of thousands of documents. A loss
    that is not a finite number is skipped.
    """
    found: dict[str, SourceLoss] = {}

    def take(line: bytes) -> None:
        _add_line(found, orjson.loads(line), pairs)

    return found, take_from(run_dir / "losses", first, take, stop)


class TurnLosses:
    """The reported losses of each source in turns of some steps, summed incrementally: each line is read once."""

    def __init__(self, run_dir: Path, first: int, every: int, pairs: Container[str] = ()) -> None:
        """Begin empty; turns of ``every`` steps are numbered from 0, and the first turn begins at step ``first``."""
        self._pairs = pairs
        self._folder, self._first, self._every = run_dir / "losses", first, every
        self._lines = LinesSince(self._folder)
        self._since = 0
        self._found: dict[int, dict[str, SourceLoss]] = {}

    @system_refusals("the losses of a run")
    def since(self, turn: int) -> dict[int, dict[str, SourceLoss]]:
        """Return the losses reported so far from a turn on, by turn; turns before it are forgotten.

        Counted as in ``losses_by_source``. Turns without reports are left out.
        """

        def take(written: bytes) -> None:
            line = orjson.loads(written)
            of = (line["step"] - self._first) // self._every
            _add_line(self._found.setdefault(of, {}), line, self._pairs)

        if turn < self._since:  # the run went back to forgotten turns
            self._lines, self._found = LinesSince(self._folder), {}
        self._since = turn
        self._lines.take(self._first + turn * self._every, take)
        self._found = {of: told for of, told in sorted(self._found.items()) if of >= turn and told}
        return dict(self._found)


def _add_line(found: dict[str, SourceLoss], line: dict[str, Any], pairs: Container[str]) -> None:
    losses_K, labels_K = (np.asarray(line[name], np.float64) for name in ("loss", "labels"))
    sources_K = np.asarray(line["source"], np.int64)
    # Below 0 numpy would count from the end, and the loss would go to another source.
    if labels_K.min(initial=0) < 0 or sources_K.min(initial=0) < 0:
        raise ValueError(f"labels from {labels_K.min()}, sources from {sources_K.min()}")
    sound_K = np.isfinite(losses_K)
    told: list[tuple[str, SourceLoss]] = []
    for source in np.unique(sources_K).tolist():
        mine_K = (sources_K == source) & sound_K
        name = str(line["names"][source])
        sums = SourceLoss(float(losses_K[mine_K].sum()), int(labels_K[mine_K].sum()))
        # A report on the whole source covers labels; in a report on pieces each piece is a pair.
        if name in pairs and line.get("over") != "source":
            mine_K &= labels_K > 0
            sums.pairs = int(mine_K.sum())
            sums.pair_losses = float((losses_K[mine_K] / labels_K[mine_K]).sum())
        told.append((name, sums))
    # Added only after the whole line is read, because a line that is damaged further on must not count in part.
    for name, sums in told:
        found.setdefault(name, SourceLoss()).add_sums(sums)


def _pieces_in(
    written: bytes,
) -> tuple[float, tuple[int, int], list[tuple[PieceKey, PieceLoss]]]:
    """Return the time of a line, the part of the labels that it covers, and its pieces.

    Raises the error of the first damaged piece; pieces are never returned in part.
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
                # JSON has no nan, so orjson writes null for it.
                PieceLoss(nan if loss is None else float(loss), int(labels), over),
            )
            for source, position, sub, first, loss, labels in found
        ],
    )
