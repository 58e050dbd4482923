"""What ``omniload mix simulate`` says of a heavy text source, against runs of it, with one reader and with several.

python -m benchmarks.loaders.simulated --help
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import click
import psutil

from benchmarks.report import Table, print_table, write_report
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.job import Job
from omniload.simulation.plane import simulate
from omniload.simulation.preparing import measured_sources, with_planner, with_runtime
from omniload.simulation.profile import Profile
from omniload.source.sample_corpus import SampleCorpus, build_sample_corpus

__all__ = ["main"]

_LENGTH = 2_048
READING = """\
Ranks are threads that take steps of {tokens:,} tokens each as fast as they come, and touch nothing. Text is tokenised
as it is read, nine tenths of it from one source. A run and its simulation come in turns, each with a new profile.
Other work ran on the machine: a simulation gets as many cores as were left to the run beside it (last but one column),
and the processor time of a step, which other work changes little, stands beside its speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One run, or its simulation."""

    tokens_per_s: float
    cpu_step_s: float
    cores: float
    """Cores that it had, or could have had."""


def _mix_of(corpus: SampleCorpus, kind: str, readers: int, rows: int) -> MixConfig:
    text = {"type": "parquet", "path": "modules/*.parquet", "text": "text"}
    return MixConfig.model_validate(
        {
            "version": 1,
            "seed": 1,
            "tokenizer": corpus.tokenizer.model_dump(),
            "sources": {"heavy": text, "light": text},
            "mix": {"stages": [{"from_step": 0, "weights": {"heavy": 9, "light": 1}}]},
            "pack": {"length": _LENGTH},
            "batch": {"tokens": rows * _LENGTH, "micro_tokens": _LENGTH},
            "loader": {"readers": {"heavy": readers, "light": 1}},
            "runtime": {"kind": kind, "prefetch_steps": 4, "loaders": 1},
        }
    )


def _spent_s() -> tuple[float, float]:
    """Return the processor seconds of this process and all below it, and of the whole machine."""
    ours = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        ours += times.user + times.system
    whole = psutil.cpu_times()
    return ours, whole.user + whole.nice + whole.system + whole.irq + whole.softirq


def _run(spec: PlaneSpec, ranks: int, steps: int) -> _Found:
    """Take steps of a plane; those in which buffers fill do not count."""
    mix = spec.mix
    first = mix.steps_ahead + mix.steps_at_once
    seen: list[tuple[float, tuple[float, float]]] = []
    with ExitStack() as opened:
        plane = opened.enter_context(open_plane(spec))
        clients = [opened.enter_context(Client(plane.handle(rank))) for rank in range(ranks)]
        together = threading.Barrier(ranks, lambda: seen.append((time.perf_counter(), _spent_s())))

        def take(client: Client) -> None:
            for step in range(first + steps):
                if step == first:
                    together.wait()
                batch = client.next_batch()
                assert batch is not None, "the mix has no end"
            together.wait()

        threads = [threading.Thread(target=take, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (began_s, before), (ended_s, after) = seen
    seconds, ours_s = ended_s - began_s, after[0] - before[0]
    others = (after[1] - before[1] - ours_s) / seconds
    return _Found(
        tokens_per_s=steps * mix.batch.tokens / seconds,
        cpu_step_s=ours_s / steps,
        cores=max(0.1, (psutil.cpu_count() or 1) - others),
    )


@contextmanager
def _unseen(_what: str, _total: float) -> Iterator[Callable[[float], None]]:
    yield lambda _: None


def _simulated(spec: PlaneSpec, profile: Profile, cores: float, steps: int) -> _Found:
    job = Job(spec=spec, originals=spec.mix.names, cores=cores, steps=steps)
    profile = with_planner(with_runtime(profile, spec, job, _unseen), job, _unseen)
    found = simulate(job, profile)
    tokens_per_s = steps * spec.mix.batch.tokens / found.seconds
    return _Found(tokens_per_s=tokens_per_s, cpu_step_s=found.cpu_step_s, cores=cores)


@click.command
@click.option("--kind", type=click.Choice(["local", "ray"]), default="ray", show_default=True)
@click.option("--ranks", type=int, multiple=True, default=(1, 2, 4), show_default=True)
@click.option("--readers", type=int, multiple=True, default=(1, 2), show_default=True)
@click.option("--steps", type=click.IntRange(4), default=24, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--rank-tokens", type=click.IntRange(_LENGTH), default=32_768, show_default=True)
@click.option("--report", is_flag=True, help="Write a report.")
def main(
    kind: str, ranks: tuple[int, ...], readers: tuple[int, ...], report: bool, **sizes: int
) -> None:
    """Compare simulations with runs."""
    steps, rounds, rank_tokens = (sizes[name] for name in ("steps", "rounds", "rank_tokens"))
    pairs: dict[tuple[int, int], list[tuple[_Found, _Found]]] = {}
    with tempfile.TemporaryDirectory() as held:
        corpus = build_sample_corpus(Path(held) / "corpus", size=24 << 20)
        for _ in range(rounds):
            for dp in ranks:
                mixes = {n: _mix_of(corpus, kind, n, dp * rank_tokens // _LENGTH) for n in readers}
                spec = PlaneSpec(
                    mix=mixes[readers[0]],
                    base_dir=corpus.folder,
                    tree=ClientPlaceTree.of(dp=dp),
                    cache_dir=Path(held) / "index",
                )
                profile = measured_sources(spec, _unseen)
                for n, mix in mixes.items():
                    spec = replace(spec, mix=mix)
                    real = _run(spec, dp, steps)
                    found = _simulated(spec, profile, real.cores, steps)
                    pairs.setdefault((dp, n), []).append((real, found))
                    click.echo(f"{dp} ranks, {n} readers: {real} {found}")
    rows = []
    for (dp, n), each in pairs.items():
        speeds = [found.tokens_per_s / real.tokens_per_s for real, found in each]
        cpu = [found.cpu_step_s / real.cpu_step_s for real, found in each]
        rows.append(
            (
                dp,
                n,
                f"{median(real.tokens_per_s for real, _ in each) / 1e3:.0f}",
                f"{median(found.tokens_per_s for _, found in each) / 1e3:.0f}",
                f"{median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
                f"{median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
                f"{median(real.cores for real, _ in each):.2f}",
                f"{psutil.getloadavg()[1]:.1f}",
            )
        )
    table = Table(
        caption=f"Simulated over real, runtime {kind}: medians of {rounds} turns, least and most in brackets",
        columns=(
            "ranks", "readers", "run, k tokens/s", "simulated", "speed, simulated over run",
            "CPU of a step, simulated over run", "cores left to it", "load, 5 minutes",
        ),
        rows=tuple(rows),
    )  # fmt: skip
    print_table(table)
    if report:
        words = [
            f"--kind {kind}",
            *(f"--ranks {r}" for r in ranks),
            *(f"--readers {n}" for n in readers),
        ]
        command = f"python -m benchmarks.loaders.simulated {' '.join(words)} --steps {steps} --rounds {rounds}"
        path = write_report(
            f"simulated-{kind}",
            "Simulated jobs against runs",
            command,
            [table],
            READING.format(tokens=rank_tokens),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
