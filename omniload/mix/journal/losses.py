"""Losses of documents as a trainer reported them: ``losses/rank-R.jsonl`` in the run's folder, of bounded size.

A line for each call, columns by piece::

    {"step": 12, "at": 1.7e9, "names": ["code", "web"], "source": [0, 1], "position": [31, 7], "sub": [0, 0],
     "first": [0, 0], "loss": [41.5, 12.25], "labels": [12, 9]}

They are figures, not state: nothing is resumed from them, and a line that cannot be read is passed over with a
warning. What a kill tore off stays a line of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.errors import system_refusals
from omniload.base.log import get_logger
from omniload.mix.journal.bounded import BoundedLog, opened_logs, take_from

__all__ = ["LossLog", "PieceKey", "PieceLoss", "SourceLoss", "losses_by_source", "losses_of_step"]

_LOG = get_logger(__name__)
_COLUMNS = ("source", "position", "sub", "first")

PieceKey = tuple[str, int, int, int]
"""Source, position, sub and first token of a piece."""
PieceLoss = tuple[float, int]
"""Sum of the losses of a piece, and its labels."""


class LossLog:
    """Takes the losses that one rank reports. A disk that is full costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        # Both files that are kept hold about 1.5 million documents of a rank.
        self._log = BoundedLog(run_dir / "losses" / f"rank-{rank}.jsonl", "losses of documents")

    def add(
        self,
        step: int,
        names: Sequence[str],
        keys_K4: NDArray[np.int64],
        sums_K: NDArray[np.float64],
        labels_K: NDArray[np.int64],
    ) -> None:
        """Note the losses of some pieces of a step.

        Args:
            step: The step.
            names: Names of the sources, by number.
            keys_K4: Source, position, sub and first token of each piece.
            sums_K: Sum of the losses of each.
            labels_K: Labels of each.
        """
        # Copied side by side: orjson takes no array with gaps between its values.
        columns = dict(zip(_COLUMNS, (np.ascontiguousarray(c) for c in keys_K4.T), strict=True))
        line = orjson.dumps(
            {
                "step": step,
                "at": time.time(),
                "names": list(names),
                **columns,
                "loss": sums_K,
                "labels": labels_K,
            },
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
        )
        self._log.append(line)


@system_refusals("the losses of a run")
def losses_of_step(run_dir: Path, step: int) -> dict[PieceKey, PieceLoss]:
    """Return what was reported of a step, by piece; of one that was reported twice, the later report."""
    found: dict[PieceKey, tuple[float, PieceLoss]] = {}
    begins = b'{"step":%d,' % step
    for path, file in opened_logs(run_dir / "losses"):
        for line in file:
            if not (line.startswith(begins) and line.endswith(b"\n")):
                continue
            try:
                at, pieces = _pieces_in(line)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                _LOG.warning(
                    "%s: a line of step %d is damaged and passed over: %r", path, step, error
                )
                continue
            for key, loss in pieces:
                if key not in found or found[key][0] <= at:
                    found[key] = at, loss
    return {key: loss for key, (_, loss) in found.items()}


@dataclass(slots=True)
class SourceLoss:
    """What was reported of a source."""

    loss: float = 0.0
    """Sum over its labels."""
    labels: int = 0


@system_refusals("the losses of a run")
def losses_by_source(run_dir: Path, first: int) -> tuple[dict[str, SourceLoss], int]:
    """Return what was reported of each source in the steps from ``first`` on, and the first step of which nothing was.

    A line that a resumed run reported again counts again: it is a mean of some thousand documents. A loss that is no
    number is passed over.
    """
    found: dict[str, SourceLoss] = {}
    stop = take_from(run_dir / "losses", first, lambda line: _add_line(found, orjson.loads(line)))
    return found, stop


def _add_line(found: dict[str, SourceLoss], line: dict[str, Any]) -> None:
    losses_K, labels_K = (np.asarray(line[name], np.float64) for name in ("loss", "labels"))
    sources_K = np.asarray(line["source"], np.int64)
    # Below 0 numpy would count from the end: the loss would be another source's.
    if labels_K.min(initial=0) < 0 or sources_K.min(initial=0) < 0:
        raise ValueError(f"labels from {labels_K.min()}, sources from {sources_K.min()}")
    sound_K = np.isfinite(losses_K)
    told: list[tuple[str, float, int]] = []
    for source in np.unique(sources_K).tolist():
        mine_K = (sources_K == source) & sound_K
        sums = float(losses_K[mine_K].sum()), int(labels_K[mine_K].sum())
        told.append((str(line["names"][source]), *sums))
    # Once all of it is read: a line that is damaged further on must not count in part.
    for name, loss, labels in told:
        each = found.setdefault(name, SourceLoss())
        each.loss += loss
        each.labels += labels


def _pieces_in(written: bytes) -> tuple[float, list[tuple[PieceKey, PieceLoss]]]:
    """Return when a line was written, and its pieces: all of them, or the error of the first that is damaged."""
    line = orjson.loads(written)
    names = line["names"]
    columns = zip(*(line[name] for name in (*_COLUMNS, "loss", "labels")), strict=True)
    return float(line["at"]), [
        (
            (str(names[int(source)]), int(position), int(sub), int(first)),
            # JSON has no nan: orjson writes null for it.
            (nan if loss is None else float(loss), int(labels)),
        )
        for source, position, sub, first, loss, labels in columns
    ]
