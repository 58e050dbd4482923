"""Evenness of each method that deals long-tailed work, and its time.

python -m benchmarks.planner.balance --help
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Table, print_table, write_report
from omniload.plan.balance_methods import balance, imbalance_of, reachable_bound
from omniload.plan.cost import QuadraticCost, row_costs
from omniload.plan.placement import Distribution, microbatch_bound_of, place

__all__ = ["main"]

REPEATS = 5
"""Runs on one draw. The fastest counts, because other work of the machine can only slow a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Items to deal: ``[N]`` of each column."""

    cost_N: NDArray[np.float64]
    """Cost of each item, which a bin waits for."""
    tokens_N: NDArray[np.float64]
    longest_N: NDArray[np.float64]
    """Tokens of the longest document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Items to deal, drawn anew for every seed."""

    name: str
    num_items: int
    num_bins: int
    draw: Callable[[np.random.Generator], Items]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to deal ``[N]`` weights to a number of bins."""

    name: str
    deal: Callable[[NDArray[np.float64], int], NDArray[np.integer[Any]]]
    sees: str = field(default="cost_N", kw_only=True)
    """Column of the items that decides the dealing."""
    capped: bool = field(default=False, kw_only=True)
    """Whether all bins take the same number of items."""
    quadratic: bool = field(default=False, kw_only=True)
    """Whether its work grows with items times bins."""


def lengths_of(
    rng: np.random.Generator, num: int, *, longest: int, median: float, sigma: float
) -> NDArray[np.int64]:
    """Draw log-normal document lengths, cut at ``longest``."""
    return np.clip(rng.lognormal(np.log(median), sigma, num), 1, longest).astype(np.int64)


def samples(num: int, num_bins: int, longest: int) -> Case:
    """Return whole samples of log-normal length, as in a bucket of variable-length training."""

    def draw(rng: np.random.Generator) -> Items:
        lengths_N = lengths_of(rng, num, longest=longest, median=665, sigma=1.4)
        tokens_N = lengths_N.astype(np.float64)
        cost_N = QuadraticCost(24_576.0, 1.0)(lengths_N)
        return Items(cost_N=cost_N, tokens_N=tokens_N, longest_N=tokens_N)

    return Case(
        name=f"{num:,} samples to {longest // 1024}k", num_items=num, num_bins=num_bins, draw=draw
    )


def rows(num: int, num_bins: int, row_length: int) -> Case:
    """Return packed rows of equal tokens, whose work differs by their documents."""

    def draw(rng: np.random.Generator) -> Items:
        lengths = lengths_of(
            rng, num * row_length // 100, longest=row_length, median=665, sigma=1.4
        )
        # Cut the documents at the ends of rows, so every row is full.
        bounds = np.union1d(np.cumsum(lengths), np.arange(1, num + 1) * row_length)
        bounds = np.concatenate(([0], bounds[bounds <= num * row_length]))
        row_offsets = np.searchsorted(bounds[1:], np.arange(num + 1) * row_length, side="right")
        lengths_P = np.diff(bounds).astype(np.float64)
        return Items(
            cost_N=row_costs(QuadraticCost(768.0, 1.0)(lengths_P), row_offsets),
            tokens_N=row_costs(lengths_P, row_offsets),
            longest_N=np.maximum.reduceat(lengths_P, row_offsets[:-1]),
        )

    return Case(
        name=f"{num:,} rows of {row_length // 1024}k", num_items=num, num_bins=num_bins, draw=draw
    )


def equal_count_differencing(cost_N: NDArray[np.float64], num_bins: int) -> NDArray[np.int64]:
    """Deal by differencing of groups of ``num_bins`` items: the same count in every bin.

    Several post-training frameworks balance in this way; it is written here for comparison only. The number of items
    must be a multiple of the number of bins.
    """
    falling = np.argsort(-cost_N, kind="stable").reshape(-1, num_bins)
    dealings = [(cost_N[row], [[item] for item in row.tolist()]) for row in falling]
    widest = [(float(loads[-1] - loads[0]), i) for i, (loads, _) in enumerate(dealings)]
    heapq.heapify(widest)
    while len(widest) > 1:
        (_, a), (_, b) = heapq.heappop(widest), heapq.heappop(widest)
        (loads_a, items_a), (loads_b, items_b) = dealings[a], dealings[b]
        joined = loads_a + loads_b[::-1]
        order = np.argsort(-joined, kind="stable")
        items = [items_a[i] + items_b[num_bins - 1 - i] for i in order.tolist()]
        joined = joined[order]
        heapq.heappush(widest, (float(joined[-1] - joined[0]), len(dealings)))
        dealings.append((joined, items))
    bins_N = np.empty(len(cost_N), np.int64)
    for b, chosen in enumerate(dealings[-1][1]):
        bins_N[chosen] = b
    return bins_N


