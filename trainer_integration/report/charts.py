"""The charts of a report: what each shows, in words, and the lines that ``charts.js`` draws for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omniload.base.state import Json, JsonObject
from omniload.base.units import format_bytes, format_count
from trainer_integration.report.figures import shown_sources
from trainer_integration.report.run_summary import Evaluated, RunSummary, Shares, excess
from trainer_integration.run.run_log import MOST_EXPERTS

__all__ = ["WAIT_TARGET", "Chart", "Line", "Panel", "charts_of", "over_text"]

WAIT_TARGET = 0.02
"""Largest share of a step that the trainer should wait for data, as a median."""
_COLOURS = 8
_DASHES, _DOTS = "5 3", "1 3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a panel."""

    key: str
    """Key of the line in the figures."""
    label: str
    colour: int
    """Number of a colour of the page, from 1."""
    dash: str | None = None
    is_sparse: bool = False
    """Whether it has values at only a few steps, which are joined and marked."""

    def to_json(self) -> JsonObject:
        """Return it in the form that ``charts.js`` reads."""
        dash: JsonObject = {} if self.dash is None else {"dash": self.dash}
        named: JsonObject = {"key": self.key, "label": self.label, "colour": self.colour, **dash}
        return {**named, "sparse": True} if self.is_sparse else named


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One drawing."""

    id: str
    title: str
    lines: tuple[Line, ...]
    format: str = "plain"
    """Format of values: ``plain``, ``percent``, ``count``, ``bytes``."""
    floor: float | None = None
    """Lowest value of the vertical axis, unless a line goes below it."""
    quantile: float | None = None
    """Share of all values that the axis must contain; a few above it are cut."""
    level: tuple[float, str] | None = None
    """A value to compare with, and its name."""
    of: str = "figures"
    """``memory`` for figures with times of their own."""
    is_small: bool = False
    has_lost_work: bool = False

    def is_held_by(self, figures: JsonObject) -> bool:
        """Return whether the figures of a run (``run_figures``) contain any of its lines."""
        held = figures[self.of]
        return isinstance(held, dict) and any(line.key in held for line in self.lines)

    def to_json(self) -> JsonObject:
        """Return it in the form that ``charts.js`` reads."""
        options = {"floor": self.floor, "quantile": self.quantile}
        levels: list[Json] = []
        if self.level is not None:
            levels.append({"value": self.level[0], "label": self.level[1]})
        return {
            "id": self.id,
            "lines": [line.to_json() for line in self.lines],
            "format": self.format,
            "levels": levels,
            "of": self.of,
            "small": self.is_small,
            "lost": self.has_lost_work,
            **{name: value for name, value in options.items() if value is not None},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels under one heading, with a description in words for readers who cannot see them."""

    title: str
    caption: str
    panels: tuple[Panel, ...]


def charts_of(summary: RunSummary, shares: Shares, memory_kinds: Sequence[str]) -> list[Chart]:
    """Return the charts of a run.

    Args:
        summary: Figures of the run.
        shares: Shares of its sources.
        memory_kinds: Kinds of roles whose memory was sampled at least twice.
    """
    charts = [
        _of_loss(summary),
        *([_of_evaluations(summary.evaluations)] if summary.evaluations else []),
        _of_shares(summary, shares),
        _of_ranks(summary),
        _of_speed(summary),
    ]
    if not math.isnan(summary.expert_imbalance):
        charts.append(_of_experts(summary))
    if memory_kinds:
        charts.append(_of_memory(summary, memory_kinds))
    return charts


def _panel(key: str, title: str, **options: Any) -> Panel:  # noqa: ANN401 -- fields of a panel
    """Return a panel of a single figure."""
    lines = (Line(key=key, label=title, colour=1),)
    return Panel(id=f"plot-{key}", title=title, lines=lines, **options)


def _of_loss(summary: RunSummary) -> Chart:
    text = f"Mean cross entropy fell from {summary.first_loss:.3f} to {summary.last_loss:.3f} nats."
    if summary.repeated_steps:
        text += (
            f" {summary.repeated_steps} of the steps went with a killed attempt (pale) and ran again "
            "from the checkpoint. Numbered lines show where attempts ended."
        )
    return Chart(
        title="Training",
        caption=text,
        panels=(
            _panel("loss", "Loss, nats per token", has_lost_work=True),
            _panel("lr", "Learning rate", floor=0.0, is_small=True),
            # Otherwise a spike would press all other steps onto the axis.
            _panel("grad_norm", "Gradient norm", floor=0.0, quantile=0.99, is_small=True),
        ),
    )


def _of_evaluations(evaluations: Sequence[Evaluated]) -> Chart:
    first, last = evaluations[0], evaluations[-1]
    names = sorted(last.losses, key=lambda name: -last.losses[name])
    text = (
        f"Cross entropy on the evaluation mix, mean of the sources ({len(names)}): {first.mean:.3f} "
        f"nats a label after step {first.step}, {last.mean:.3f} after step {last.step}."
    )
    if len(names) > _COLOURS:
        text += f" Drawn: the {_COLOURS} of the highest loss."
    lines = tuple(
        Line(key=f"evaluation/{name}", label=name, colour=i + 1, is_sparse=True)
        for i, name in enumerate(names[:_COLOURS])
    )
    panel = Panel(id="plot-evaluation", title="Loss, nats a label", lines=lines)
    return Chart(title="Evaluation", caption=text, panels=(panel,))


