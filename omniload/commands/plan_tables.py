"""The tables of ``omniload mix plan``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omniload.base.units import format_count
from omniload.commands.check import shares_table
from omniload.commands.display import Cell, colour_of, table
from omniload.mix.config import MixConfig
from omniload.plan.forecast import Forecast, StepFigures
from omniload.source.estimate import SourceProfile

__all__ = ["Rehearsed", "print_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What the first steps would be."""

    steps: tuple[StepFigures, ...]
    kept_S: NDArray[np.float64]
    """Share of each source's drawn tokens that the policy for overlong documents keeps."""

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step; a short one at the end of the data says nothing of the others."""
        most = max(step.capacity for step in self.steps)
        return fmean(step.tokens for step in self.steps if step.capacity == most)

    @property
    def waste(self) -> float:
        """Share of the rows that is padding."""
        return 1.0 - sum(s.tokens for s in self.steps) / sum(s.capacity for s in self.steps)


def print_plan(
    console: Console,
    mix: MixConfig,
    profiles: Sequence[SourceProfile],
    expected: Forecast,
    rehearsed: Rehearsed,
) -> None:
    """Print what a run will draw, and what its first steps would be."""
    console.print(shares_table(mix))
    columns = [("source", False), ("records", True), ("tokens", True)]
    if mix.mix.amounts is not None:
        columns.append(("wanted", True))
    columns += [(f"steps {s.start:,} to {s.stop - 1:,}", True) for s in expected.stages]
    columns += [(heading, True) for heading in ("drawn", "share", "samples", "epochs")]
    rows = [list(_source_cells(mix, s, profiles[s], expected)) for s in range(len(profiles))]
    console.print(table(f"expected after {expected.total.stop:,} steps", columns, rows))
    console.print(_figures_table(rehearsed))


def _source_cells(
    mix: MixConfig, s: int, source: SourceProfile, expected: Forecast
) -> Iterator[Cell]:
    yield Text(source.name, colour_of(s))
    yield f"{source.records:,}"
    yield f"{'' if source.exact else '~'}{format_count(source.tokens)}"
    if mix.mix.amounts is not None:
        yield str(mix.mix.amounts[source.name])
    for stage in expected.stages:
        yield f"{format_count(stage.tokens_S[s])}, {stage.epochs_S[s]:.2f} epochs"
    total = expected.total
    yield format_count(total.tokens_S[s])
    yield f"{total.shares_S[s]:.2%}"
    yield format_count(total.samples_S[s])
    yield Text(f"{total.epochs_S[s]:.2f}", "yellow" if total.epochs_S[s] > 1 else "")


def _figures_table(rehearsed: Rehearsed) -> Table:
    steps = rehearsed.steps
    quotients: list[tuple[str, list[float]]] = [
        ("heaviest rank over the mean, rows in order", [step.imbalance_before for step in steps]),
        ("the same, balanced", [step.imbalance for step in steps]),
        ("the least that these rows allow", [step.bound for step in steps]),
    ]
    rows: list[list[Cell]] = [
        [name, f"{fmean(values):.4f}", f"{max(values):.4f}"] for name, values in quotients
    ]
    wastes = [1 - step.tokens / step.capacity for step in steps]
    rows.append(["padding in the rows", f"{rehearsed.waste:.2%}", f"{max(wastes):.2%}"])
    columns = [("", False), ("mean", True), ("worst step", True)]
    return table(f"the first {len(steps)} steps, planned", columns, rows)
