"""``omniload mix simulate``: what the data plane of a job would do, before it is started."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import click
from rich.console import Console
from rich.text import Text

from omniload.actors.plane import PlaneSpec
from omniload.base.cli import DURATION, FiniteRange
from omniload.base.errors import ConfigError
from omniload.base.units import counted, format_bytes, format_count
from omniload.commands.display import Cell, emit_json, output, progress, say, table
from omniload.commands.faults import sources_in_silence
from omniload.commands.opening import find_sources, open_spec
from omniload.commands.options import (
    BYTES,
    COUNT,
    cache_option,
    json_option,
    mix_argument,
    store_option,
)
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.figures import Simulated, Waits, knee_of, limit_of
from omniload.simulation.job import Job, steps_that_count, warm_up_of
from omniload.simulation.plane import require_simulable
from omniload.simulation.plane import simulate as run_job
from omniload.simulation.preparing import with_runtime
from omniload.simulation.profile import Profile, read_profile, write_profile
from omniload.simulation.reading import measured_sources
from omniload.simulation.scale import original_of, with_sources, with_tokens
from omniload.simulation.windows import with_planner

__all__ = ["simulate"]

_FEW_WINDOWS = 4
"""Windows of steps below which a simulation warns that they are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Options about the job."""

    ranks: int
    hosts: int
    sources: int | None
    tokens: int | None
    step_time: float
    steps: int | None
    cores: float | None
    network: int
    seed: int
    seeds: int

    def __post_init__(self) -> None:
        """Refuse combinations that no option refuses by itself."""
        if not self.network:
            raise click.UsageError(
                "--network is 0 bytes a second, and no host would hear of another; give more"
            )

    def mix(self, declared: MixConfig) -> MixConfig:
        """Return the mix of the job."""
        mix = declared if self.sources is None else with_sources(declared, self.sources)
        return mix if self.tokens is None else with_tokens(mix, self.tokens)

    def job(self, spec: PlaneSpec, profile: Profile, ranks: int) -> Job:
        """Return the job, with ``ranks`` ranks, each with as many tokens per step as in the whole job."""
        mix = self.mix(spec.mix)
        if ranks < self.ranks:
            mix = with_tokens(mix, mix.batch.tokens * ranks // self.ranks)
        return Job(
            spec=replace(spec, mix=mix, tree=ClientPlaceTree.of(dp=ranks)),
            originals=tuple(original_of(name, spec.mix) for name in mix.names),
            # As many ranks per host as in the whole job, so that the sizes of --knee differ in nothing else.
            hosts=max(1, self.hosts * ranks // self.ranks),
            cores=self.cores or profile.cores,
            network_bytes_per_s=float(self.network),
            step_s=self.step_time,
            steps=self.steps or steps_that_count(mix),
            seed=self.seed,
        )


@click.command
@mix_argument
@click.option(
    "--ranks", type=click.IntRange(1, 1 << 20), required=True, help="Data-parallel ranks."
)
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Hosts of the ranks.",
)
@click.option(
    "--sources",
    type=click.IntRange(1, 32_767),
    help="Number of sources: those of the file are repeated as often as needed; by default each is there once.",
)
@click.option(
    "--tokens",
    type=COUNT,
    help="Tokens of a step over all ranks, such as 32M; by default those of the file.",
)
@click.option(
    "--step-time",
    type=DURATION,
    default="0s",
    show_default=True,
    help="Time to train on a step, such as 800ms; 0 takes batches as fast as they come.",
)
@click.option(
    "--steps",
    type=click.IntRange(2, 100_000),
    help="Steps to measure; by default 48, or eight windows if they have more steps.",
)
@click.option(
    "--cores",
    type=FiniteRange(0, 4096, min_open=True),
    help="Cores of a host for the data plane; by default as many as this machine has.",
)
@click.option(
    "--network",
    type=BYTES,
    default="1250MB",
    show_default=True,
    help="Bytes per second in and out of a host.",
)
@click.option(
    "--knee",
    is_flag=True,
    help="Double the ranks up to --ranks, and show from which number on they wait.",
)
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the measured times; if it exists, it is read in place of a measurement.",
)
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True)
@click.option(
    "--seeds",
    type=click.IntRange(1, 1_000),
    default=1,
    show_default=True,
    help="Number of simulations, each with the next seed, to see how much waits vary; the seed decides "
    "the delays of messages.",
)
@cache_option
@store_option
@json_option
def simulate(
    file: Path,
    *,
    knee: bool,
    profile_file: Path | None,
    cache_dir: Path | None,
    store_timeout: float,
    as_json: bool,
    **asked: object,
) -> None:
    """Simulate the data plane of a job before the job is started.

    The real planner, source loaders and data constructors run under a virtual clock, in one process. First, the times
    of reading, building, planning and messages are measured on this machine. That takes some seconds, or half a minute
    on Ray.

    \b
    Example:
      omniload mix simulate examples/quickstart.yaml --ranks 4 --step-time 50ms
      omniload mix simulate examples/quickstart.yaml --ranks 512 --hosts 64 --tokens 4M --step-time 1s
    """  # noqa: D301 -- click's own marker
    wanted = _Asked(**asked)  # type: ignore[arg-type]
    if knee and not wanted.step_time:
        raise click.UsageError("--knee needs --step-time: ranks that do not train always wait")
    spec = open_spec(file, dp=1, cache_dir=cache_dir)
    spec = replace(spec, tree=ClientPlaceTree.of(dp=wanted.ranks))
    # This comes before the measurements, which take minutes on a busy machine.
    require_simulable(replace(spec, mix=wanted.mix(spec.mix)), wanted.hosts)
    profile = _profile_of(spec, file, profile_file, store_timeout)
    sizes = [wanted.ranks]
    while knee and sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    # For the largest job, because a message takes longer with few ranks than with many.
    job = wanted.job(spec, profile, wanted.ranks)
    profile = with_runtime(profile, spec, job, progress)
    found = []
    for ranks in reversed(sizes):
        job = wanted.job(spec, profile, ranks)
        profile = with_planner(profile, job, progress)
        if profile_file is not None:
            # After each size, so that a later failure does not lose the measurements.
            write_profile(profile_file, profile)
        found.append(_run(job, profile))
    # The last of these is the job that was asked for.
    seeds = range(wanted.seed + 1, wanted.seed + wanted.seeds)
    others = [_run(replace(job, seed=seed), profile) for seed in seeds]
    waits = [each.waits for each in (found[-1], *others)]
    if as_json:
        more = {"knee": knee_of(found), "sizes": found} if knee else {}
        by_seed = {"waits_by_seed": waits} if len(waits) > 1 else {}
        emit_json(asdict(found[-1]) | more | by_seed | {"warnings": list(_doubts(job))})
        return
    if knee:
        _print_knee(output(), found)
    _print_simulated(output(), found[-1], waits, profile)
    for told in _doubts(job):
        say(output(), f"warning: {told}", "yellow")


def _profile_of(
    spec: PlaneSpec, file: Path, profile_file: Path | None, store_timeout: float
) -> Profile:
    """Return the kept profile, or a measured one."""
    if profile_file is not None and profile_file.exists():
        # The data need not exist here, because figures of another machine are carried over.
        return read_profile(profile_file)
    if profile_file is not None and not profile_file.absolute().parent.is_dir():
        # This comes before half a minute of measuring whose figures could not be kept.
        raise ConfigError(
            f"--profile {profile_file}: there is no folder {profile_file.parent}; make it, or give another"
        )
    silent = sources_in_silence(spec.mix, store_timeout, file)
    find_sources(replace(spec, tree=ClientPlaceTree.of(dp=1)), file, silent)
    return measured_sources(spec, progress)


def _doubts(job: Job) -> Iterator[str]:
    """Yield what the figures of a job leave out, or what makes them depend on chance."""
    mix = job.spec.mix
    if any(source.images_transform is not None for source in mix.sources.values()):
        yield (
            "the mix has images, and simulated samples have tokens alone: what patches take of memory, of the network "
            "and to build comes on top"
        )
    if job.steps < _FEW_WINDOWS * mix.steps_at_once:
        yield (
            f"{mix.steps_at_once} steps come at once, and {job.steps} count: where they begin and end decides what is "
            f"found; give --steps {steps_that_count(mix)}, or leave it out"
        )


def _run(job: Job, profile: Profile) -> Simulated:
    mix, ranks = job.spec.mix, job.spec.tree.size_of("dp")
    steps = job.steps + warm_up_of(mix)
    with progress(f"simulating {counted(ranks, 'rank')}", steps) as advance:
        return run_job(job, profile, on_step=lambda _: advance(1))


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _among(seconds: Sequence[float]) -> str:
    """Return a time; for several times, their range."""
    if len(seconds) == 1:
        return _time(seconds[0])
    return f"{_time(median(seconds))} ({_time(min(seconds))} to {_time(max(seconds))})"


def _print_simulated(
    console: Console, found: Simulated, waits: Sequence[Waits], profile: Profile
) -> None:
    """Print one simulation: the job, its waits, and the work of the roles."""
    title = (
        f"{counted(found.ranks, 'rank')} on {counted(found.hosts, 'host')}, "
        f"{counted(found.sources, 'source')}, runtime {found.runtime}"
    )
    memory, connections = found.memory, found.connections
    rows: list[list[Cell]] = [
        [Text("wait of a step, p50", "bold"), _among([each.p50_s for each in waits])],
        ["the same, p99", _among([each.p99_s for each in waits])],
        [Text("throughput", "bold"), f"{format_count(found.tokens_per_s)} tokens/s"],
        [
            "a step",
            f"{format_count(found.tokens_per_step)} tokens, {_time(found.seconds / found.steps)}",
        ],
        [Text("planner", "bold"), f"{_time(found.planner_step_s)} a step"],
        ["", f"{found.planner_share:.1%} of a core"],
        [Text("memory of the first host", "bold"), format_bytes(memory.first_memory_bytes)],
    ]
    if found.hosts > 1:
        rows.append(["of each other host, at most", format_bytes(memory.other_memory_bytes)])
    rows += [
        [Text("connections", "bold"), f"{connections.total:,}"],
        ["if every rank opened every source", f"{connections.without:,}"],
    ]
    console.print(table(title, [("", False), ("", True)], rows))
    console.print(_roles_table(found))
    say(console, limit_of(found))
    if found.step_s and len(waits) == 1:
        told = (
            "waits are of one seed: how late messages are goes by chance, --seeds 5 shows how far"
        )
        say(console, told, "dim")
    say(
        console,
        f"costs: {profile.machine}, {counted(profile.cores, 'core')}; memory is the data plane's alone, "
        "without what ranks train with",
        "dim",
    )
    if profile.is_of_a_busy_machine:
        say(
            console,
            f"warning: load was {profile.load:.1f} on {counted(profile.cores, 'core')} as costs were measured, so "
            "waits are too long here; measure on a quiet machine, or with --profile FILE carry its figures over",
            "yellow",
        )


def _roles_table(found: Simulated) -> object:
    rows: list[list[Cell]] = [
        [
            role.role,
            f"{role.count:,}",
            f"{role.cores:.2f}",
            f"{role.busiest:.0%}",
            format_bytes(role.memory_bytes),
            f"{role.connections:,}",
        ]
        for role in found.roles
    ]
    columns = [("process", False), ("number", True), ("cores, all", True)]
    columns += [("busiest, of a core", True), ("memory, largest", True), ("speaks to", True)]
    return table("processes", columns, rows)


def _print_knee(console: Console, sizes: Sequence[Simulated]) -> None:
    """Print a line for each number of ranks, and the number from which ranks wait."""
    rows: list[list[Cell]] = [
        [
            f"{found.ranks:,}",
            f"{found.hosts:,}",
            _time(found.waits.p50_s),
            _time(found.waits.p99_s),
            f"{found.stalled_share:.1%}",
            f"{format_count(found.tokens_per_s)}",
            f"{found.planner_share:.1%}",
            format_bytes(found.memory.first_memory_bytes),
            f"{found.connections.total:,}",
        ]
        for found in sizes
    ]
    columns = [("ranks", True), ("hosts", True), ("wait p50", True), ("p99", True)]
    columns += [("waiting", True), ("tokens/s", True), ("planner", True)]
    columns += [("first host", True), ("connections", True)]
    console.print(table("by ranks, with as many tokens a rank", columns, rows))
    knee = knee_of(sizes)
    last = sizes[-1].ranks
    told = (
        f"no knee up to {counted(last, 'rank')}: they wait less than a twentieth of the time"
        if knee is None
        else f"the knee is at {counted(knee, 'rank')}: from there on they wait a twentieth of the time or more"
    )
    say(console, told, "green" if knee is None else "yellow")
