"""A profile with the figures of a job's runtime: what is missing is measured.

What messages take is measured here. On Ray small planes run for real, side by side and in turns, and the same ones are
simulated with messages that cost nothing: what their processes took beyond that is what messages took, role by role.
One has few tokens a step, one few of them and few steps a window, one many tokens, of blocks that are decoded as in a
job: their differences tell what batches and bytes take.
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
_PROBED_WINDOWS = 8
"""Windows of a small plane that are planned, to measure planning."""
_READ_ALONE = 3
"""Sources of a small plane that are read by themselves, before it runs and after it."""
_MOST_OWN = 2.0
"""More is no planner that is slow in a plane, but a moment in which it was."""
_MOST_RESTED = 4.0
"""Likewise of messages after a rest, which may take as much less: beside a busy plane ends are kept waiting."""


def with_runtime(profile: Profile, spec: PlaneSpec, job: Job, shown: Shown) -> Profile:
    """Return the profile with figures of the job's runtime.

    Args:
        profile: What was measured so far.
        spec: The mix as its file says.
        job: The job.
        shown: Shows how far it is.

    Raises:
        OmniloadError: A source cannot be read, Ray is not installed, or it did not start.
    """
    runtime = runtime_of(job.spec)
    dp, tokens = job.spec.tree.size_of("dp"), job.spec.mix.batch.tokens
    ranks = dp if runtime == "local" else max(len(ranks) for _, ranks in constructors_of(job))
    # Before messages: what those take is what is left of a plane's time beside building.
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
        profile: What was measured of its sources, and of building.
        shown: Shows what is measured now, and how far it is.

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
    """Return equal costs of every role."""
    return dict.fromkeys(ROLES, RoleCosts(end_s=end_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPlane:
    """A small plane that ran, and was simulated."""

    spent_s: Mapping[str, float]
    """Processor seconds of a step of one process of each role."""
    simulated: Simulated
    """Where messages cost nothing."""

    def message_of(self, role: Role) -> "_Message":
        """Return a message of a role: what is in it, and what it took beyond what is known."""
        step_s = self.simulated.seconds / self.simulated.steps
        found = next(figures for figures in self.simulated.roles if figures.role == role)
        # Of several ranks one is measured, and all are alike.
        known_s = found.cores * step_s / found.count
        # A role that had none in all these steps took what it took for one at most.
        messages_step = found.messages_step / found.count or 1 / self.simulated.steps
        return _Message(
            seconds=max(0.0, self.spent_s[role] - known_s) / messages_step,
            size_bytes=found.message_bytes_step / found.count / messages_step,
            batches=found.batches_step / found.count / messages_step,
            known_s=known_s / messages_step,
        )


@dataclass(frozen=True, slots=True)
class _Message:
    """A message, on average."""

    seconds: float
    size_bytes: float
    batches: float
    known_s: float
    """What its process is known to do for each."""


def _between_processes(job: Job, profile: Profile, shown: Shown) -> MessageCosts:
    from omniload.actors.ray.measuring.probe import probe  # noqa: PLC0415 -- an extra, absent for local users

    with ExitStack() as held:
        folders = [Path(held.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        kinds = (Reference.few, Reference.short, Reference.many)
        references = [kind(job, profile) for kind in kinds]
        specs = [each.written(folder) for each, folder in zip(references, folders, strict=True)]
        read = _read_alone(specs, shown)
        found = probe(specs, _CALLS, Client, shown)
        # Around the planes: a machine that grows slower meanwhile is in both.
        again = _read_alone(specs, shown)
        sources = [_middle_of([*pair[0], *pair[1]]) for pair in zip(read, again, strict=True)]
    call = found.call
    # There and back are two messages with two ends each.
    least_s = (call.asking_s + call.answering_s) / 4
    # A call is on its way twice; which of the two ways was slow cannot be told.
    waits_s = [each / 2 for each in call.waits_s]
    free = MessageCosts(
        latencies_s=_some_of(waits_s),
        roles=even_roles(0.0),
        takes_s=tuple(map(_some_that_were, found.takes_s)),
        process_bytes=call.process_bytes,
        node_bytes=found.node_bytes,
        idle=found.idle,
    )
    # What building takes is that of the job: what is too much or too little of it is made up for.
    known = profile.model_copy(update={"messages": {"ray": free}})
    few, short, many = (
        SmallPlane(
            # How many blocks are decoded in a turn goes by chance.
            spent_s={**plane.step_s, "loader": plane.mean_s["loader"]}
            if of.has_blocks
            else plane.step_s,
            simulated=_simulated(replace(job, spec=spec, steps=plane.steps), known, costs),
        )
        for of, spec, costs, plane in zip(references, specs, sources, found.planes, strict=True)
    )
    roles = costs_by_role(few, short, many, clock=found.clock, least_s=least_s)
    # Ranks that rest ask for less at once: other messages, and more of them.
    resting = replace(job, spec=specs[0], steps=found.paced_steps, step_s=PAUSE_S)
    simulated = _simulated(resting, known, sources[0])
    paced = SmallPlane(spent_s=found.paced_step_s, simulated=simulated)
    roles = with_rest(roles, paced, least_s=least_s)
    return free.model_copy(update={"roles": roles})


def _some_of(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return as many of some times as a profile has, spread evenly from the shortest to the longest."""
    return tuple(np.quantile(seconds, np.linspace(0, 1, _SAMPLED)).tolist())


