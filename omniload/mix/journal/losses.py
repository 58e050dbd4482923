"""Losses of documents as a trainer reported them: ``losses/rank-R.jsonl`` in the run's folder, of bounded size.

A line for each call, columns by piece::

    {"step": 12, "at": 1.7e9, "names": ["code", "web"], "source": [0, 1], "position": [31, 7], "sub": [0, 0],
     "first": [0, 0], "loss": [41.5, 12.25], "labels": [12, 9]}

They are figures, not state: nothing is resumed from them, and a line that cannot be read is passed over.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.errors import StateError, system_refusals
from omniload.base.log import get_logger

__all__ = ["LossLog", "PieceKey", "PieceLoss", "losses_of_step"]

_LOG = get_logger(__name__)
_MOST_BYTES = 32 << 20
"""Of one file; the one before it is kept: about 1.5 million documents of a rank in both."""
_COLUMNS = ("source", "position", "sub", "first")

PieceKey = tuple[str, int, int, int]
"""Source, position, sub and first token of a piece."""
PieceLoss = tuple[float, int]
"""Sum of the losses of a piece, and its labels."""


class LossLog:
    """Takes the losses that one rank reports. A disk that is full costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / "losses" / f"rank-{rank}.jsonl"
        self._failed = False

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
        if self._failed:
            return
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
        try:
            self._append(line)
        except OSError as error:
            self._failed = True
            _LOG.warning("losses of documents are kept no more: %s: %s", self._path, error)

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            size = os.fstat(file.fileno()).st_size
            file.write(line)
        if size + len(line) > _MOST_BYTES:
            self._path.replace(self._path.with_name(self._path.name + ".1"))


@system_refusals("the losses of a run")
def losses_of_step(run_dir: Path, step: int) -> dict[PieceKey, PieceLoss]:
    """Return what was reported of a step, by piece; of one that was reported twice, the later report."""
    found: dict[PieceKey, tuple[float, PieceLoss]] = {}
    for path in sorted((run_dir / "losses").glob("rank-*.jsonl*")):
        for line in _lines_of(path, step):
            for key, loss in _pieces_in(line):
                at = float(line["at"])
                if key not in found or found[key][0] <= at:
                    found[key] = at, loss
    return {key: loss for key, (_, loss) in found.items()}


def _lines_of(path: Path, step: int) -> Iterator[Mapping[str, Any]]:
    begins = b'{"step":%d,' % step
    with path.open("rb") as file:
        for line in file:
            if line.startswith(begins) and line.endswith(b"\n"):
                try:
                    yield orjson.loads(line)
                except ValueError as error:
                    raise StateError(
                        f"{path}: a line of step {step} is damaged ({error}); move the file away"
                    ) from error


def _pieces_in(line: Mapping[str, Any]) -> Iterator[tuple[PieceKey, PieceLoss]]:
    try:
        names = line["names"]
        columns = zip(
            *(line[name] for name in (*_COLUMNS, "loss", "labels")),
            strict=True,
        )
        for source, position, sub, first, loss, labels in columns:
            yield (
                (names[source], position, sub, first),
                (nan if loss is None else float(loss), int(labels)),
            )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StateError(
            f"a line of the losses of step {line.get('step')} is damaged ({error!r}); move the folder losses away"
        ) from error
