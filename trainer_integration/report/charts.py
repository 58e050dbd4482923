"""Charts of a run as SVG text that takes its colours and its font from the page around it.

Drawn with placeholder colours, which become CSS variables: the page decides about light
and dark. One unit of a chart is one pixel at full width. Needs matplotlib.

Shape suffixes:
    N  steps, one line each      S  sources
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter
from numpy.typing import NDArray

from omniload.base.units import format_bytes, format_count
from trainer_integration.report.run_summary import (
    Attempt,
    Shares,
    compute_imbalance,
    smoothed,
    wait_share,
)
from trainer_integration.run.run_log import StepLine

__all__ = [
    "WAIT_TARGET",
    "expert_chart",
    "imbalance_chart",
    "loss_chart",
    "memory_chart",
    "share_chart",
    "speed_chart",
]

WAIT_TARGET = 0.02
"""Part of a step that the trainer should wait for data at most, as a median."""

_WIDTH = 1040
_SERIES = tuple(f"#01000{i}" for i in range(1, 9))
_INK, _MUTED, _GRID, _SURFACE, _ALARM = "#020001", "#020002", "#020003", "#020004", "#020005"
_VARIABLES = {colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES, start=1)} | {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--grid)",
    _SURFACE: "var(--surface)",
    _ALARM: "var(--alarm)",
}
_STYLE: Any = {  # the stubs want every key as a literal
    "svg.fonttype": "none",
    "svg.hashsalt": "omniload",
    "font.size": 12,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.xmargin": 0.01,
    "grid.color": _GRID,
    "grid.linewidth": 1,
    "text.color": _INK,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": _MUTED,
    "legend.fontsize": 12,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_SHOWN_SOURCES = 12
_SHOWN_KINDS = 8


def loss_chart(attempts: Sequence[Attempt]) -> str:
    """Draw the loss of every attempt; work that was lost is pale, kills and resumes are marked."""
    with _figure("loss", 300) as (figure, finished):
        axes = figure.add_subplot()
        top = max((line.loss for a in attempts for line in a.steps), default=1.0)
        for attempt, later in zip(attempts, [*attempts[1:], None], strict=True):
            if not attempt.steps:
                continue
            steps, losses = _columns(attempt.steps, lambda line: line.loss)
            back_to = None if later is None else (later.resumed_from or 0)
            if back_to is not None:
                lost = steps >= back_to
                axes.plot(steps[lost], losses[lost], color=_SERIES[7], lw=7, alpha=0.35)
            axes.plot(
                steps, losses, color=_SERIES[0], lw=2, marker="o", ms=_marker_size(len(steps))
            )
            if back_to is not None:
                _mark_return(axes, int(steps[-1]), back_to, attempt.cause, top)
        axes.set_ylabel("cross entropy, nats")
        _step_axis(axes)
    return finished()


def _mark_return(axes: Axes, last_step: int, back_to: int, cause: str | None, top: float) -> None:
    """Mark where an attempt ended, with an arrow back to the step that the next one started from."""
    end = last_step + 0.5
    axes.axvline(end, color=_ALARM, lw=1.5, ls=(0, (4, 3)))
    if last_step >= back_to:
        axes.annotate(
            "",
            xy=(back_to, top),
            xytext=(end, top),
            arrowprops={"arrowstyle": "-|>", "color": _SERIES[7], "lw": 1.5, "shrinkB": 0},
        )
    note = f"{cause or 'stopped'}\nresumed from step {back_to}"
    axes.annotate(
        note, (end, top), (8, 2), textcoords="offset points", color=_INK, va="top", fontsize=12
    )


def share_chart(shares: Shares) -> str:
    """Draw each source's share of the tokens, per step and so far, against its target."""
    order = np.argsort(-shares.total_NS[-1], kind="stable")[:_SHOWN_SOURCES]
    columns = min(3, len(order))
    rows = -(-len(order) // columns)
    steps = np.arange(len(shares.step_NS))
    window = max(3, len(steps) // 10)
    soft_NS = smoothed(shares.step_NS, window)
    with _figure("share", 40 + 200 * rows) as (figure, finished):
        grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
        for axes in grid.flat[len(order) :]:
            axes.set_visible(False)
        for axes, s in zip(grid.flat, order.tolist(), strict=False):
            colour = _SERIES[0]
            axes.plot(
                steps, soft_NS[:, s], color=colour, lw=1.2, alpha=0.5, label=f"{window}-step mean"
            )
            axes.plot(steps, shares.total_NS[:, s], color=colour, lw=2.5, label="so far")
            if shares.step_target_NS is not None and shares.total_target_NS is not None:
                axes.plot(
                    steps,
                    shares.step_target_NS[:, s],
                    color=_SERIES[7],
                    lw=1.2,
                    ls=(0, (4, 3)),
                    label="target at the step",
                )
                axes.plot(
                    steps,
                    shares.total_target_NS[:, s],
                    color=_INK,
                    lw=1.2,
                    ls=(0, (1, 2)),
                    label="target so far",
                )
            axes.set_title(shares.names[s])
            axes.set_ylim(0, max(1e-6, 1.25 * _tallest(shares, soft_NS, s)))
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for axes in grid[-1]:
            axes.set_xlabel("step")
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4)
    return finished()


def _tallest(shares: Shares, soft_NS: NDArray[np.float64], source: int) -> float:
    curves = [soft_NS, shares.total_NS]
    if shares.step_target_NS is not None:
        curves.append(shares.step_target_NS)
    # The first steps' shares so far are those of a handful of documents: let them run out of sight.
    settled = len(soft_NS) // 8
    return max(float(curve[settled:, source].max()) for curve in curves)


def imbalance_chart(steps: Sequence[StepLine]) -> str:
    """Draw the heaviest rank over the mean: as planned beside the bound, and as measured."""
    with _figure("imbalance", 260) as (figure, finished):
        planned_axes, measured_axes = figure.subplots(1, 2)
        at, planned = _columns(steps, lambda line: line.imbalance)
        _, bound = _columns(steps, lambda line: line.bound)
        planned_axes.plot(at, bound, color=_SERIES[7], lw=6, alpha=0.4, label="least possible")
        planned_axes.plot(at, planned, color=_SERIES[0], lw=2, label="planned")
        planned_axes.set_title("Cost by plan, max / mean")
        _, measured = _columns(steps, compute_imbalance)
        measured_axes.plot(at, measured, color=_SERIES[0], lw=1.2, alpha=0.5, label="each step")
        soft = smoothed(measured[:, None], max(3, len(at) // 10))[:, 0]
        measured_axes.plot(at, soft, color=_SERIES[0], lw=2.5, label="moving mean")
        measured_axes.set_title("Measured time, max / mean")
        for axes in (planned_axes, measured_axes):
            axes.set_ylim(bottom=1)
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
            _step_axis(axes)
    return finished()


def expert_chart(steps: Sequence[StepLine]) -> str:
    """Draw the busiest expert over the mean, of the steps that have logged it."""
    with _figure("experts", 260) as (figure, finished):
        axes = figure.add_subplot()
        logged = [line for line in steps if line.expert_imbalance is not None]
        at, ratios = _columns(logged, lambda line: line.expert_imbalance or 0.0)
        axes.plot(at, ratios, color=_SERIES[0], lw=2)
        axes.set_ylabel("busiest / mean, worst layer")
        axes.set_ylim(bottom=1)
        _step_axis(axes)
    return finished()


def speed_chart(steps: Sequence[StepLine]) -> str:
    """Draw the wait for data and the tokens per second of every step, with their medians."""
    with _figure("speed", 260) as (figure, finished):
        wait_axes, speed_axes = figure.subplots(1, 2)
        at, waits = _columns(steps, wait_share)
        wait_axes.bar(at, waits, color=_SERIES[0], width=0.8)
        wait_axes.set_title("Wait for data, part of the step")
        # The first step of an attempt waits for the first plan; it must not flatten the others.
        wait_axes.set_ylim(0, max(1.5 * WAIT_TARGET, 1.2 * float(np.quantile(waits, 0.95))))
        wait_axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
        _level(wait_axes, WAIT_TARGET, f"target {WAIT_TARGET:.0%}", _ALARM)
        _level(wait_axes, float(np.median(waits)), f"median {np.median(waits):.2%}", _INK)
        _, speeds = _columns(
            steps, lambda line: line.tokens / line.seconds if line.seconds > 0 else 0.0
        )
        speed_axes.plot(at, speeds, color=_SERIES[0], lw=2)
        speed_axes.set_title("Tokens per second, all ranks")
        speed_axes.set_ylim(0, 1.15 * float(speeds.max()))
        speed_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
        _level(
            speed_axes, float(np.median(speeds)), f"median {format_count(np.median(speeds))}", _INK
        )
        for axes in (wait_axes, speed_axes):
            _step_axis(axes)
    return finished()


def memory_chart(
    seconds_N: NDArray[np.float64],
    bytes_by_kind: Mapping[str, NDArray[np.int64]],
    ends: Sequence[float],
) -> str:
    """Draw the memory of all roles, stacked; ``ends`` are the times at which an attempt failed."""
    kinds = list(bytes_by_kind)[:_SHOWN_KINDS]
    layers = np.stack([bytes_by_kind[kind] for kind in kinds])
    with _figure("memory", 280) as (figure, finished):
        axes = figure.add_subplot()
        areas: list[Any] = []
        for part in _unbroken(seconds_N):
            areas = axes.stackplot(
                seconds_N[part],
                layers[:, part],
                colors=_SERIES,
                edgecolor=_SURFACE,
                linewidth=1.5,
            )
        for end in ends:
            axes.axvline(end, color=_ALARM, lw=1.5, ls=(0, (4, 3)))
        axes.set_xlabel("seconds since launch")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
        top = 1.05 * max(float(layers.sum(0).max()), 1.0)
        axes.yaxis.set_major_locator(MultipleLocator(2.0 ** np.ceil(np.log2(top / 6))))
        axes.set_ylim(0, top)
        labels = [
            f"{kind}, at most {format_bytes(int(bytes_by_kind[kind].max()))}" for kind in kinds
        ]
        figure.legend(areas[::-1], labels[::-1], loc="outside right upper")
    return finished()


def _unbroken(seconds_N: NDArray[np.float64]) -> list[slice]:
    """Return the stretches without a gap: between attempts there is nothing to sample."""
    gaps = np.diff(seconds_N)
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    bounds = [0, *(np.flatnonzero(gaps > 2.5 * usual) + 1).tolist(), len(seconds_N)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def _level(axes: Axes, value: float, text: str, colour: str) -> None:
    axes.axhline(value, color=colour, lw=1.2, ls=(0, (4, 3)))
    axes.annotate(
        text,
        (1, value),
        (-4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=colour,
        bbox={"facecolor": _SURFACE, "edgecolor": "none", "pad": 1, "alpha": 0.8},
    )


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))


def _marker_size(points: int) -> float:
    return 4 if points <= 80 else 0


def _columns(
    steps: Sequence[StepLine], value: Callable[[StepLine], float]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    at = np.asarray([line.step for line in steps], np.int64)
    return at, np.asarray([value(line) for line in steps], np.float64)


@contextmanager
def _figure(name: str, height: int) -> Iterator[tuple[Figure, Callable[[], str]]]:
    """Set the style and yield a figure, and what writes it as SVG once it is drawn."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
        written = io.StringIO()
        yield figure, lambda: _adapted(written.getvalue(), name)
        figure.savefig(written, format="svg", transparent=True)


def _adapted(svg: str, name: str) -> str:
    """Cut an SVG file down to a part of a page, in the page's colours and font, its ids beginning with ``name``."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
    svg = re.sub(r"font:( \d+)? ([\d.]+)px [^;\"]*", r"font:\1 \2px var(--font)", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", svg)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda at: f' id="{name}-{at[1]}"' if at[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r"#0[12]000\d", lambda found: _VARIABLES[found[0]], svg).strip()
