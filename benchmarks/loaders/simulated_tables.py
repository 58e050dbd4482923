"""Comparisons of simulations with jobs: tables of runs and simulations side by side.

A figure of a simulation agrees with that of the runs if it is within 15 % of it. Runs differ among themselves too. If
they are further apart than that, a simulation can only be expected to lie within their range.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TypeAlias

from benchmarks.loaders.simulated_jobs import Found, Pace
from benchmarks.report import Table
from omniload.simulation.figures import Waits

__all__ = [
    "READING",
    "Cell",
    "Compared",
    "Pairs",
    "rates_table",
    "repeats_table",
    "roles_table",
    "waits_table",
]

READING = """\
Ranks only take batches. In runs on Ray they are separate processes, in one process they are threads. A run is driven
at full speed, each rank by itself, and with several training times, one after another, at which all ranks begin
together; the wait of the step is then the longest wait of a rank for its batch. Ranks sleep and meet, so the training
time in the simulation is the time of a run's step without its wait. At full speed a run has three paces or more, and
the median one counts. The costs are measured anew for each number of ranks, as a user would measure them, before each
turn of its runs and after the last; the cost of messages is measured once for all its sizes. Each job is compared
with simulations of all these profiles, with some seeds each, which decide the delays of messages. A simulation gets
as many cores as other work left to the runs at full speed. Figures are medians, and ratios are those of the medians;
the range of single runs and simulations is in brackets. Waits of runs are those of all their turns together, and a
simulation has as many steps as all of them. Runs apart is the largest figure of a turn over the smallest. Idle beside
work is the part of the wanted core time that was not granted although a core was idle; in the planes whose messages
are measured, a simulation finds this part itself. A figure agrees if it is within 15 % of that of the runs, or if it
is no further from that than the runs are from each other. Runs against runs: every pair of turns of a job is
compared, the larger figure over the smaller. No simulation can be expected to be closer to a run than another run
is. Own waits leave out the time in which the kernel kept a rank from a core although it was ready to run, by the
kernel's own account of the thread (schedstat), and the last column says which part of the longest twentieth of the
waits, in the median, that time is; a simulation finds them on as many cores as there are processes.
"""
AGREES = 0.15
"""Largest relative difference that counts as agreement."""
Row: TypeAlias = tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One job that is compared."""

    kind: str
    ranks: int
    rank_tokens: int
    readers: int
    """Readers of the heavy source, if sources are text."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A job at each pace."""

    runs: Sequence[Sequence[Found]]
    """Results of each turn, at each pace."""
    simulated: Sequence[Sequence[Found]]
    """Results of each profile and seed, at each pace."""

    def at(self, pace: int) -> tuple[list[Found], list[Found]]:
        """Return runs and simulations of a pace."""
        return [each[pace] for each in self.runs], [each[pace] for each in self.simulated]


Pairs = Mapping[Cell, Compared]


