"""Adds to a profile the missing costs of a job's runtime, by measuring them.

The costs of messages are measured here. On Ray, small planes run for real, together and alternately, and the same
planes are simulated with messages that cost nothing. For each role, the time that the real processes took beyond the
simulated ones is the time of messages. One plane has few tokens per step, one has few tokens and few steps per window,
and one has many tokens, in blocks that are decoded as in a job. Their differences give the costs of batches and bytes.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np

from omniload.actors.opening import runtime_of
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.measuring.pauses import PAUSE_S
from omniload.base.concurrency.threads import DaemonPool
from omniload.client import Client
from omniload.simulation.figures import Simulated
from omniload.simulation.job import Job, constructors_of
from omniload.simulation.plane import simulate
from omniload.simulation.profile import (
    ROLES,
    MessageCosts,
    Profile,
    Role,
    RoleCosts,
    SourceCosts,
)
from omniload.simulation.reading import Shown, measure_sources
from omniload.simulation.scale import Reference
from omniload.simulation.windows import measure_builds, measure_planner

__all__ = [
    "SmallPlane",
    "costs_by_role",
    "even_roles",
    "spread",
    "with_rest",
    "with_runtime",
]

_CALLS, _SAMPLED = 200, 64
_TAKES = 512
"""Takes of each place of a batch that a profile keeps at most. A probe has about a hundred, and all of them are kept:
of 96 in 64 parts, the longest would be drawn half again as often as it occurred."""
_PROBED_WINDOWS = 8
"""Windows of a small plane that are planned, to measure planning."""
_READ_ALONE = 3
"""How often the sources of a small plane are read alone, before it runs and again after it."""
_MOST_OWN = 2.0
"""Largest plausible slowdown of planning in a plane; a larger one comes from a moment in which the machine was slow."""
_MOST_RESTED = 4.0
"""The same limit for messages after a rest, in both directions: next to a busy plane, the ends are kept waiting."""


def with_runtime(profile: Profile, spec: PlaneSpec, job: Job, shown: Shown) -> Profile:
    """Return the profile with the costs of the job's runtime.

    Args:
        profile: Costs measured so far.
        spec: The mix as its file declares it.
        job: The job.
        shown: Shows the progress.

    Raises:
        OmniloadError: A source cannot be read, Ray is not installed, or it did not start.
    """
    runtime = runtime_of(job.spec)
    dp, tokens = job.spec.tree.size_of("dp"), job.spec.mix.batch.tokens
    ranks = dp if runtime == "local" else max(len(ranks) for _, ranks in constructors_of(job))
    # This comes before messages, whose costs are what remains of a plane's time after building.
    if runtime not in profile.builds:
        with shown("measuring what building takes", 1) as advance:
            builds = measure_builds(spec, runtime, ranks=ranks, tokens=tokens * ranks // dp)
            advance(1)
        profile = profile.model_copy(update={"builds": {**profile.builds, runtime: builds}})
    if runtime not in profile.messages:
        messages = _measure_messages(runtime, job, profile, shown)
        profile = profile.model_copy(update={"messages": {**profile.messages, runtime: messages}})
    return profile


def _measure_messages(runtime: str, job: Job, profile: Profile, shown: Shown) -> MessageCosts:
    """Measure messages between roles: threads of this process, or processes of a Ray of our own.

    Args:
        runtime: ``local`` or ``ray``.
        job: The job, whose samples, sources and rows the small plane has.
        profile: Measured costs of its sources, and of building.
        shown: Shows what is measured now, and the progress.

    Raises:
        ConfigError: Ray is asked for and not installed.
        UnavailableError: Ray did not start.
    """
    if runtime == "ray":
        return _between_processes(job, profile, shown)
    with shown("measuring the local runtime", 1) as advance:
        found = _between_threads()
        advance(1)
    return found


def even_roles(end_s: float) -> dict[Role, RoleCosts]:
    """Return equal costs for every role."""
    return dict.fromkeys(ROLES, RoleCosts(end_s=end_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPlane:
    """A small plane that ran, and was simulated."""

    spent_s: Mapping[str, float]
    """Processor seconds of a step, for one process of each role."""
    simulated: Simulated
    """Simulation in which messages cost nothing."""

    def message_of(self, role: Role) -> "_Message":
        """Return an average message of a role: its content, and its time beyond the known costs."""
        step_s = self.simulated.seconds / self.simulated.steps
        found = next(figures for figures in self.simulated.roles if figures.role == role)
        # One of several ranks is measured, and all are alike.
        known_s = found.cores * step_s / found.count
        # A role without a message in all these steps is charged as if it had one.
        messages_step = found.messages_step / found.count or 1 / self.simulated.steps
        return _Message(
            seconds=max(0.0, self.spent_s[role] - known_s) / messages_step,
            size_bytes=found.message_bytes_step / found.count / messages_step,
            batches=found.batches_step / found.count / messages_step,
            known_s=known_s / messages_step,
        )


@dataclass(frozen=True, slots=True)
class _Message:
    """An average message."""

    seconds: float
    size_bytes: float
    batches: float
    known_s: float
    """Known work of its process for each message."""


def _between_processes(job: Job, profile: Profile, shown: Shown) -> MessageCosts:
    from omniload.actors.ray.measuring.probe import probe  # noqa: PLC0415 -- an extra, absent for local users

    with ExitStack() as held:
        folders = [Path(held.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        kinds = (Reference.few, Reference.short, Reference.many)
        references = [kind(job, profile) for kind in kinds]
        specs = [each.written(folder) for each, folder in zip(references, folders, strict=True)]
        read = _read_alone(specs, shown)
        found = probe(specs, _CALLS, Client, shown)
        # Measured before and after the planes, so that a machine that becomes slower affects both.
        again = _read_alone(specs, shown)
        sources = [_middle_of([*pair[0], *pair[1]]) for pair in zip(read, again, strict=True)]
    call = found.call
    # A call and its answer are two messages with two ends each.
    least_s = (call.asking_s + call.answering_s) / 4
    # A call travels both ways, and it is unknown which of them was slow.
    waits_s = [each / 2 for each in call.waits_s]
    free = MessageCosts(
        latencies_s=_some_of(waits_s),
        roles=even_roles(0.0),
        takes_s=tuple(map(_some_that_were, found.takes_s)),
        process_bytes=call.process_bytes,
        node_bytes=found.node_bytes,
        idle=found.idle,
    )
    # Building costs are those of the job, so their error in the small plane is compensated here.
    known = profile.model_copy(update={"messages": {"ray": free}})
    few, short, many = (
        SmallPlane(
            # The number of blocks decoded in a turn depends on chance.
            spent_s={**plane.step_s, "loader": plane.mean_s["loader"]}
            if of.has_blocks
            else plane.step_s,
            simulated=_simulated(replace(job, spec=spec, steps=plane.steps), known, costs),
        )
        for of, spec, costs, plane in zip(references, specs, sources, found.planes, strict=True)
    )
    roles = costs_by_role(few, short, many, clock=found.clock, least_s=least_s)
    # Ranks that pause ask for less at a time, so the messages are different and more numerous.
    resting = replace(job, spec=specs[0], steps=found.paced_steps, step_s=PAUSE_S)
    simulated = _simulated(resting, known, sources[0])
    paced = SmallPlane(spent_s=found.paced_step_s, simulated=simulated)
    roles = with_rest(roles, paced, least_s=least_s)
    return free.model_copy(update={"roles": roles})


def _some_of(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return as many of the times as a profile keeps, spread evenly from the shortest to the longest."""
    return tuple(np.quantile(seconds, np.linspace(0, 1, _SAMPLED)).tolist())


