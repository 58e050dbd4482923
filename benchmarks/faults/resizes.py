"""Ranks of a running data plane leave and come back: how long the remaining ranks are without a batch.

python -m benchmarks.faults.resizes --help
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import click
import numpy as np

from benchmarks.faults.chaos import unbroken
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report
from omniload.actors.opening import open_ray_plane
from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.machine.messages import ResizeAsked
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Changes", "change", "main", "table_of"]

_ROWS, _LENGTH = 24, 1024
"""Rows and length of a step: whole shares for 1, 2, 3, 4, 6 and 8 ranks."""
_STEPS_BETWEEN = 12


class Plane(Protocol):
    """Provider of the ranks' ends of a data plane."""

    def handle(
        self, dp_rank: int, cp_rank: int = 0, asked: ResizeAsked | None = None
    ) -> RankHandle:
        """Return the end of a rank; start the requested ranks that do not exist yet."""
        ...


@dataclass(slots=True)
class Changes:
    """Results of the changes."""

    digests: list[int] = field(default_factory=list)
    """Digest of each step, whatever the ranks."""
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    """Times from the last batch of all ranks to the first one of all ranks after the change, by change."""
    steps_s: list[float] = field(default_factory=list)
    """Times between two steps without a change of the ranks."""


def change(plane: Plane, sizes: Sequence[int], rounds: int, *, step_s: float) -> Changes:
    """Change the number of ranks through ``sizes``, ``rounds`` times; all ranks are clients in this process.

    Args:
        plane: A plane with as many ranks as the first of the sizes.
        sizes: Numbers of ranks.
        rounds: Number of passes over the sizes.
        step_s: The trainer's own time for a step.
    """
    found = Changes()
    clients = [Client(plane.handle(rank)) for rank in range(sizes[0])]

    def take() -> float:
        batches = [client.next_batch() for client in clients]
        assert None not in batches, "the mix has no end"
        had_s = time.monotonic()
        found.digests.append(combined(batch_digest(batch) for batch in batches if batch))
        time.sleep(step_s)  # the trainer's own time
        return had_s

    had_s = take()
    for number in range(rounds * len(sizes)):
        for _ in range(_STEPS_BETWEEN):
            last_s, had_s = had_s, take()
            found.steps_s.append(had_s - last_s - step_s)
        before, dp = len(clients), sizes[(number + 1) % len(sizes)]
        asked = ResizeAsked(dp=dp, step=clients[0].next_step)
        for rank, client in enumerate(clients[:dp]):
            client.resize(rank, dp)
        for client in clients[dp:]:
            client.close()
        clients[dp:] = [Client(plane.handle(rank, 0, asked)) for rank in range(before, dp)]
        last_s, had_s = had_s, take()
        found.gaps_s.setdefault(f"{before} to {dp}", []).append(had_s - last_s - step_s)
    for client in clients:
        client.close()
    return found


def table_of(found: Changes, same: bool) -> Table:
    """Return the times without a batch; ``same``: whether all samples were those of an unbroken run."""
    rows = (("none", found.steps_s), *found.gaps_s.items())
    verdict = "the same samples as" if same else "OTHER SAMPLES THAN"
    return Table(
        columns=("change of ranks", "times", "median ms", "longest ms"),
        rows=tuple(
            (
                name,
                len(gaps_s),
                f"{1e3 * float(np.median(gaps_s)):.0f}",
                f"{1e3 * max(gaps_s):.0f}",
            )
            for name, gaps_s in rows
        ),
        caption=f"Time without a batch, the trainer's own left out; {len(found.digests)} steps, {verdict} in an "
        "unbroken run",
    )


READING = """\
All ranks are clients in one process, and the roles of the plane are processes on Ray; {sources} sources of
pre-tokenised parquet, steps of {tokens:,} tokens, {step_ms:g} ms of the trainer's own time for a step, {between}
steps between two changes. A time without a batch is counted from when all ranks had one batch until all had the next
one. It includes the calls of `resize`, and the joining of new ranks, but not the start of their processes. A lost or
repeated sample would show in the digest of its step, which is compared with an unbroken run in one process."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sizes", default=(4, 3), show_default=True, multiple=True, type=click.IntRange(1))
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1))
@click.option(
    "--step-ms", default=20.0, show_default=True, help="The trainer's own time for a step."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(sizes: tuple[int, ...], rounds: int, step_ms: float, report: bool) -> None:
    """Change the ranks of a running plane and compare every step with an unbroken run.

    \b
    Example:
      python -m benchmarks.faults.resizes --sizes 4 --sizes 3 --sizes 2 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(sources=8, documents=2_000)
    mix = mix_of(
        corpus.names,
        corpus.weights,
        rows=_ROWS,
        micro_rows=1,
        length=_LENGTH,
        runtime={"kind": "ray", "prefetch_steps": 4, "elastic": True},
    )
    if uneven := [dp for dp in sizes if _ROWS % dp]:
        raise click.UsageError(f"{uneven[0]} ranks do not divide {_ROWS} rows; give divisors")
    with tempfile.TemporaryDirectory() as made, ExitStack() as opened:
        folder = Path(made)
        build_sources(folder, corpus)
        spec = PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=sizes[0]))
        found = change(
            opened.enter_context(open_ray_plane(spec)), sizes, rounds, step_s=step_ms / 1e3
        )
        opened.close()
        whole = PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=1))
        same = unbroken(whole, len(found.digests)) == found.digests
    table = table_of(found, same)
    print_table(table)
    if report:
        options = " ".join(f"--sizes {dp}" for dp in sizes)
        path = write_report(
            __file__,
            "resizes",
            "Time without a batch while ranks leave and come back",
            f"python -m benchmarks.faults.resizes {options} --rounds {rounds} --step-ms {step_ms:g}",
            [table],
            READING.format(
                sources=corpus.sources,
                tokens=mix.batch.tokens,
                step_ms=step_ms,
                between=_STEPS_BETWEEN,
            ).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