def rates_table(pairs: Pairs) -> Table:
    """Return tokens per second and processor time at full speed."""
    rows: list[Row] = []
    for cell, compared in pairs.items():
        runs, simulated = compared.at(0)
        speeds = [each.tokens_per_s for each in runs]
        rows.append(
            (
                cell.kind,
                cell.ranks,
                cell.readers or "",
                f"{cell.rank_tokens:,}",
                _spread([each.tokens_per_s / 1e6 for each in runs]),
                _spread([each.tokens_per_s / 1e6 for each in simulated]),
                _ratio(runs, simulated, lambda each: each.tokens_per_s),
                *_agreement(median(speeds), [each.tokens_per_s for each in simulated], speeds),
                _ratio(runs, simulated, lambda each: each.cpu_step_s),
                f"{median(each.used for each in runs):.2f}",
                f"{median(each.used for each in simulated):.2f}",
                f"{median(each.cores for each in runs):.2f}",
                f"{median(each.idle for each in runs):.1%}",
                f"{median(each.idle for each in simulated):.1%}",
            )
        )
    return Table(
        caption="At full speed",
        columns=(
            "runtime", "ranks", "readers", "tokens a rank and step", "run, million tokens/s", "simulated",
            "speed, simulated over run", "runs apart", "agrees", "CPU of a step, simulated over run",
            "cores in use, run", "simulated", "cores left to it", "idle beside work, run", "in its planes",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def roles_table(pairs: Pairs, paces: Sequence[Pace]) -> Table:
    """Return processor time of a step by role, simulated over run."""
    rows: list[Row] = []
    roles = list(next(iter(pairs.values())).simulated[0][0].by_role_s)
    for cell, compared in pairs.items():
        for number, pace in enumerate(paces):
            runs, simulated = compared.at(number)
            ratios = [
                f"{median(each.by_role_s[role] for each in runs) * 1e3:.3f}: "
                + _ratio(runs, simulated, lambda each, role=role: each.by_role_s[role])  # type: ignore[misc]
                for role in roles
            ]
            rows.append((cell.ranks, f"{cell.rank_tokens:,}", f"{pace.step_s * 1e3:.0f}", *ratios))
    return Table(
        caption="Processor time of a step in ms by role: of runs, and simulated over that; a node is Ray's own "
        "processes and the one that opened the job",
        columns=("ranks", "tokens a rank and step", "sleep, ms", *roles),
        rows=tuple(rows),
    )


def waits_table(pairs: Pairs, paces: Sequence[Pace]) -> Table:
    """Return waits with a training time: mean, median and 99th percentile of all turns together."""
    rows: list[Row] = []
    for cell, compared in pairs.items():
        for number, pace in enumerate(paces[1:], 1):
            runs, simulated = compared.at(number)
            together = Waits.of([wait_s for each in runs for wait_s in each.waits_s])
            cells: list[str] = []
            for figure in ("mean_s", "p99_s"):
                found = [getattr(each.waits, figure) for each in simulated]
                ours, theirs = getattr(together, figure), [getattr(r.waits, figure) for r in runs]
                cells += [f"{ours * 1e3:.2f}", _spread([each * 1e3 for each in found])]
                cells += [
                    f"{median(found) / max(ours, 1e-12):.2f}",
                    *_agreement(ours, found, theirs),
                ]
            middle = _spread([each.waits.p50_s * 1e3 for each in simulated])
            # Whole steps, because a job pays the longest wait of each step, which varies by chance.
            step = _ratio(runs, simulated, lambda each: each.seconds / each.steps)
            rows.append(
                (
                    cell.ranks,
                    f"{cell.rank_tokens:,}",
                    f"{pace.step_s * 1e3:.0f}",
                    f"{median(each.trained_s for each in runs) * 1e3:.1f}",
                    *cells,
                    f"{together.p50_s * 1e3:.2f}",
                    middle,
                    step,
                )
            )
    turns = len(next(iter(pairs.values())).runs)
    counts = ", ".join(
        f"{pace.steps} steps with a sleep of {pace.step_s * 1e3:.0f} ms" for pace in paces[1:]
    )
    parts = ("run", "simulated", "simulated over run", "runs apart", "agrees")
    of_figures = [f"{figure}, {part}" for figure in ("mean", "p99") for part in parts]
    return Table(
        caption=f"Waits of a step in ms where training takes a while, {counts} in each of {turns} turns",
        columns=(
            "ranks", "tokens a rank and step", "sleep, ms", "training, ms", *of_figures, "p50, run", "p50, simulated",
            "step with its wait, simulated over run",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def repeats_table(pairs: Pairs, paces: Sequence[Pace]) -> Table:
    """Return how far runs are from each other, and simulations from runs, with all waits and with own waits."""
    rows: list[Row] = []
    for cell, compared in pairs.items():
        for step_s in dict.fromkeys(pace.step_s for pace in paces[1:]):
            same = [n for n, pace in enumerate(paces) if pace.step_s == step_s]
            runs = [each for n in same for each in compared.at(n)[0]]
            simulated = [each for n in same for each in compared.at(n)[1]]
            kept = f"{median(each.kept for each in runs):.2f}"
            for name, figure in (("mean", "mean_s"), ("p50", "p50_s"), ("p99", "p99_s")):
                cells: list[str] = []
                for waits in ("waits", "own"):
                    ours, theirs = (
                        [getattr(getattr(each, waits), figure) for each in side]
                        for side in (runs, simulated)
                    )
                    cells += [
                        _spread([each * 1e3 for each in ours]),
                        _spread(_apart(ours)),
                        f"{median(theirs) / max(median(ours), 1e-12):.2f}",
                    ]
                rows.append(
                    (
                        cell.ranks,
                        f"{cell.rank_tokens:,}",
                        f"{step_s * 1e3:.0f}",
                        name,
                        len(runs),
                        *cells,
                        kept,
                    )
                )
    parts = ("run, ms", "run over run", "simulated over run")
    own = (f"own, {part}" for part in parts)
    return Table(
        caption="Runs against runs: waits of a step",
        columns=(
            "ranks", "tokens a rank and step", "sleep, ms", "figure", "turns", *parts, *own,
            "no core, of the longest twentieth",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _apart(figures: Sequence[float]) -> list[float]:
    """Return the ratio of each pair of figures, the larger over the smaller; 1 if there is only one."""
    return [max(pair) / max(min(pair), 1e-12) for pair in combinations(figures, 2)] or [1.0]


def _agreement(ours: float, simulated: Sequence[float], turns: Sequence[float]) -> tuple[str, str]:
    """Return how far the turns of a run are apart, and whether the simulation agrees with them.

    Args:
        ours: The figure of all turns together.
        simulated: The figure of each simulation.
        turns: The figure of each turn.
    """
    apart = max(turns) / max(min(turns), 1e-12)
    ratio = median(simulated) / max(ours, 1e-12)
    off = max(ratio, 1 / max(ratio, 1e-12))
    if off <= 1 + AGREES:
        return f"{apart:.2f}", f"within {AGREES:.0%}"
    return f"{apart:.2f}", "as runs do" if off <= apart else "no"


def _ratio(
    runs: Sequence[Found], simulated: Sequence[Found], figure: Callable[[Found], float]
) -> str:
    """Return the ratio of the medians, and the furthest ratios."""
    ours, theirs = [figure(each) for each in simulated], [figure(each) for each in runs]
    middle, low, high = (
        of / max(by, 1e-12)
        for of, by in (
            (median(ours), median(theirs)),
            (min(ours), max(theirs)),
            (max(ours), min(theirs)),
        )
    )
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
