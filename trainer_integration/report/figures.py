"""The figures that the page draws, as plain JSON: by step, thinned to a screen's resolution. Pure arithmetic.

Shape suffixes:
    N  steps, one line each      P  points that are drawn
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.state import Json, JsonObject
from omniload.mix.edits.edit import Edit, said_of
from omniload.mix.edits.history import History
from trainer_integration.report.run_summary import (
    Attempt,
    Shares,
    attempts_of,
    compute_imbalance,
    memory_by_kind,
    shares_of,
    wait_share,
)
from trainer_integration.run.run_log import (
    EventLine,
    MemoryLine,
    StepLine,
    figures_of,
    last_of_each_step,
)

__all__ = ["MOST_POINTS", "edit_places", "run_figures", "shown_sources", "smoothed"]

MOST_POINTS = 1500
"""Most points of a line; a longer run is drawn by the means of this many stretches of equal length."""
_MOST_SOURCES = 12
_MOST_KINDS = 8

AnyLine = StepLine | EventLine | MemoryLine
Numbers = NDArray[Any]


def run_figures(name: str, lines: Sequence[AnyLine], history: History) -> JsonObject:
    """Return the figures of a run in the form that ``charts.js`` reads.

    Args:
        name: Name of the run.
        lines: Its log, with at least one step.
        history: The mix that was trained on, and its edits.

    Returns:
        ``x``: the position of every point by ``step``, by ``tokens`` and by ``seconds`` of training, ``[P]`` each,
        never decreasing. ``figures``: ``[P]`` by name, ``None`` where nothing was logged. ``lost``: the loss of lost
        work. ``ends``: where attempts ended. ``edits``: where the mix was changed. ``memory``: bytes by kind of role,
        with times of their own.
    """
    steps_N = last_of_each_step(lines)
    starts = _starts_of(len(steps_N))
    attempts = attempts_of(lines)
    shares = shares_of(steps_N, history.latest)
    columns = _step_columns(steps_N) | _share_columns(shares)
    return {
        "name": name,
        "x": {
            "step": _ends_of(np.asarray([line.step for line in steps_N]), starts),
            "tokens": _ends_of(np.cumsum([line.tokens for line in steps_N]), starts),
            "seconds": _ends_of(np.cumsum([line.seconds for line in steps_N]).round(3), starts),
        },
        "figures": {key: _means_of(column_N, starts) for key, column_N in columns.items()},
        "lost": _lost_work(attempts),
        "ends": _attempt_ends(attempts),
        "edits": list(
            edit_places([edit for edit in history.edits if edit.step <= steps_N[-1].step])
        ),
        "memory": _memory(lines),
    }


def edit_places(edits: Iterable[Edit]) -> list[JsonObject]:
    """Return the first step of each edit with its number and its changes."""
    return [
        {"number": edit.revision, "step": edit.step, "text": said_of(edit.change)} for edit in edits
    ]


def shown_sources(shares: Shares) -> list[str]:
    """Return the sources that have a chart: those with the most tokens, the largest first."""
    # A stable sort, so that sources of equal share keep the order of the mix.
    order = np.argsort(-shares.total_NS[-1], kind="stable")[:_MOST_SOURCES]
    return [shares.names[s] for s in order]


def _step_columns(steps_N: Sequence[StepLine]) -> dict[str, Numbers]:
    """Return the logged figures of each step, by name; NaN where nothing was logged."""
    logged = [
        {
            **figures_of(line),
            "wait_share": wait_share(line),
            "bound": line.bound,
            "compute_imbalance": compute_imbalance(line),
        }
        for line in steps_N
    ]
    # A dictionary keeps the order in which they were first logged.
    names = dict.fromkeys(name for figures in logged for name in figures)
    return {
        name: np.asarray([figures.get(name, np.nan) for figures in logged], np.float64)
        for name in names
        # Shares of single steps are left out; the page shows shares over several steps, see below.
        if not name.startswith("share/")
    }


def _share_columns(shares: Shares) -> dict[str, Numbers]:
    """Return the share of each source with a chart: over several steps, so far, and the target of the mix."""
    # A tenth of the run, because the share of a single step is noise, above all for a small source.
    window = max(3, len(shares.step_NS) // 10)
    kinds: Mapping[str, Numbers | None] = {
        "share": smoothed(shares.step_NS, window),
        "total": shares.total_NS,
        "target": shares.step_target_NS,
        "total_target": shares.total_target_NS,
    }
    places = {name: shares.names.index(name) for name in shown_sources(shares)}
    return {
        f"{kind}/{name}": values_NS[:, s]
        for kind, values_NS in kinds.items()
        if values_NS is not None
        for name, s in places.items()
    }


def smoothed(values_NS: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return the mean over up to ``window`` rows around each row; fewer at the ends."""
    sums = np.concatenate((np.zeros((1, values_NS.shape[1])), values_NS.cumsum(0)))
    at = np.arange(len(values_NS))
    first = np.maximum(at - window // 2, 0)
    stop = np.minimum(at + (window + 1) // 2, len(values_NS))
    means: NDArray[np.float64] = (sums[stop] - sums[first]) / (stop - first)[:, None]
    return means


def _starts_of(num_steps: int) -> Numbers:
    """Return where each stretch that is drawn as one point begins, ``[P]``."""
    return np.linspace(0, num_steps, min(num_steps, MOST_POINTS), endpoint=False, dtype=int)


def _ends_of(values_N: Numbers, starts_P: Numbers) -> list[Any]:
    """Return the last value of each stretch."""
    found: list[Any] = values_N[np.append(starts_P[1:], len(values_N)) - 1].tolist()
    return found


def _means_of(values_N: Numbers, starts_P: Numbers) -> list[Json]:
    """Return the mean of the numbers in each stretch, to six digits; ``None`` if it has none."""
    is_number_N = np.isfinite(values_N)
    sums_P = np.add.reduceat(np.where(is_number_N, values_N, 0.0), starts_P)
    # Only over the numbers, because an evaluation's loss exists at few steps.
    counts_P = np.add.reduceat(is_number_N.astype(int), starts_P)
    means_P = sums_P / np.maximum(counts_P, 1)
    return [
        # Six digits are more than a screen shows, and keep the page short.
        float(f"{mean:.6g}") if count else None
        for mean, count in zip(means_P.tolist(), counts_P.tolist(), strict=True)
    ]


def _lost_work(attempts: Sequence[Attempt]) -> list[Json]:
    """Return the loss of the steps of each attempt that a later attempt trained again."""
    found: list[Json] = []
    for attempt, later in itertools.pairwise(attempts):
        # From the beginning if there was no checkpoint yet, because then all of it was lost.
        back_to = later.resumed_from or 0
        lost = [line for line in attempt.steps if line.step >= back_to]
        if lost:
            starts = _starts_of(len(lost))
            found.append(
                {
                    "step": _ends_of(np.asarray([line.step for line in lost]), starts),
                    "loss": _means_of(np.asarray([line.loss for line in lost]), starts),
                }
            )
    return found


def _attempt_ends(attempts: Sequence[Attempt]) -> list[Json]:
    """Return the last step of every attempt but the last, with the way it ended."""
    found: list[Json] = []
    step = 0
    for number, (attempt, later) in enumerate(itertools.pairwise(attempts), start=1):
        step = attempt.steps[-1].step if attempt.steps else step
        text = (
            f"{number}: {attempt.cause or 'stopped'}; resumed from step {later.resumed_from or 0}"
        )
        found.append({"number": number, "step": step, "text": text})
    return found


def _memory(lines: Sequence[AnyLine]) -> JsonObject:
    seconds_N, by_kind = memory_by_kind(lines)
    if not len(seconds_N):
        return {"seconds": []}
    starts = _starts_of(len(seconds_N))
    kinds = list(by_kind.items())[:_MOST_KINDS]
    return {
        "seconds": _ends_of(seconds_N.round(2), starts),
        **{kind: _means_of(bytes_N.astype(np.float64), starts) for kind, bytes_N in kinds},
    }