def by_rank_in_turns(weight_N: NDArray[np.float64], num_bins: int) -> NDArray[np.int64]:
    """Sort, and give each bin one item in rotation: grouping by length, if weights are lengths."""
    bins_N = np.empty(len(weight_N), np.int64)
    bins_N[np.argsort(-weight_N, kind="stable")] = np.arange(len(weight_N)) % num_bins
    return bins_N


def equal_count(cost_N: NDArray[np.float64], num_bins: int) -> int:
    """Return the smallest number of items per bin that suffices for all items."""
    return -(-len(cost_N) // num_bins)


METHODS = (
    Method("none (contiguous)", lambda c, b: balance(c, b, method="none").bins_N, capped=True),
    Method("round robin", lambda c, b: np.arange(len(c)) % b, capped=True),
    Method("grouped by length", by_rank_in_turns, sees="longest_N", capped=True),
    Method("equal tokens", lambda c, b: balance(c, b).bins_N, sees="tokens_N"),
    Method("KK, equal counts", equal_count_differencing, capped=True, quadratic=True),
    Method(
        "karmarkar_karp", lambda c, b: balance(c, b, method="karmarkar_karp").bins_N, quadratic=True
    ),
    Method(
        "karmarkar_karp, capped",
        lambda c, b: balance(c, b, method="karmarkar_karp", max_count=equal_count(c, b)).bins_N,
        capped=True,
        quadratic=True,
    ),
    Method("greedy_swap", lambda c, b: balance(c, b).bins_N),
    Method(
        "greedy_swap, capped",
        lambda c, b: balance(c, b, max_count=equal_count(c, b)).bins_N,
        capped=True,
    ),
)

CASES = (
    samples(1_024, 32, 32_768),
    samples(4_096, 64, 32_768),
    samples(8_192, 128, 8_192),
    samples(65_536, 1_024, 32_768),
    rows(64, 8, 8_192),
    rows(512, 64, 8_192),
)


def fastest(method: Method, items: Items, num_bins: int) -> tuple[NDArray[np.integer[Any]], float]:
    """Return the dealing and the milliseconds of the fastest of several runs."""
    weight_N = getattr(items, method.sees)
    bins_N = method.deal(weight_N, num_bins)
    runs_s = []
    for _ in range(REPEATS):
        start_s = time.thread_time()
        method.deal(weight_N, num_bins)
        runs_s.append(time.thread_time() - start_s)
    return bins_N, min(runs_s) * 1e3


def measured(case: Case, method: Method, draws: int) -> tuple[str, ...]:
    """Return the row of the table for one method on one case."""
    times_ms, over_mean, over_bound = [], [], []
    for seed in range(draws):
        items = case.draw(np.random.default_rng(seed))
        cost_N = items.cost_N
        cap = equal_count(cost_N, case.num_bins) if method.capped else None
        bins_N, duration_ms = fastest(method, items, case.num_bins)
        times_ms.append(duration_ms)
        loads_B = np.bincount(bins_N, weights=cost_N, minlength=case.num_bins)
        over_mean.append(loads_B.max() / loads_B.mean())
        over_bound.append(loads_B.max() / reachable_bound(cost_N, case.num_bins, cap))
    return (
        case.name,
        str(case.num_bins),
        method.name,
        f"{np.median(times_ms):.2f}",
        f"{np.median(over_mean):.4f}",
        f"{np.median(over_bound):.6f}",
        f"{np.max(over_bound):.6f}",
    )


SIZES = (
    *((8, microbatches, each) for microbatches in (2, 4, 8) for each in (1, 2, 4)),
    *((64, microbatches, each) for microbatches in (2, 4, 8) for each in (1, 2, 4, 8)),
    (256, 5, 1),
    (256, 4, 4),
)
"""Ranks, microbatches of a rank, and rows of a microbatch."""


def placed(size: tuple[int, int, int], draws: int) -> tuple[str, ...]:
    """Return the row of the table for rows that are dealt to ranks and microbatches, as by the planner."""
    ranks, microbatches, each = size
    deal = Distribution(microbatches=microbatches, max_count=each)
    case = rows(ranks * microbatches * each, ranks, 8_192)
    times_ms, ranks_over, over_mean, over_bound, in_order = [], [], [], [], []
    for seed in range(draws):
        cost_N = case.draw(np.random.default_rng(seed)).cost_N
        loads = {}
        for method in ("greedy_swap", "none"):
            start_s = time.thread_time()
            over_ranks, microbatches_N = place(cost_N, ranks, deal, method=method)  # type: ignore[arg-type]
            if method == "greedy_swap":
                times_ms.append((time.thread_time() - start_s) * 1e3)
                ranks_over.append(over_ranks.loads_B.max() / over_ranks.bound)
            places_N = over_ranks.bins_N * microbatches + microbatches_N
            loads[method] = np.bincount(places_N, cost_N, ranks * microbatches)
        in_order.append(imbalance_of(loads["none"]))
        over_mean.append(imbalance_of(loads["greedy_swap"]))
        over_bound.append(over_mean[-1] / microbatch_bound_of(cost_N, ranks, deal))
    return (
        f"{ranks} x {microbatches} x {each}",
        f"{np.median(times_ms):.2f}",
        f"{np.max(ranks_over):.6f}",
        f"{np.median(in_order):.4f}",
        f"{np.median(over_mean):.4f}",
        f"{np.median(over_bound):.6f}",
        f"{np.max(over_bound):.6f}",
    )


READING = """\
{claim} `max/mean` is the cost of the slowest bin to the step. `max/bound` compares it with the least that any dealing
can reach. So a method with a `max/bound` of 1 and a high `max/mean` has met a sample that outweighs a bin, and only
splitting it or a larger step helps. Lengths are log-normal (median 665 tokens, sigma 1.4), cut at the length shown.
Samples cost `24,576 L + L^2`; rows cost the sum over their documents of `768 L + L^2`. "grouped by length" sorts by
the longest document and deals in rotation. "equal tokens" balances token counts, as packing to equal lengths does.
Both ignore the cost of attention. Times are processor times of the call alone: the fastest of {repeats} runs on each
draw, the median over {draws} draws. "capped" allows every bin the same number of items. "KK, equal counts" is
differencing of whole groups, as post-training frameworks commonly use it, written for this comparison and not tuned
for speed. "karmarkar_karp, capped" deals with free counts and then repairs and exchanges. All kinds of KK are left
out of cases of more than {most:,} items, because work of `items * bins` takes seconds there. The bound is looser if a
cap binds, so a gap to it need not be due to the method. The second table deals rows to ranks and to microbatches with
the shown number of rows, as the default strategy does. If a microbatch is one row, the heaviest row is the heaviest
microbatch, and only longer microbatches or shorter rows make it lighter; "at best" is then that row. With
microbatches of two rows and few ranks, ranks come first, and a microbatch may stay heavier."""


def claim(found: tuple[tuple[str, ...], ...]) -> str:
    """Return the results of the default method, case by case, in words."""
    reached = [
        f"{ms} ms to at worst {worst} of the bound ({name} over {bins} bins)"
        for name, bins, method, ms, _, _, worst in found
        if method == "greedy_swap"
    ]
    return f"greedy_swap, the default, takes {'; '.join(reached)}."


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--draws", default=10, show_default=True, type=click.IntRange(1), help="Seeds for each case."
)
@click.option("--most", default=8_192, show_default=True, help="Most items for differencing.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(draws: int, most: int, report: bool) -> None:
    """Compare balancing methods on long-tailed samples and on packed rows.

    \b
    Example:
      python -m benchmarks.planner.balance --draws 3 --no-report
    """  # noqa: D301 -- click's own marker
    found = tuple(
        measured(case, method, draws)
        for case in CASES
        for method in METHODS
        if case.num_items <= most or not method.quadratic
    )
    table = Table(
        columns=("case", "bins", "method", "ms", "max/mean", "max/bound", "worst max/bound"),
        rows=found,
        caption=f"Medians over {draws} draws",
    )
    microbatches = Table(
        columns=(
            "ranks x microbatches x rows",
            "ms",
            "worst rank over bound",
            "microbatch max/mean, in order",
            "microbatch max/mean",
            "microbatch over bound",
            "worst microbatch over bound",
        ),
        rows=tuple(placed(size, draws) for size in SIZES if np.prod(size) <= most),
        caption=f"Heaviest microbatch of packed rows of 8k: medians over {draws} draws",
    )
    for shown in (table, microbatches):
        print_table(shown)
    if report:
        path = write_report(
            __file__,
            "balance",
            "Balancing long-tailed work over bins",
            f"python -m benchmarks.planner.balance --draws {draws} --most {most}",
            [table, microbatches],
            READING.format(claim=claim(found), draws=draws, repeats=REPEATS, most=most).replace(
                "\n", " "
            ),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
