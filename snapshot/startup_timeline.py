"""Geometry of the timeline: a row for each node, a bar for each stage. One unit is one pixel at full width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from omniload.base.units import format_bytes
from snapshot.startup import Attempt, NodeStage, Stage, natural
from snapshot.startup_path import is_meeting
from snapshot.startup_runs import spans_of

__all__ = ["Bar", "Label", "Look", "Spread", "Timeline", "looks_of", "spread_of", "timeline_of"]

_WIDTH, _LEFT, _TOP = 1040.0, 132.0, 64.0
_TALLEST_ROW, _LOWEST_ROW, _ROWS_HEIGHT = 26.0, 2.0, 1400.0
_LABEL_EVERY = 14.0
_LONGEST_LABEL = 18
_MOST_BARS = 40_000
_MOST_SPANS = 32
_THINNEST = 0.75
_TICKS = 8
_NS = 1e9
_KNOWN = (
    "queue",
    "image",
    "environment",
    "process_group",
    "model_build",
    "checkpoint_load",
    "data_plane",
    "first_step",
)
"""Stages that have the same colour on every page, by number."""

State = Literal["done", "unfinished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a stage is told from the others."""

    colour: int
    """Number of the colour; colours of the known stages are told apart by every kind of eye."""
    striped: bool
    """Other stages share the colours and have stripes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stage, or a piece of one, on a row."""

    x: float
    y: float
    width: float
    height: float
    stage: str
    state: State
    title: str


@dataclass(frozen=True, slots=True)
class Label:
    """A text at a place: a node beside its row, or seconds at a tick."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All that is drawn."""

    width: float
    height: float
    left: float
    top: float
    path: tuple[Bar, ...]
    """The critical path, above the rows."""
    bars: tuple[Bar, ...]
    nodes: tuple[Label, ...]
    """Names of as many nodes as there is room for."""
    ticks: tuple[Label, ...]
    hidden: int
    """Nodes that are not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds of the nodes of a stage on a line from 0 to 1, where 1 is the slowest node of any."""

    marks: tuple[float, ...]
    median: float


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """Return a look for each stage."""
    looks: dict[str, Look] = {}
    others = 0
    for name in names:
        if name in _KNOWN:
            looks[name] = Look(colour=_KNOWN.index(name), striped=False)
        else:
            looks[name] = Look(colour=others % len(_KNOWN), striped=True)
            others += 1
    return looks


def timeline_of(attempt: Attempt) -> Timeline:
    """Lay out an attempt: full rows with names for a few nodes, thin ones for hundreds."""
    rows: dict[str, list[tuple[Stage, NodeStage]]] = {node: [] for node in attempt.nodes}
    for stage in attempt.stages:
        for each in stage.nodes:
            rows[each.node].append((stage, each))
    shown = _shown(rows)
    pitch = min(_TALLEST_ROW, max(_LOWEST_ROW, _ROWS_HEIGHT / max(1, len(shown))))
    last_ns = max([attempt.end_ns, *(n.end_ns or 0 for s in attempt.stages for n in s.nodes)])
    scale = _Scale(attempt.begin_ns, max(1, last_ns - attempt.begin_ns))
    bars: list[Bar] = []
    for row, node in enumerate(shown):
        of_row = [
            bar
            for stage, each in rows[node]
            for bar in _bars(stage.name, each, _TOP + row * pitch, pitch, attempt, scale)
        ]
        # A stage within another one is drawn over it; one without an end, thin, over all.
        bars += sorted(of_row, key=lambda bar: (bar.state == "unfinished", -bar.width))
    step = math.ceil(_LABEL_EVERY / pitch)
    return Timeline(
        width=_WIDTH,
        height=_TOP + len(shown) * pitch + 28,
        left=_LEFT,
        top=_TOP,
        path=tuple(_path_bars(attempt, scale)),
        bars=tuple(bars),
        nodes=tuple(
            Label(_TOP + (row + 0.5) * pitch, _short(node))
            for row, node in enumerate(shown)
            if row % step == 0
        ),
        ticks=tuple(scale.ticks()),
        hidden=len(rows) - len(shown),
    )


