"""Predictions of ``omniload mix simulate`` compared with runs of the job: throughput, processor time and waits.

python -m benchmarks.loaders.simulated --help
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import click

from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.loaders.simulated_jobs import Found, Pace, run
from benchmarks.loaders.simulated_tables import (
    READING,
    Cell,
    Compared,
    rates_table,
    repeats_table,
    roles_table,
    waits_table,
)
from benchmarks.report import print_table, write_report
from omniload.actors.plane import PlaneSpec
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.job import Job
from omniload.simulation.plane import simulate
from omniload.simulation.preparing import with_runtime
from omniload.simulation.profile import Profile
from omniload.simulation.reading import measured_sources
from omniload.simulation.windows import with_planner
from omniload.source.sample_data.corpus import build_sample_corpus

__all__ = ["main"]

_TEXT_LENGTH, _LENGTH = 2_048, 4_096
"""Tokens of a row."""
_WARM_TOKENS = 64 << 20
"""Tokens of the steps that are measured at full speed; their number is limited."""
_SEEDS = 3
_AMPLE = 64.0
"""Cores of a host on which no process waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corpus:
    """The corpus of the jobs."""

    folder: Path
    mix: Callable[[Cell], MixConfig]


def _text(folder: Path) -> _Corpus:
    """Build text that is tokenised while it is read, nine tenths of it from one source."""
    corpus = build_sample_corpus(folder, size=24 << 20)
    text = {"type": "parquet", "path": "modules/*.parquet", "text": "text"}

    def mix(cell: Cell) -> MixConfig:
        rows = cell.ranks * cell.rank_tokens // _TEXT_LENGTH
        return MixConfig.model_validate(
            {
                "version": 1,
                "seed": 1,
                "tokenizer": corpus.tokenizer.model_dump(),
                "sources": {"heavy": text, "light": text},
                "mix": {"stages": [{"from_step": 0, "weights": {"heavy": 9, "light": 1}}]},
                "pack": {"length": _TEXT_LENGTH},
                "batch": {"tokens": rows * _TEXT_LENGTH, "micro_tokens": _TEXT_LENGTH},
                "loader": {"readers": {"heavy": cell.readers, "light": 1}},
                "runtime": {"kind": cell.kind, "prefetch_steps": 4, "loaders": 1},
            }
        )

    return _Corpus(folder=corpus.folder, mix=mix)


def _tokens(folder: Path) -> _Corpus:
    """Build 16 sources of token ids, with weights that differ from their sizes."""
    corpus = MixedSources()
    build_sources(folder, corpus)

    def mix(cell: Cell) -> MixConfig:
        rows = cell.rank_tokens // _LENGTH
        return mix_of(
            corpus.names,
            corpus.weights,
            rows=rows * cell.ranks,
            micro_rows=rows,
            length=_LENGTH,
            runtime={"kind": cell.kind},
        )

    return _Corpus(folder=folder, mix=mix)


@contextmanager
def _unseen(_what: str, _total: float) -> Iterator[Callable[[float], None]]:
    yield lambda _: None


def _simulated(
    spec: PlaneSpec, profile: Profile, paces: Sequence[Pace], cores: float, seed: int
) -> list[Found]:
    """Simulate a job at each pace."""
    found = []
    for pace in paces:
        job = Job(
            spec=spec,
            originals=spec.mix.names,
            cores=cores,
            steps=pace.steps,
            step_s=pace.step_s,
            seed=seed,
        )
        of = simulate(job, profile)
        own = simulate(replace(job, cores=_AMPLE), profile).waits if pace.step_s else None
        step_s = of.seconds / of.steps
        found.append(
            Found(
                steps=of.steps,
                seconds=of.seconds,
                tokens_per_s=of.tokens_per_s,
                by_role_s={each.role: each.cores * step_s for each in of.roles},
                waits=of.waits,
                own=own,
                cores=cores,
                idle=profile.messages[of.runtime].idle,
            )
        )
    return found


