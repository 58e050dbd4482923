"""What messages between roles cost.

On Ray small planes run for real, side by side and in turns, and the same ones are simulated with messages that cost
nothing: what their processes took beyond that is what messages took, role by role. One has few tokens a step, one few
of them and few steps a window, one many tokens: their differences tell what batches and bytes take.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omniload.actors.plane import PlaneSpec
from omniload.base.concurrency.threads import DaemonPool
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.figures import Simulated
from omniload.simulation.job import Job, constructors_of
from omniload.simulation.plane import simulate
from omniload.simulation.planning import measure_planner
from omniload.simulation.profile import ROLES, MessageCosts, Profile, Role, RoleCosts
from omniload.simulation.reading import measure_sources

__all__ = [
    "Reference",
    "SmallPlane",
    "costs_by_role",
    "even_roles",
    "lengths_of",
    "measure_messages",
]

_CALLS, _SAMPLED = 200, 64
_WINDOWS = 8
"""Windows that are planned to measure planning."""
_VOCABULARY = 32_000
_CORPUS_TOKENS, _MOST_GROUP_ROWS = 2 << 20, 500
_MOST_SOURCES = 32
_FEW_TOKENS, _MORE = 8 << 10, 8
"""Of a step, a row of each rank at least: of few, messages are most of what it takes. Of so many times as many, their
bytes tell."""
_MOST_RANKS, _MOST_FEW = 8, 64 << 10
"""Ranks of the constructor, and tokens that a step of few has for as many: longer rows are of fewer ranks. What a rank
asks takes less than what else a constructor hears, and of many ranks that is most."""
_MOST_OWN = 2.0
"""More is no planner that is slow in a plane, but a moment in which it was."""
_FEW_STEPS = 8
"""Of a window of which batches tell that are not there."""
_LENGTHS_OF_A_SOURCE = 512


def measure_messages(runtime: str, job: Job, profile: Profile) -> MessageCosts:
    """Measure messages between roles: threads of this process, or processes of a Ray of our own.

    Args:
        runtime: ``local`` or ``ray``.
        job: The job, whose samples, sources and rows the small plane has.
        profile: What was measured of its sources, and of building.

    Raises:
        ConfigError: Ray is asked for and not installed.
        UnavailableError: Ray did not start.
    """
    return _between_threads() if runtime == "local" else _between_processes(job, profile)


def even_roles(end_s: float) -> dict[Role, RoleCosts]:
    """Return equal costs of every role."""
    return dict.fromkeys(ROLES, RoleCosts(end_s=end_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPlane:
    """A small plane that ran, and was simulated."""

    spent_s: Mapping[str, float]
    """Processor seconds of a step, by role."""
    clock: Mapping[str, float]
    """Cores in use at rest; those of the rank's process are its plane's, and counted with the node."""
    simulated: Simulated
    """Where messages cost nothing."""

    def message_of(self, role: Role) -> "_Message":
        """Return a message of a role: what is in it, and what it took beyond what is known."""
        step_s = self.simulated.seconds / self.simulated.steps
        found = next(figures for figures in self.simulated.roles if figures.role == role)
        beyond_s = max(0.0, self.spent_s[role] - found.cores * step_s)
        # A role that had none in all these steps took what it took for one at most.
        messages_step = found.messages_step or 1 / self.simulated.steps
        return _Message(
            seconds=beyond_s / messages_step,
            size_bytes=found.message_bytes_step / messages_step,
            batches=found.batches_step / messages_step,
            known_s=found.cores * step_s / messages_step,
        )


@dataclass(frozen=True, slots=True)
class _Message:
    """A message, on average."""

    seconds: float
    size_bytes: float
    batches: float
    known_s: float
    """What its process is known to do for each."""


def _between_processes(job: Job, profile: Profile) -> MessageCosts:
    from omniload.actors.ray.scaling.probe import probe  # noqa: PLC0415 -- an extra, absent for local users

    with ExitStack() as held:
        folders = [Path(held.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        kinds = (Reference.few, Reference.short, Reference.many)
        specs = [
            kind(job, profile).written(folder) for kind, folder in zip(kinds, folders, strict=True)
        ]
        # One file for all: they have the same samples.
        sources = measure_sources(_of_one_source(specs[0]), _unheard)
        found = probe(specs, _CALLS)
    call = found.call
    # There and back are two messages with two ends each.
    least_s = (call.asking_s + call.answering_s) / 4
    waits_s = [each / 2 for each in call.waits_s]
    free = MessageCosts(
        latencies_s=tuple(np.quantile(waits_s, np.linspace(0, 1, _SAMPLED)).tolist()),
        roles=even_roles(0.0),
        process_bytes=call.process_bytes,
        node_bytes=found.node_bytes,
    )
    # What building takes is that of the job: what is too much or too little of it is made up for.
    known = profile.model_copy(update={"sources": sources, "messages": {"ray": free}})
    few, short, many = (
        SmallPlane(
            spent_s=plane.step_s,
            clock=plane.clock,
            simulated=_simulated(replace(job, spec=spec, steps=plane.steps), known),
        )
        for spec, plane in zip(specs, found.planes, strict=True)
    )
    return free.model_copy(update={"roles": costs_by_role(few, short, many, least_s)})


def _of_one_source(spec: PlaneSpec) -> PlaneSpec:
    """Return the plane with the first of its sources, which are all the same."""
    name = spec.mix.names[0]
    only = spec.mix.model_copy(update={"sources": {name: spec.mix.sources[name]}})
    return replace(spec, mix=only)


def _simulated(job: Job, known: Profile) -> Simulated:
    """Simulate a small plane, messages left out: as many steps as it took, in which as many blocks are decoded."""
    names = job.spec.mix.names
    job = replace(job, originals=names[:1] * len(names), hosts=1, step_s=0.0)
    planner = measure_planner(job, known, _WINDOWS, _unheard)
    return simulate(job, known.model_copy(update={"planners": (planner,)}))


def costs_by_role(
    few: SmallPlane, short: SmallPlane, many: SmallPlane, least_s: float
) -> dict[Role, RoleCosts]:
    """Return what a message takes at each role, what its batches do, and its bytes.

    Bytes are those of tokens. A planner's messages have none, nor batches: what it takes more where it plans more is
    that planning takes longer in a plane than by itself.

    Args:
        few: The plane of few tokens a step, whose clock is also taken: that of a rank alone is what any process of a
            plane has at least.
        short: The same with fewer steps a window.
        many: The one of many tokens.
        least_s: What an end takes in a loop of calls: none takes less, but for what passes a node.
    """
    found = even_roles(least_s)
    for role in (figures.role for figures in few.simulated.roles):
        messages = [plane.message_of(role) for plane in (few, short, many)]
        least = 0.0 if role == "node" else least_s
        costs = (_costs_of_planner if role == "planner" else _costs_of)(messages, least)
        found[role] = costs.model_copy(update={"clock": max(0.0, few.clock[role])})
    at_rest = found["node"].clock + found["rank"].clock
    found["node"] = found["node"].model_copy(update={"clock": at_rest})
    least = min(found[role].clock for role in ("planner", "loader", "constructor"))
    found["rank"] = found["rank"].model_copy(update={"clock": least})
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
    waits_s = sorted(max(0.0, (each - spent_s) / 2) for each in rounds_s)
    return MessageCosts(
        latencies_s=tuple(np.quantile(waits_s, np.linspace(0, 1, _SAMPLED)).tolist()),
        roles=even_roles(spent_s / 4),
        process_bytes=0,
        node_bytes=0,
    )


def _nothing() -> None:
    """Do nothing, in another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What of a job is kept: messages are as finely divided as the job's."""

    lengths: tuple[int, ...]
    """Tokens of samples, over and over."""
    sources: int
    group_rows: int
    """Samples of a unit, by which blocks are as long as the job's."""
    row_length: int
    ranks: int
    """Of the one constructor: as many of its messages are theirs as are of one of the job's."""
    tokens: int
    """Of a step of all ranks."""
    steps_ahead: int = 0
    """Twice the steps of a window; 0 has as many as fit."""

    @classmethod
    def few(cls, job: Job, profile: Profile) -> "Reference":
        """Return that of a job, of few tokens a step; sources and ranks beyond some are left out."""
        length = job.spec.mix.pack.length
        of_constructor = max(len(its) for _, its in constructors_of(job))
        ranks = max(1, min(_MOST_RANKS, of_constructor, _MOST_FEW // length))
        return cls(
            lengths=lengths_of(profile, length),
            sources=min(_MOST_SOURCES, len(job.originals)),
            group_rows=_group_rows(profile),
            row_length=length,
            ranks=ranks,
            tokens=max(1, _FEW_TOKENS // (ranks * length)) * ranks * length,
        )

    @classmethod
    def short(cls, job: Job, profile: Profile) -> "Reference":
        """Return the same with fewer steps a window, and so fewer batches a message."""
        return replace(cls.few(job, profile), steps_ahead=2 * _FEW_STEPS)

    @classmethod
    def many(cls, job: Job, profile: Profile) -> "Reference":
        """Return that of a job, of many tokens a step."""
        few = cls.few(job, profile)
        return replace(few, tokens=_MORE * few.tokens)

    def written(self, folder: Path) -> PlaneSpec:
        """Write what is read, and return the plane that reads it."""
        _write_samples(folder / "samples.parquet", self.lengths, self.group_rows)
        source = {"type": "parquet", "path": "samples.parquet", "tokens": "tokens"}
        names = [f"s{number:02}" for number in range(self.sources)]
        content: dict[str, Any] = {
            "version": 1,
            "seed": 1,
            "sources": dict.fromkeys(names, source),
            "mix": {
                "stop": "never",
                # Else all sources come to their next block in the same step.
                "stages": [{"from_step": 0, "weights": {n: 16 + k for k, n in enumerate(names)}}],
            },
            "pack": {"length": self.row_length},
            "batch": {"tokens": self.tokens, "micro_tokens": self.tokens // self.ranks},
            "loader": {"readers": dict.fromkeys(names, 1)},
            "runtime": {
                "kind": "ray",
                "loaders": 1,
                "constructors": 1,
                "prefetch_steps": self.steps_ahead,
            },
        }
        return PlaneSpec(
            mix=MixConfig.model_validate(content),
            base_dir=folder,
            tree=ClientPlaceTree.of(dp=self.ranks),
            cache_dir=folder,
        )


def lengths_of(profile: Profile, most: int) -> tuple[int, ...]:
    """Return tokens of samples of every source, those of more than ``most`` cut."""
    found = [costs.lengths[:_LENGTHS_OF_A_SOURCE] for costs in profile.sources.values()]
    return tuple(min(length, most) for lengths in found for length in lengths)


def _group_rows(profile: Profile) -> int:
    rows = [costs.block_positions // costs.block_units for costs in profile.sources.values()]
    return max(1, min(_MOST_GROUP_ROWS, round(median(rows))))


def _write_samples(path: Path, lengths: Sequence[int], group_rows: int) -> None:
    """Write samples of tokens of which the n-th comes about 1/n as often as the first."""
    repeats = max(1, _CORPUS_TOKENS // sum(lengths))
    lengths_N = np.tile(np.asarray(lengths, np.int32), repeats)
    offsets = np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int32)))
    rng = np.random.default_rng(0)
    tokens = (_VOCABULARY ** rng.random(int(offsets[-1]), np.float32)).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(tokens))
    pq.write_table(
        pa.table({"tokens": column}), path, row_group_size=group_rows, compression="zstd"
    )
