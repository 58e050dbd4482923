"""``omniload mix bench``: the data plane alone, without training."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import click
from rich.text import Text

from omniload.actors.opening import open_plane, runtime_of
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.base.units import counted, format_bytes, format_count
from omniload.client import Client
from omniload.commands.display import Cell, emit_json, output, progress, table
from omniload.commands.faults import sources_in_silence
from omniload.commands.opening import find_sources, open_spec
from omniload.commands.options import (
    cache_option,
    dp_option,
    json_option,
    mix_argument,
    store_option,
)

__all__ = ["bench"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Measurements of a bench."""

    runtime: str
    ranks: int
    steps: int
    """Number of timed steps. The first step is not timed, because it waits until every source is open."""
    tokens: int
    seconds: float
    first_batch_s: float
    """Seconds from the start of the data plane to the first batch."""
    waits_s: tuple[float, ...]
    """Longest wait of a rank, for each step."""
    imbalances: tuple[float, ...]
    bounds: tuple[float, ...]
    microbatches: tuple[tuple[float, float], ...]
    """Cost of the heaviest microbatch over the mean, and the bound of that figure, for each step."""
    peak_memory_bytes: int
    """Peak memory of this process."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@click.command
@mix_argument
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=100,
    show_default=True,
    help="Steps to take; the first step is not timed.",
)
@click.option(
    "--runtime",
    type=click.Choice(["auto", "local", "ray"]),
    help="Runtime to use in place of the one in the file.",
)
@dp_option
@cache_option
@store_option
@json_option
def bench(  # noqa: PLR0913 -- one for each option
    file: Path,
    *,
    steps: int,
    runtime: str | None,
    dp: int,
    cache_dir: Path | None,
    store_timeout: float,
    as_json: bool,
) -> None:
    """Measure the data plane without a trainer: tokens per second, waits, balance.

    One process takes the batches of all ranks as fast as they come.

    \b
    Example:
      omniload mix bench examples/quickstart.yaml --steps 100 --runtime local
    """  # noqa: D301 -- click's own marker
    spec = replace(open_spec(file, dp=dp, cache_dir=cache_dir), num_steps=steps)
    if runtime is not None:
        kind = spec.mix.runtime.model_copy(update={"kind": runtime})
        spec = replace(spec, mix=spec.mix.model_copy(update={"runtime": kind}))
    find_sources(spec, file, sources_in_silence(spec.mix, store_timeout, file))
    measured = _measure(spec, steps, dp)
    if as_json:
        emit_json({"tokens_per_s": measured.tokens_per_s, "measured": measured})
        return
    output().print(table("the data plane alone", [("", False), ("", True)], _rows(measured)))


def _measure(spec: PlaneSpec, steps: int, dp: int) -> _Measured:
    waits, tokens = [], 0
    imbalances, bounds, microbatches = [], [], []
    began_s = time.perf_counter()
    with progress("taking steps", steps) as advance, open_plane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(dp)]
        first_batch_s = timed_from_s = 0.0
        for step in range(steps):
            batches = [client.next_batch() for client in clients]
            # Any rank's batch will do: tokens and balance are those of the whole step on every rank.
            batch = batches[0]
            if batch is None:
                break
            advance(1)
            if step == 0:
                timed_from_s = time.perf_counter()
                first_batch_s = timed_from_s - began_s
                continue
            waits.append(max(client.last_wait_s for client in clients))
            tokens += sum(batch.tokens_by_source.values())
            imbalances.append(batch.imbalance)
            bounds.append(batch.bound)
            microbatches.append((batch.microbatch_imbalance, batch.microbatch_bound))
        seconds = time.perf_counter() - timed_from_s
    if not waits:
        raise ConfigError(
            f"mix.stop {spec.mix.mix.stop!r} ends the run before step 2, and nothing is timed; use a smaller "
            "batch or more data"
        )
    return _Measured(
        runtime=runtime_of(spec),
        ranks=dp,
        steps=len(waits),
        tokens=tokens,
        seconds=seconds,
        first_batch_s=first_batch_s,
        waits_s=tuple(waits),
        imbalances=tuple(imbalances),
        bounds=tuple(bounds),
        microbatches=tuple(microbatches),
        # Linux counts the peak memory in KiB.
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def _rows(measured: _Measured) -> Sequence[Sequence[Cell]]:
    ranks = counted(measured.ranks, "rank")
    return [
        [f"runtime {measured.runtime}, {ranks}", f"{counted(measured.steps, 'step')} timed"],
        [Text("throughput", "bold"), f"{format_count(measured.tokens_per_s)} tokens/s"],
        ["first batch after", f"{measured.first_batch_s:.2f} s"],
        ["wait of the slowest rank, median", f"{1e3 * median(measured.waits_s):.2f} ms"],
        ["the same, longest", f"{1e3 * max(measured.waits_s):.2f} ms"],
        ["heaviest rank over the mean, mean", f"{fmean(measured.imbalances):.4f}"],
        ["the least that the rows allow", f"{fmean(measured.bounds):.4f}"],
        [
            "heaviest microbatch over the mean, mean",
            f"{fmean(m for m, _ in measured.microbatches):.4f}",
        ],
        ["the least of that", f"{fmean(least for _, least in measured.microbatches):.4f}"],
        ["most memory of this process", format_bytes(measured.peak_memory_bytes)],
    ]