def spread_of(stage: Stage, attempt: Attempt) -> Spread | None:
    """Return where the nodes of a stage lie; ``None`` where no node ended it."""
    most = max((each.max_s or 0.0 for each in attempt.stages), default=0.0)
    if stage.median_s is None or not most:
        return None
    took = {round(each.seconds / most, 3) for each in stage.nodes if each.seconds is not None}
    return Spread(marks=tuple(sorted(took)), median=stage.median_s / most)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Time to pixels."""

    begin_ns: int
    length_ns: int

    def x(self, time_ns: int) -> float:
        part = (time_ns - self.begin_ns) / self.length_ns
        return _LEFT + (_WIDTH - _LEFT - 12) * part

    def ticks(self) -> list[Label]:
        """Return about eight round numbers of seconds."""
        length_s = self.length_ns / _NS
        rough = length_s / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [
            Label(self.x(self.begin_ns + round(i * step * _NS)), f"{i * step:.{digits}f} s")
            for i in range(int(length_s / step + 1e-9) + 1)
        ]


def _shown(rows: dict[str, list[tuple[Stage, NodeStage]]]) -> list[str]:
    """Return the nodes to draw: all, or those that took longest where there are very many."""
    left = _MOST_BARS
    shown: list[str] = []
    took = {
        node: sum(each.seconds or 0 for stage, each in row if not is_meeting(stage.name))
        for node, row in rows.items()
    }
    for node in sorted(rows, key=lambda node: -took[node]):
        left -= sum(min(len(each.runs), _MOST_SPANS) for _, each in rows[node])
        if shown and left < 0:
            break
        shown.append(node)
    return sorted(shown, key=natural)


def _bars(
    name: str, each: NodeStage, y: float, pitch: float, attempt: Attempt, scale: _Scale
) -> list[Bar]:
    last_ns = max(attempt.end_ns, each.begin_ns)
    spans = spans_of(each.runs, last_ns)
    if len(spans) > _MOST_SPANS:
        spans = [(spans[0][0], spans[-1][1])]
    state: State = "failed" if each.error else "unfinished" if each.end_ns is None else "done"
    height = pitch * (0.72 if pitch >= 8 else 1.0) * (0.4 if state == "unfinished" else 1.0)
    title = _title(name, each, attempt.begin_ns)
    return [
        Bar(
            x=scale.x(begin),
            y=y + (pitch - height) / 2,
            width=max(_THINNEST, scale.x(end) - scale.x(begin)),
            height=height,
            stage=name,
            state=state,
            title=title,
        )
        for begin, end in spans
    ]


def _path_bars(attempt: Attempt, scale: _Scale) -> list[Bar]:
    return [
        Bar(
            x=scale.x(part.begin_ns),
            y=26,
            width=max(_THINNEST, scale.x(part.end_ns) - scale.x(part.begin_ns)),
            height=18,
            stage=part.stage,
            state="done",
            title=f"critical path · {part.stage} · {(part.end_ns - part.begin_ns) / _NS:.2f} s"
            f" · {part.node}",
        )
        for part in attempt.path
        if part.stage is not None
    ]


def _title(name: str, each: NodeStage, begin_ns: int) -> str:
    words = [each.node, name]
    begin_s = (each.begin_ns - begin_ns) / _NS
    if each.end_ns is None or each.seconds is None:
        words.append(f"from {begin_s:.2f} s, no end")
    else:
        end_s = (each.end_ns - begin_ns) / _NS
        words.append(f"{each.seconds:.2f} s, from {begin_s:.2f} to {end_s:.2f}")
    if len(each.runs) > 1:
        words.append(f"{len(each.runs)} runs")
    words += (f"{tier} {format_bytes(size)}" for tier, size in each.bytes.items())
    if each.error:
        words.append(f"failed: {each.error}")
    return " · ".join(words)


def _short(node: str) -> str:
    """Return a name that fits; the end tells nodes apart better than the beginning."""
    return node if len(node) <= _LONGEST_LABEL else "…" + node[1 - _LONGEST_LABEL :]