def _some_that_were(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return as many of them at most, each a time that was: of few, none between the longest and the rest."""
    ordered, count = sorted(seconds), min(_SAMPLED, len(seconds))
    # The middle one of each of as many parts: the longest of hundreds is drawn no more often than it came.
    return tuple(ordered[(2 * n + 1) * len(ordered) // (2 * count)] for n in range(count))


def _read_alone(specs: Sequence[PlaneSpec], shown: Shown) -> list[list[SourceCosts]]:
    """Return what reading takes of some sources of each small plane, which are all the same."""
    named = [spec.mix.names[:_READ_ALONE] for spec in specs]
    found = []
    with shown("measuring what small planes read", sum(map(len, named))) as advance:
        for spec, names in zip(specs, named, strict=True):
            sources = {name: spec.mix.sources[name] for name in names}
            some = spec.mix.model_copy(update={"sources": sources})
            found.append(list(measure_sources(replace(spec, mix=some), advance).values()))
    return found


def _middle_of(measured: Sequence[SourceCosts]) -> SourceCosts:
    """Return costs of one source that was measured several times, of each cost the median."""
    costs = ("read_s", "token_s", "block_s")
    middle = {name: median(getattr(each, name) for each in measured) for name in costs}
    return measured[0].model_copy(update=middle)


def spread(source: SourceCosts) -> SourceCosts:
    """Return a source of which decoding takes a part for each token, as it does on average over many blocks.

    A source of one block is decoded before anything is measured.
    """
    tokens = sum(source.lengths) / len(source.counts) * source.block_positions
    has_blocks = source.block_positions < source.positions_per_epoch
    token_s = source.token_s + (source.block_s / max(1.0, tokens) if has_blocks else 0.0)
    return source.model_copy(update={"token_s": token_s, "block_s": 0.0})


def _simulated(job: Job, known: Profile, costs: SourceCosts) -> Simulated:
    """Simulate a small plane, messages left out."""
    names = job.spec.mix.names
    # Spread: in the steps that are simulated blocks are decoded that the plane had decoded before its turns.
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
    """Return what a message takes at each role, what its batches do, and its bytes.

    Bytes are those of tokens. A planner's messages have none, nor batches: what it takes more where it plans more is
    that planning takes longer in a plane than by itself.

    Args:
        few: The plane of few tokens a step.
        short: The same with fewer steps a window.
        many: The one of many tokens.
        clock: Cores of each role in use at rest. Those of the opener are counted with the node.
        least_s: What an end takes in a loop of calls: none takes less, but for what passes a node.
    """
    found = even_roles(least_s)
    for role in (figures.role for figures in few.simulated.roles):
        messages = [plane.message_of(role) for plane in (few, short, many)]
        least = 0.0 if role == "node" else least_s
        costs = (_costs_of_planner if role == "planner" else _costs_of)(messages, least)
        found[role] = costs.model_copy(update={"clock": max(0.0, clock[role])})
    # It has the keeper, which a job has once, beside Ray.
    at_rest = found["node"].clock + max(0.0, clock["opener"])
    found["node"] = found["node"].model_copy(update={"clock": at_rest})
    # Small planes have none: it is a process that reads and answers, as a loader is.
    found["reader"] = found["loader"]
    return found


def with_rest(
    roles: Mapping[Role, RoleCosts], paced: SmallPlane, *, least_s: float
) -> dict[Role, RoleCosts]:
    """Return the costs with how many times as long a message takes at each role where processes rest between two.

    Args:
        roles: What messages take at full speed.
        paced: The plane of few tokens, whose ranks rested before each step.
        least_s: What an end takes in a loop of calls, as for ``costs_by_role``.
    """
    found = dict(roles)
    for role in (figures.role for figures in paced.simulated.roles):
        message, costs = paced.message_of(role), roles[role]
        # Planning takes as much longer in a plane, rested or not.
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
    """Return what each part of a message takes, none below 0, so that all take what they took as nearly as they can.

    Args:
        parts: How much of each is in each message.
        messages: What they took.
        least_s: Of that, what they take in any case.
    """
    beyond = np.asarray([each.seconds - least_s for each in messages])
    scale = np.maximum(np.max(parts, axis=0), 1e-9)
    scaled = np.asarray(parts) / scale
    best, least_left = np.zeros(len(scale)), np.inf
    # All of them first; where one comes out below 0, it takes nothing, and the others fit as they can.
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
    """Show nobody how far it is: these are parts of one."""


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
    # Of what a call took beside processor time, half went by before either thread was woken.
    waits_s = sorted(max(0.0, (each - spent_s) / 2) for each in rounds_s)
    return MessageCosts(
        latencies_s=_some_of(waits_s),
        # There and back: two messages, with two ends each, and all of one process.
        roles=even_roles(spent_s / 4),
        process_bytes=0,
        node_bytes=0,
    )


def _nothing() -> None:
    """Do nothing, in another thread."""
