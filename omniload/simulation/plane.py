"""A whole data plane under a virtual clock."""

import random
from collections.abc import Callable, Sequence
from functools import partial

from omniload.actors.opening import runtime_of
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.loader_groups import ANSWERING, LoaderShare, most_of_one
from omniload.machine.messages import Started
from omniload.machine.readers import ReaderScaler
from omniload.machine.source_loader import SourceLoader
from omniload.plan.world import require_rows
from omniload.simulation.clock import Clock, Host, Lane, Process
from omniload.simulation.figures import Meter, Simulated
from omniload.simulation.hollow import HollowSource, hollow_rows
from omniload.simulation.job import (
    Job,
    a_planner_of,
    constructors_of,
    hosts_of,
    reads_of,
    shares_of,
    warm_up_of,
)
from omniload.simulation.loaders import SimulatedLoader, SimulatedShadow
from omniload.simulation.profile import BuildCosts, MessageCosts, Profile, Role
from omniload.simulation.ranks import LocalRank, Rank, RayRank, Trainer
from omniload.simulation.roles import SimulatedConstructor, SimulatedPlanner
from omniload.simulation.wire import Wire

__all__ = ["require_simulable", "simulate"]

_READER_THREADS = 2
"""Threads that read, in the local runtime."""
_CALL_THREADS = 4
"""Threads of a constructor's process that take windows; one more thread builds."""
_HOP_S = 1e-4
"""Extra time of a message to another host, compared with a process on the same host."""


def simulate(job: Job, profile: Profile, *, on_step: Callable[[int], object] = id) -> Simulated:
    """Run a job under a virtual clock.

    Args:
        job: The job.
        profile: Measured costs, which must include the job's size.
        on_step: Called with the number of each step as it begins.

    Returns:
        The result, which is the same for the same job and profile.

    Raises:
        ConfigError: The profile lacks something, or the job cannot be simulated.
    """
    require_simulable(job.spec, job.hosts)
    return _Run(job, profile, on_step).figures()


def require_simulable(spec: PlaneSpec, hosts: int) -> None:
    """Refuse a job that cannot be simulated, whatever costs are measured.

    Raises:
        ConfigError: The message says why.
    """
    require_rows(spec.mix, spec.tree)
    if spec.mix.balance.strategy == "hybrid":
        raise ConfigError(
            "balance.strategy is 'hybrid', which deals images, and simulated samples have tokens alone; "
            "simulate with strategy: balanced"
        )
    hosts_of(spec.tree.size_of("dp"), hosts)
    if hosts > 1 and runtime_of(spec) == "local":
        raise ConfigError(
            f"--hosts is {hosts}, and runtime.kind local is one process; use kind: ray"
        )


def _measured(profile: Profile, runtime: str) -> tuple[MessageCosts, BuildCosts]:
    messages, builds = profile.messages, profile.builds
    if runtime not in messages or runtime not in builds:
        raise ConfigError(
            f"the profile has no figures of the {runtime} runtime; remove it to measure again"
        )
    return messages[runtime], builds[runtime]