def _paces(mix: MixConfig, steps: int, step_times: Sequence[tuple[float, int]]) -> list[Pace]:
    many = steps or min(1_500, max(48, _WARM_TOKENS // mix.batch.tokens))
    timed = [Pace(step_s=step_ms / 1e3, steps=count) for step_ms, count in step_times]
    return [Pace(step_s=0.0, steps=many), *timed]


def _of_runs(paces: Sequence[Pace], runs: Sequence[Sequence[Found]]) -> list[Pace]:
    """Return the paces of a simulation.

    If ranks wait, it has the steps of all turns, because p99 depends on their number.

    Training takes the time of a run's steps without their waits: ranks sleep there and meet, which takes several
    milliseconds on busy cores.
    """
    full, *timed = paces
    found = [full]
    for number, each in enumerate(timed, 1):
        trained_s = median(of_turn[number].trained_s for of_turn in runs)
        found.append(Pace(step_s=trained_s, steps=len(runs) * each.steps))
    return found


_LEAST_FULL = 3
"""Turns at full speed; the first one touches pages of the object store that later ones reuse."""


def _run(spec: PlaneSpec, paces: Sequence[Pace]) -> list[Found]:
    """Run a job at each pace; the first, full speed, also runs between the others, and its median counts."""
    full, *timed = paces
    driven = [full, *(each for pace in timed for each in (pace, full))]
    driven += [full] * (_LEAST_FULL - driven.count(full))
    found = list(zip(driven, run(spec, driven), strict=True))
    at_full = sorted((of for pace, of in found if pace == full), key=lambda of: of.tokens_per_s)
    return [at_full[len(at_full) // 2], *(of for pace, of in found if pace != full)]


@click.command
@click.option("--kind", type=click.Choice(["local", "ray"]), default="ray", show_default=True)
@click.option(
    "--text", is_flag=True, help="A heavy source of text instead of sixteen sources of token ids."
)
@click.option("--ranks", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option(
    "--readers",
    type=int,
    multiple=True,
    default=(1,),
    show_default=True,
    help="Readers of the heavy text.",
)
@click.option("--rank-tokens", type=int, multiple=True, default=(8_192, 65_536), show_default=True)
@click.option(
    "--step-times",
    type=(float, int),
    multiple=True,
    default=((50.0, 160),),
    show_default=True,
    help="Milliseconds of training, and steps with it.",
)
@click.option(
    "--steps", type=click.IntRange(4), help="Steps at full speed; by default by their size."
)
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True)
@click.option("--report", is_flag=True, help="Write a report.")
@click.option("--label", default="", help="Further word in the name of the report's file.")
def main(
    kind: str,
    text: bool,
    ranks: tuple[int, ...],
    readers: tuple[int, ...],
    rank_tokens: tuple[int, ...],
    step_times: tuple[tuple[float, int], ...],
    **how: int | bool | str | None,
) -> None:
    """Compare simulations with runs."""
    cells = [
        Cell(kind=kind, ranks=dp, rank_tokens=tokens, readers=n)
        for tokens in sorted(rank_tokens, reverse=True)
        for dp in sorted(ranks, reverse=True)
        for n in (readers if text else (0,))
    ]
    turns, steps = int(how["turns"] or 1), int(how["steps"] or 0)
    pairs: dict[Cell, Compared] = {}
    with tempfile.TemporaryDirectory() as held:
        corpus = (_text if text else _tokens)(Path(held) / "corpus")
        for dp in sorted(ranks, reverse=True):
            of_size = [cell for cell in cells if cell.ranks == dp]
            pairs |= _compared(of_size, corpus, steps, step_times, turns)
    timed = _paces(corpus.mix(cells[0]), steps, step_times)
    tables = [rates_table(pairs), roles_table(pairs, timed)]
    tables += [waits_table(pairs, timed), repeats_table(pairs, timed)] if step_times else []
    for table in tables:
        print_table(table)
    if how["report"]:
        words = [f"--kind {kind}", *(["--text"] if text else []), *(f"--ranks {r}" for r in ranks)]
        words += [f"--readers {n}" for n in readers if text]
        words += [f"--rank-tokens {n}" for n in rank_tokens]
        words += [f"--step-times {ms:g} {n}" for ms, n in step_times]
        words += [f"--steps {steps}"] if steps else []
        command = f"python -m benchmarks.loaders.simulated {' '.join(words)} --turns {turns}"
        kinds = (*(["text"] if text else []), *([kind] if kind != "ray" else []))
        name = "-".join(("simulated", *kinds, *([str(how["label"])] if how["label"] else [])))
        path = write_report(
            __file__,
            name,
            "Simulated jobs against runs",
            command,
            tables,
            READING.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


def _compared(
    cells: Sequence[Cell],
    corpus: _Corpus,
    steps: int,
    step_times: Sequence[tuple[float, int]],
    turns: int,
) -> dict[Cell, Compared]:
    """Run the jobs of one number of ranks alternately, measure the costs around each run, and simulate them."""
    jobs = {cell: _job(cell, corpus) for cell in cells}
    paces = {cell: _paces(job.spec.mix, steps, step_times) for cell, job in jobs.items()}
    profiles = [_profiles(jobs)]
    runs: dict[Cell, list[list[Found]]] = {cell: [] for cell in cells}
    for _ in range(turns):
        for cell, job in jobs.items():
            runs[cell].append(_run(job.spec, paces[cell]))
            click.echo(f"{cell} run {runs[cell][-1]}")
        # A virtual machine wakes in 0.03 ms for some minutes and in 0.1 ms for others, so no single moment represents
        # all turns.
        profiles.append(_profiles(jobs))
    found = {}
    for cell, job in jobs.items():
        cores = median(each[0].cores for each in runs[cell])
        driven = _of_runs(paces[cell], runs[cell])
        simulated = [
            _simulated(job.spec, each[cell], driven, cores, seed)
            for each in profiles
            for seed in range(_SEEDS)
        ]
        click.echo(f"{cell} simulated {simulated}")
        found[cell] = Compared(runs[cell], simulated)
    return found


def _job(cell: Cell, corpus: _Corpus) -> Job:
    mix = corpus.mix(cell)
    spec = PlaneSpec(
        mix=mix,
        base_dir=corpus.folder,
        tree=ClientPlaceTree.of(dp=cell.ranks),
        cache_dir=corpus.folder.parent / "index",
    )
    return Job(spec=spec, originals=mix.names)


def _profiles(jobs: Mapping[Cell, Job]) -> dict[Cell, Profile]:
    """Measure the costs of each job. Messages are measured once, because they depend only on ranks and samples."""
    found: dict[Cell, Profile] = {}
    for cell, job in jobs.items():
        profile = measured_sources(job.spec, _unseen)
        messages = next((each.messages for each in found.values()), {})
        profile = profile.model_copy(update={"messages": messages})
        found[cell] = with_planner(with_runtime(profile, job.spec, job, _unseen), job, _unseen)
    return found


if __name__ == "__main__":
    main()
