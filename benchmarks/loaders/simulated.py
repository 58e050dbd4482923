"""What ``omniload mix simulate`` says of a job, against runs of it: throughput, processor time, and waits.

python -m benchmarks.loaders.simulated --help
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.loaders.simulated_jobs import Found, Pace, run
from benchmarks.report import Table, print_table, write_report
from omniload.actors.plane import PlaneSpec
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.job import Job
from omniload.simulation.plane import simulate
from omniload.simulation.preparing import with_runtime
from omniload.simulation.profile import Profile
from omniload.simulation.reading import measured_sources
from omniload.simulation.windows import with_planner
from omniload.source.sample_corpus import build_sample_corpus

__all__ = ["main"]

_TEXT_LENGTH, _LENGTH = 2_048, 4_096
"""Tokens of a row."""
_WARM_TOKENS = 64 << 20
"""As many steps are measured at full speed as have so many tokens, within limits."""
READING = """\
Ranks touch nothing. Of runs on Ray they are processes of their own, in one process threads. A run is driven at full
speed, each rank by itself, and with times that training takes in turn, at which all ranks begin together: what the last
of them waits for its batch is the wait of the step. Of full speed the middle one of three turns or more counts. What
things take is measured anew for each run, as whoever asks has it, once before and once after it: each run is compared
with simulations of two profiles, and a slow moment of the machine is likelier to be one of all three. Each profile is
simulated with some seeds, which decide how late messages are: in brackets stands how far all of them go. A simulation
gets as many cores as were left to the run at full speed beside other work."""
_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One job that is compared."""

    kind: str
    ranks: int
    rank_tokens: int
    readers: int
    """Of the heavy source, where sources are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corpus:
    """What jobs read."""

    folder: Path
    mix: Callable[[_Cell], MixConfig]


def _text(folder: Path) -> _Corpus:
    """Build text that is tokenised as it is read, nine tenths of it from one source."""
    corpus = build_sample_corpus(folder, size=24 << 20)
    text = {"type": "parquet", "path": "modules/*.parquet", "text": "text"}

    def mix(cell: _Cell) -> MixConfig:
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
    """Build 16 sources of token ids, of weights unlike sizes."""
    corpus = MixedSources()
    build_sources(folder, corpus)

    def mix(cell: _Cell) -> MixConfig:
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
        found.append(
            Found(
                tokens_per_s=pace.steps * spec.mix.batch.tokens / of.seconds,
                cpu_step_s=of.cpu_step_s,
                waits=of.waits,
                cores=cores,
            )
        )
    return found


def _paces(
    mix: MixConfig, steps: int | None, step_times: Sequence[tuple[float, int]]
) -> list[Pace]:
    many = steps or min(1_500, max(48, _WARM_TOKENS // mix.batch.tokens))
    timed = [Pace(step_s=step_ms / 1e3, steps=count) for step_ms, count in step_times]
    return [Pace(step_s=0.0, steps=many), *timed]


_LEAST_FULL = 3
"""Turns at full speed; in the first of them pages of the object store are touched that later ones find."""


def _run(spec: PlaneSpec, paces: Sequence[Pace]) -> list[Found]:
    """Run a job at each pace; at full speed, the first, before and after each other too: the middle one counts."""
    full, *timed = paces
    driven = [full, *(each for pace in timed for each in (pace, full))]
    driven += [full] * (_LEAST_FULL - driven.count(full))
    found = list(zip(driven, run(spec, driven), strict=True))
    at_full = sorted((of for pace, of in found if pace == full), key=lambda of: of.tokens_per_s)
    return [at_full[len(at_full) // 2], *(of for pace, of in found if pace != full)]


Pairs = Mapping[_Cell, Sequence[Sequence[tuple[Pace, Found, Found]]]]
"""Of each job, some simulations of every turn: each pace with what the run and the simulation gave."""


def rates_table(pairs: Pairs, turns: int) -> Table:
    """Return tokens a second and processor time at full speed."""
    rows = []
    for cell, found in pairs.items():
        full = [(real, simulated) for (_, real, simulated), *_ in found]
        speeds = [simulated.tokens_per_s / real.tokens_per_s for real, simulated in full]
        cpu = [simulated.cpu_step_s / real.cpu_step_s for real, simulated in full]
        rows.append(
            (
                cell.kind,
                cell.ranks,
                cell.readers or "",
                f"{cell.rank_tokens:,}",
                f"{median(real.tokens_per_s for real, _ in full) / 1e6:.2f}",
                f"{median(simulated.tokens_per_s for _, simulated in full) / 1e6:.2f}",
                _spread(speeds),
                _spread(cpu),
                f"{median(real.cores for real, _ in full):.2f}",
            )
        )
    return Table(
        caption=f"At full speed, medians of {turns} turns, simulated by two profiles and {_SEEDS} seeds each",
        columns=(
            "runtime", "ranks", "readers", "tokens a rank and step", "run, million tokens/s", "simulated",
            "speed, simulated over run", "CPU of a step, the same", "cores left to it",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def waits_table(pairs: Pairs, turns: int) -> Table:
    """Return waits with a time that training takes."""
    rows = []
    for cell, found in pairs.items():
        for number, (pace, _, _) in enumerate(found[0][1:], 1):
            turns_of = [turn[number] for turn in found]
            cells = []
            for figure in ("mean_s", "p50_s", "p99_s"):
                for place in (1, 2):
                    waits = {id(each[place]): each[place].waits for each in turns_of}
                    cells.append(_spread([getattr(each, figure) * 1e3 for each in waits.values()]))
            # Whole steps: what a job pays for its waits, of which each has its longest by chance.
            steps = [real.tokens_per_s / simulated.tokens_per_s for _, real, simulated in turns_of]
            cpu = [simulated.cpu_step_s / real.cpu_step_s for _, real, simulated in turns_of]
            rows.append(
                (
                    cell.ranks,
                    f"{cell.rank_tokens:,}",
                    f"{pace.step_s * 1e3:.0f}",
                    *cells,
                    _spread(steps),
                    _spread(cpu),
                )
            )
    return Table(
        caption=f"Waits of a step in ms where training takes a while, of {turns} turns as above; p99 is the longest of "
        "up to 100 steps, the longest but one of up to 200",
        columns=(
            "ranks", "tokens a rank and step", "training, ms", "mean, run", "mean, simulated", "p50, run",
            "p50, simulated", "p99, run", "p99, simulated", "step with its wait, simulated over run",
            "CPU of a step, the same",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


@click.command
@click.option("--kind", type=click.Choice(["local", "ray"]), default="ray", show_default=True)
@click.option(
    "--text", is_flag=True, help="A heavy source of text, not sixteen sources of token ids."
)
@click.option("--ranks", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option(
    "--readers", type=int, multiple=True, default=(1,), show_default=True, help="Of the heavy text."
)
@click.option("--rank-tokens", type=int, multiple=True, default=(8_192, 65_536), show_default=True)
@click.option(
    "--step-times",
    type=(float, int),
    multiple=True,
    default=((50.0, 64), (200.0, 24)),
    show_default=True,
    help="Milliseconds that training takes, and steps of them.",
)
@click.option("--steps", type=click.IntRange(4), help="At full speed; by default by their size.")
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True)
@click.option("--report", is_flag=True, help="Write a report.")
def main(
    kind: str,
    text: bool,
    ranks: tuple[int, ...],
    readers: tuple[int, ...],
    rank_tokens: tuple[int, ...],
    step_times: tuple[tuple[float, int], ...],
    **how: int | bool | None,
) -> None:
    """Compare simulations with runs."""
    cells = [
        _Cell(kind=kind, ranks=dp, rank_tokens=tokens, readers=n)
        for tokens in sorted(rank_tokens, reverse=True)
        for dp in sorted(ranks, reverse=True)
        for n in (readers if text else (0,))
    ]
    turns = int(how["turns"] or 1)
    pairs: dict[_Cell, list[list[tuple[Pace, Found, Found]]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as held:
        corpus = (_text if text else _tokens)(Path(held) / "corpus")
        for _ in range(turns):
            for cell in cells:
                _compare(cell, corpus, how["steps"], step_times, pairs[cell])
    tables = [rates_table(pairs, turns), *([waits_table(pairs, turns)] if step_times else [])]
    for table in tables:
        print_table(table)
    if how["report"]:
        words = [f"--kind {kind}", *(["--text"] if text else []), *(f"--ranks {r}" for r in ranks)]
        words += [f"--readers {n}" for n in readers if text]
        words += [f"--rank-tokens {n}" for n in rank_tokens]
        words += [f"--step-times {ms:g} {n}" for ms, n in step_times]
        words += [f"--steps {how['steps']}"] if how["steps"] else []
        command = f"python -m benchmarks.loaders.simulated {' '.join(words)} --turns {turns}"
        kinds = (*(["text"] if text else []), *([kind] if kind != "ray" else []))
        name = "-".join(("simulated", *kinds))
        path = write_report(
            __file__,
            name,
            "Simulated jobs against runs",
            command,
            tables,
            READING.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


def _compare(
    cell: _Cell,
    corpus: _Corpus,
    steps: int | bool | None,
    step_times: Sequence[tuple[float, int]],
    pairs: list[list[tuple[Pace, Found, Found]]],
) -> None:
    """Measure what things take, run a job, measure again, and add what simulations of either made of it."""
    mix = corpus.mix(cell)
    spec = PlaneSpec(
        mix=mix,
        base_dir=corpus.folder,
        tree=ClientPlaceTree.of(dp=cell.ranks),
        cache_dir=corpus.folder.parent / "index",
    )
    job = Job(spec=spec, originals=mix.names)

    def measured() -> Profile:
        return with_runtime(measured_sources(spec, _unseen), spec, job, _unseen)

    paces = _paces(mix, int(steps) if steps else None, step_times)
    before = measured()
    real = _run(spec, paces)
    # Around the run: a machine that grows slower meanwhile is too fast in one simulation and too slow in the other.
    for profile in (before, measured()):
        planned = with_planner(profile, job, _unseen)
        for seed in range(_SEEDS):
            simulated = _simulated(spec, planned, paces, real[0].cores, seed)
            pairs.append(list(zip(paces, real, simulated, strict=True)))
            for pace, a_run, a_simulation in pairs[-1]:
                click.echo(f"{cell} {pace}\n  run {a_run}\n  simulated {a_simulation}")


if __name__ == "__main__":
    main()