def _some_that_were(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the times, or as many of them as a profile keeps, each a measured one, without interpolation."""
    ordered, count = sorted(seconds), min(_TAKES, len(seconds))
    # The middle time of each part, so that the longest of hundreds is drawn no more often than it occurred.
    return tuple(ordered[(2 * n + 1) * len(ordered) // (2 * count)] for n in range(count))


def _read_alone(specs: Sequence[PlaneSpec], shown: Shown) -> list[list[SourceCosts]]:
    """Return the reading costs of some sources of each small plane; all its sources are alike."""
    named = [spec.mix.names[:_READ_ALONE] for spec in specs]
    found = []
    with shown("measuring what small planes read", sum(map(len, named))) as advance:
        for spec, names in zip(specs, named, strict=True):
            sources = {name: spec.mix.sources[name] for name in names}
            some = spec.mix.model_copy(update={"sources": sources})
            found.append(list(measure_sources(replace(spec, mix=some), advance).values()))
    return found


def _middle_of(measured: Sequence[SourceCosts]) -> SourceCosts:
    """Return the median of each cost of a source that was measured several times."""
    costs = ("read_s", "token_s", "block_s")
    middle = {name: median(getattr(each, name) for each in measured) for name in costs}
    return measured[0].model_copy(update=middle)


def spread(source: SourceCosts) -> SourceCosts:
    """Return a source whose decoding time is spread over its tokens, which is the average over many blocks.

    A source of one block is decoded before anything is measured.
    """
    tokens = sum(source.lengths) / len(source.counts) * source.block_positions
    has_blocks = source.block_positions < source.positions_per_epoch
    token_s = source.token_s + (source.block_s / max(1.0, tokens) if has_blocks else 0.0)
    return source.model_copy(update={"token_s": token_s, "block_s": 0.0})


def _simulated(job: Job, known: Profile, costs: SourceCosts) -> Simulated:
    """Simulate a small plane without messages."""
    names = job.spec.mix.names
    # Decoding is spread because the simulated steps decode blocks that the plane had decoded before its turns.
    known = known.model_copy(update={"sources": {names[0]: spread(costs)}})
    job = replace(job, originals=names[:1] * len(names), hosts=1)
    planner = measure_planner(job, known, _PROBED_WINDOWS, _unheard)
    return simulate(job, known.model_copy(update={"planners": (planner,)}))


def costs_by_role(
    few: SmallPlane,
    short: SmallPlane,
    many: SmallPlane,
    *,
    clock: Mapping[str, float],
    least_s: float,
) -> dict[Role, RoleCosts]:
    """Return the cost of a message at each role, of the batches in it, and of its bytes.

    Bytes are those of tokens. A planner's messages have no bytes of tokens and no batches; their extra time in larger
    plans means that planning takes longer in a plane than alone.

    Args:
        few: The plane of few tokens per step.
        short: The same with fewer steps per window.
        many: The plane of many tokens.
        clock: Cores that each role uses at rest. Those of the opener are counted with the node.
        least_s: Cost of an end in a loop of calls, which is the least for all roles except a node.
    """
    found = even_roles(least_s)
    for role in (figures.role for figures in few.simulated.roles):
        messages = [plane.message_of(role) for plane in (few, short, many)]
        least = 0.0 if role == "node" else least_s
        costs = (_costs_of_planner if role == "planner" else _costs_of)(messages, least)
        found[role] = costs.model_copy(update={"clock": max(0.0, clock[role])})
    # The node also gets the work of the keeper, which a job has once.
    at_rest = found["node"].clock + max(0.0, clock["opener"])
    found["node"] = found["node"].model_copy(update={"clock": at_rest})
    # Small planes have no further readers. A reader reads and answers, as a loader does.
    found["reader"] = found["loader"]
    return found


def with_rest(
    roles: Mapping[Role, RoleCosts], paced: SmallPlane, *, least_s: float
) -> dict[Role, RoleCosts]:
    """Return the costs with the factor by which a message takes longer at each role after a rest.

    Args:
        roles: Costs of messages at full speed.
        paced: The plane of few tokens, whose ranks paused before each step.
        least_s: Cost of an end in a loop of calls, as in ``costs_by_role``.
    """
    found = dict(roles)
    for role in (figures.role for figures in paced.simulated.roles):
        message, costs = paced.message_of(role), roles[role]
        # Planning is slower in a plane by the same factor, with or without rests.
        beyond_s = message.seconds - (costs.own - 1.0) * message.known_s
        quick_s = max(least_s, costs.message_s(message.size_bytes, message.batches))
        times = beyond_s / quick_s if quick_s else 1.0
        times = min(_MOST_RESTED, max(1 / _MOST_RESTED, times))
        found[role] = costs.model_copy(update={"rested": times})
    found["reader"] = found["loader"]
    return found


def _costs_of(messages: Sequence[_Message], least_s: float) -> RoleCosts:
    found = _shares([(1.0, each.size_bytes, each.batches) for each in messages], messages, least_s)
    return RoleCosts(end_s=least_s + found[0], byte_s=found[1], batch_s=found[2])


def _costs_of_planner(messages: Sequence[_Message], least_s: float) -> RoleCosts:
    found = _shares([(1.0, each.known_s) for each in messages], messages, least_s)
    return RoleCosts(end_s=least_s + found[0], own=min(_MOST_OWN, 1.0 + found[1]))


def _shares(
    parts: Sequence[tuple[float, ...]], messages: Sequence[_Message], least_s: float
) -> list[float]:
    """Return the least-squares cost of each part of a message, none below 0.

    Args:
        parts: Amount of each part in each message.
        messages: Measured messages.
        least_s: Part of each message's time that is given.
    """
    beyond = np.asarray([each.seconds - least_s for each in messages])
    scale = np.maximum(np.max(parts, axis=0), 1e-9)
    scaled = np.asarray(parts) / scale
    best, least_left = np.zeros(len(scale)), np.inf
    # All parts are fitted first; if one comes out below 0, it costs nothing, and the others are fitted without it.
    for many in range(len(scale), 0, -1):
        for kept in combinations(range(len(scale)), many):
            found = np.linalg.lstsq(scaled[:, kept], beyond, rcond=None)[0]
            left = float(np.square(scaled[:, kept] @ found - beyond).sum())
            if found.min() >= 0 and left < least_left:
                best, least_left = np.zeros(len(scale)), left
                best[list(kept)] = found
    costs: list[float] = (best / scale).tolist()
    return costs


def _unheard(_: object) -> None:
    """Show no progress, because the work is part of a larger task."""


def _between_threads() -> MessageCosts:
    pool = DaemonPool(1, "omniload-probe")
    try:
        # The first call starts the thread.
        pool.submit(_nothing).result()
        rounds_s = []
        began_s = time.process_time()
        for _ in range(_CALLS):
            asked_s = time.perf_counter()
            pool.submit(_nothing).result()
            rounds_s.append(time.perf_counter() - asked_s)
        spent_s = (time.process_time() - began_s) / _CALLS
    finally:
        pool.close(1.0)
    # Half of a call's time beyond processor time passed before either thread was woken.
    waits_s = sorted(max(0.0, (each - spent_s) / 2) for each in rounds_s)
    return MessageCosts(
        latencies_s=_some_of(waits_s),
        # A call and its answer are two messages with two ends each, all in one process.
        roles=even_roles(spent_s / 4),
        process_bytes=0,
        node_bytes=0,
    )


def _nothing() -> None:
    """Do nothing, in another thread."""