class _Run:
    """One run of a simulation."""

    def __init__(self, job: Job, profile: Profile, on_step: Callable[[int], object]) -> None:
        self.job, self.profile, self._heard = job, profile, on_step
        self.runtime = runtime_of(job.spec)
        self.messages, self.builds = _measured(profile, self.runtime)
        self.clock = Clock()
        mix = job.spec.mix
        self.dp = job.spec.tree.size_of("dp")
        # If fewer cores are wanted than there are, the lost share makes no difference.
        cores = job.cores * (1 - self.messages.idle)
        self.hosts = [
            Host(self.clock, cores=cores, network_bytes_per_s=job.network_bytes_per_s)
            for _ in range(job.hosts)
        ]
        self.shares = shares_of(job, profile)
        self.readers_S = [cost.readers for cost in reads_of(job, profile)]
        # Buffers fill until then, and would drain before an end. So the planner is given no end, and steps after the
        # last one are read and built, as in the middle of a job.
        self.warm_up = warm_up_of(mix)
        self.num_steps = self.warm_up + job.steps
        self._open()
        self.meter = Meter(
            job=job,
            runtime=self.runtime,
            hosts=self.hosts,
            wire=self.wire,
            planner=self.planner,
            loaders=self.loaders,
            constructors=self.constructors,
            ranks=self.ranks,
        )

    def _open(self) -> None:
        is_local = self.runtime == "local"
        nodes = (
            {} if is_local else {id(host): self._process(host, "node", 2.0) for host in self.hosts}
        )
        trains = self.job.step_s > 0
        self.wire = Wire(self.messages, self.job.seed, _HOP_S, nodes, trains=trains)
        first = self.hosts[0]
        only = self._process(first, "process", self.profile.threads) if is_local else None
        # Planner and loaders are on the opener's host, which is the first.
        planning = only or self._process(first, "planner")
        self.loaders = self._loaders(only)
        # Only a single process has fewer loaders than shares, because it has one loader for all.
        loader_of = {
            s: loader
            for share, loader in zip(self.shares, self.loaders, strict=False)
            for s in share.sources
        }
        if is_local:
            loader_of = dict.fromkeys(range(len(self.job.spec.mix.names)), self.loaders[0])
        self.constructors = self._constructors(only, loader_of)
        costs = self.profile.planner_of(
            ranks=self.dp,
            sources=len(self.job.spec.mix.names),
            tokens=self.job.spec.mix.batch.tokens,
        )
        if costs is None:
            raise ConfigError(
                f"the profile has no figures of planning for {self.dp} ranks; measure it for this size"
            )
        self.planner = SimulatedPlanner(
            process=planning,
            wire=self.wire,
            machine=a_planner_of(self.job, self.profile),
            costs=costs.times(self.messages.roles["planner"].own),
            thread=Lane(planning, 1),
            loader_of=loader_of,
            constructors=self.constructors,
        )
        self.ranks = self._ranks(only)

    def _process(self, host: Host, role: Role, width: float = 1.0) -> Process:
        measured = self.messages.roles["loader" if role == "shadow" else role]
        return host.process(role, width, timers=measured.clock)

    def _loaders(self, only: Process | None) -> list[SimulatedLoader]:
        mix, costs = self.job.spec.mix, self.job.costs(self.profile)
        shares = self.shares
        if only is not None:
            shares = (_whole(shares, tuple(range(len(mix.names)))),)
        made: list[SimulatedLoader] = []
        for share in shares:
            process = only or self._process(self.hosts[0], "loader", self.profile.threads)
            made.append(
                SimulatedLoader(
                    process=process,
                    wire=self.wire,
                    machine=SourceLoader(names={s: mix.names[s] for s in share.sources}),
                    sources={s: self._source(s) for s in share.sources},
                    costs={s: costs[s] for s in share.sources},
                    builds=self.builds,
                    reading=Lane(process, share.reads),
                    answering=Lane(process, ANSWERING),
                    memory=mix.loader.memory,
                    scaler=self._scaler(share.sources),
                    reader_process=partial(self._reader_process, only),
                    shadows=() if only else self._shadows(len(made)),
                )
            )
        return made

    def _shadows(self, loader: int) -> list[SimulatedShadow]:
        """Return the shadows of a loader, dealt in turn over the other hosts, if there are any."""
        mix = self.job.spec.mix
        places = self.hosts[1:] or self.hosts
        each = mix.runtime.shadows
        return [
            SimulatedShadow(
                self._process(
                    places[(loader * each + number) % len(places)], "shadow", self.profile.threads
                ),
                mix.loader.memory,
            )
            for number in range(each)
        ]

    def _scaler(self, sources: Sequence[int]) -> ReaderScaler:
        """Return the machine that sets the number of readers of each source, as when a job is opened."""
        cores, mix = max(1, int(self.job.cores)), self.job.spec.mix
        scaler = ReaderScaler(cores=cores, most=most_of_one(cores))
        for s in sources:
            scaler.follow(s, self.readers_S[s], is_given=mix.names[s] in mix.loader.readers)
        return scaler

    def _reader_process(self, only: Process | None) -> Process:
        """Return the process of a further reader: a new one next to its loader, or the only process."""
        return only or self._process(self.hosts[0], "reader", self.profile.threads)

    def _source(self, source: int) -> HollowSource:
        costs = self.job.costs(self.profile)[source]
        # If all sources began at a block, all blocks would be decoded before the counted steps, and rarely among them.
        drawn = random.Random(f"{self.job.seed} {source}")  # noqa: S311 -- no secret
        return HollowSource(source, costs, shift=drawn.randrange(costs.positions_per_epoch))

    def _constructors(
        self, only: Process | None, loader_of: dict[int, SimulatedLoader]
    ) -> list[SimulatedConstructor]:
        places = sorted(set(hosts_of(self.dp, self.job.hosts)))
        host_at = dict(zip(places, self.hosts, strict=True))
        parts = [(places[0], tuple(range(self.dp)))] if only else constructors_of(self.job)
        made = []
        for place, dp_ranks in parts:
            process = only or self._process(host_at[place], "constructor", self.profile.threads)
            machine = DataConstructor(
                dp_ranks=dp_ranks,
                names=self.job.spec.mix.names,
                row_length=self.job.spec.mix.pack.length,
                rows=hollow_rows,
            )
            made.append(
                SimulatedConstructor(
                    process=process,
                    wire=self.wire,
                    machine=machine,
                    builds=self.builds,
                    calls=Lane(process, 1 if only else _CALL_THREADS),
                    # One thread, whatever else the process has, because windows are built in order.
                    builder=Lane(process, 1),
                    loader_of=loader_of,
                    in_one_process=only is not None,
                )
            )
        return made

    def _ranks(self, only: Process | None) -> list[Rank]:
        made: list[Rank] = []
        # Threads of Ray do half of a training rank's work on a message, and hold no lock of its interpreter.
        width = 2.0 if self.wire.trains else 1.0
        for constructor in self.constructors:
            its: list[Rank] = []
            for rank in constructor.machine.dp_ranks:
                kind = LocalRank if only else RayRank
                process = only or self._process(constructor.process.host, "rank", width)
                # It checks that the planner lives, and tells it what a lost constructor did not pass on.
                self.wire.connect(process, self.planner.process)
                its.append(
                    kind(
                        process=process,
                        wire=self.wire,
                        rank=rank,
                        window=self.job.spec.mix.steps_at_once,
                        constructor=constructor,
                        planner=self.planner,
                    )
                )
            constructor.ranks = its
            made += its
        return made

    def figures(self) -> Simulated:
        """Run the simulation."""
        trainer = Trainer(self.clock, self.ranks, self.num_steps, self.job.step_s, self._begins)
        self.planner.hear(Started())
        trainer.begin()
        while not trainer.is_done:
            if not self.clock.step():
                raise self._short(trainer.step)
        return self.meter.found(trainer)

    def _short(self, step: int) -> ConfigError:
        """Return the refusal of a mix whose data ends before the last step."""
        end = self.planner.ends_at
        assert end == step, f"nothing is under way before step {step} of {self.num_steps}"
        return ConfigError(
            f"the data ends before step {end} of the {self.num_steps} that are simulated, of which the first "
            f"{self.warm_up} do not count, as buffers fill; lower --steps, or set stop: never in the mix"
        )

    def _begins(self, step: int) -> None:
        self._heard(step)
        # Without training, the measurements at full speed already include cores that idle next to work.
        for host in self.hosts if self.wire.trains else ():
            host.look(self.warm_up)
        # Work under way counts as far as it has come, because hosts add up only when jobs begin and end.
        if step in (self.warm_up - 1, self.num_steps - 1):
            for host in self.hosts:
                host.settle()
        if step == self.warm_up - 1:
            self.meter.begin()
        if step >= self.warm_up - 1:
            self.meter.weigh()


def _whole(shares: Sequence[LoaderShare], sources: tuple[int, ...]) -> LoaderShare:
    """Return the only loader of the local runtime."""
    return LoaderShare(
        sources=sources,
        busy=sum(share.busy for share in shares),
        memory_bytes=sum(share.memory_bytes for share in shares),
        # The number of threads does not depend on the shares, because there is one loader.
        reads=_READER_THREADS,
        why="one process",
    )