def _of_shares(summary: RunSummary, shares: Shares) -> Chart:
    offs = [abs(s.points_off) for s in summary.sources if s.points_off is not None]
    if not offs or math.isnan(max(offs)):
        text = (
            "Share of all tokens; the weights of this mix count samples, so tokens have no target."
        )
    else:
        text = (
            "Share of the tokens trained on, against the weights of the mix. At the end the source "
            f"farthest from its target is off by {max(offs):.2f} percentage points."
        )
    kinds: list[tuple[str, str, int, str | None]] = [
        ("share", "of late", 5, None),
        ("total", "so far", 1, None),
    ]
    if shares.step_target_NS is not None:
        kinds += [("target", "target at the step", 8, _DASHES)]
        kinds += [("total_target", "target so far", 4, _DOTS)]
    panels = tuple(
        Panel(
            id=f"plot-share-{i}",
            title=name,
            lines=tuple(
                Line(key=f"{kind}/{name}", label=label, colour=colour, dash=dash)
                for kind, label, colour, dash in kinds
            ),
            format="percent",
            floor=0.0,
            quantile=0.98,
            is_small=True,
        )
        for i, name in enumerate(shown_sources(shares))
    )
    return Chart(title="Shares of the sources", caption=text, panels=panels)


def _of_ranks(summary: RunSummary) -> Chart:
    text = (
        f"Planned cost of the heaviest rank over the mean: median {summary.imbalance:.4f}, "
        f"{over_text(summary.over_bound)} above what these rows allow at best. "
        f"Measured time of the passes: median {summary.compute_imbalance:.3f}."
    )
    planned = (
        Line(key="bound", label="least possible", colour=8, dash=_DASHES),
        Line(key="imbalance", label="planned", colour=1),
    )
    return Chart(
        title="Evenness of the ranks",
        caption=text,
        panels=(
            Panel(
                id="plot-planned",
                title="Cost by plan, max / mean",
                lines=planned,
                floor=1.0,
                is_small=True,
            ),
            _panel(
                "compute_imbalance",
                "Measured time, max / mean",
                floor=1.0,
                quantile=0.99,
                is_small=True,
            ),
        ),
    )


def _of_speed(summary: RunSummary) -> Chart:
    text = (
        f"Median wait for data {summary.wait_share:.2%} of a step (target {WAIT_TARGET:.0%}); "
        f"median speed {format_count(summary.tokens_per_s)} tokens per second."
    )
    target = (WAIT_TARGET, f"target {WAIT_TARGET:.0%}")
    return Chart(
        title="Wait and speed",
        caption=text,
        panels=(
            _panel(
                "wait_share",
                "Wait for data, part of the step",
                format="percent",
                floor=0.0,
                quantile=0.95,
                level=target,
                is_small=True,
            ),
            _panel(
                "tokens_per_s",
                "Tokens per second, all ranks",
                format="count",
                floor=0.0,
                is_small=True,
            ),
        ),
    )


def _of_experts(summary: RunSummary) -> Chart:
    text = (
        "Token slots of the busiest expert over the mean of its layer, in the worst layer, over all "
        f"ranks: median {summary.expert_imbalance:.3f}. The balance loss pulls it towards 1."
    )
    panels = [
        _panel("expert_imbalance", "Busiest / mean, worst layer", floor=1.0),
        _panel("balance_loss", "Balance loss", is_small=True),
        _panel("router_entropy", "Entropy of the routers, nats", is_small=True),
        _panel("z_loss", "z-loss of the routers", floor=0.0, is_small=True),
        _panel(
            "drop_rate", "Choices that were dropped", format="percent", floor=0.0, is_small=True
        ),
    ]
    if not math.isnan(summary.drop_rate):
        text += f" Choices that found no room at their expert: {summary.drop_rate:.2%}."
    if 0 < len(summary.expert_slots) <= MOST_EXPERTS:
        panels.append(_of_expert_loads(summary.expert_slots))
    return Chart(title="Evenness of the experts", caption=text, panels=tuple(panels))


def _of_expert_loads(slots: Sequence[int]) -> Panel:
    """Return a panel with a line for each expert; of many experts, those that were busiest and idlest at the end."""
    order = sorted(range(len(slots)), key=lambda expert: -slots[expert])
    half = _COLOURS // 2
    shown = sorted(order if len(order) <= _COLOURS else order[:half] + order[-half:])
    title = "Load of each expert / mean, all layers"
    if len(shown) < len(slots):
        title += f": the {half} busiest and the {half} idlest of {len(slots)}"
    lines = tuple(
        Line(key=f"expert_load/{expert}", label=f"expert {expert}", colour=i + 1)
        for i, expert in enumerate(shown)
    )
    return Panel(id="plot-expert-load", title=title, lines=lines, floor=0.0, quantile=0.99)


def _of_memory(summary: RunSummary, kinds: Sequence[str]) -> Chart:
    peaks = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in summary.peak_bytes.items())
    text = f"Proportional set size of all processes of a kind, shared pages counted once. Greatest: {peaks}."
    lines = tuple(
        Line(key=kind, label=kind, colour=i + 1) for i, kind in enumerate(kinds[:_COLOURS])
    )
    panel = Panel(
        id="plot-memory", title="By role", lines=lines, format="bytes", floor=0.0, of="memory"
    )
    return Chart(title="Memory by role", caption=text, panels=(panel,))


def over_text(ratio: float) -> str:
    """Return how far a ratio to a least value is above it, in words."""
    over = excess(ratio)
    return "none" if over < 5e-7 else f"{over:.1e}" if over < 1e-4 else f"{over:.3%}"
