"""What a short profile measures of a mix and a machine: all the facts that a simulation needs.

Two simulations with one profile and one seed are equal. A profile may be used on another machine.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import orjson
from pydantic import Field, ValidationError, model_validator

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError
from omniload.base.reading import read_small_file
from omniload.base.writing import write_whole

__all__ = [
    "ROLES",
    "BuildCosts",
    "MessageCosts",
    "PlannerCosts",
    "Profile",
    "Role",
    "RoleCosts",
    "SourceCosts",
    "read_profile",
    "write_profile",
]

_LARGEST_BYTES = 256 << 20
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
"""Processor seconds, unless stated otherwise."""
Size = Annotated[int, Field(ge=0, le=1 << 50)]
"""Bytes."""
Length = Annotated[int, Field(ge=1, lt=1 << 31)]
Role = Literal["planner", "loader", "shadow", "reader", "constructor", "rank", "node", "process"]
"""Kind of process: ``node`` means Ray's own processes of a host, ``process`` the one process of the local runtime."""
ROLES: tuple[Role, ...] = tuple(role for role in get_args(Role) if role != "shadow")
"""Roles that are measured. A shadow is a loader that no constructor asks for samples."""


class SourceCosts(StrictModel):
    """Costs of reading a source, and properties of its samples."""

    read_s: Seconds
    """Seconds of a read, whatever its size."""
    token_s: Seconds
    """Seconds of each token of a read, transforms included."""
    block_s: Seconds
    """Seconds to decode a block, whenever positions of another block are needed."""
    merge_s: Seconds
    """Seconds to merge the parts of a range that several readers have read."""
    merge_token_s: Seconds
    """Seconds of each token of a merge."""
    block_positions: Annotated[int, Field(ge=1, le=1 << 43)]
    """Records in a block."""
    block_units: Annotated[int, Field(ge=1, le=1 << 43)]
    """Units in a block, which several readers divide among them."""
    block_bytes: Size
    """Memory of a decoded block."""
    bytes_per_token: Annotated[float, Field(ge=4, le=1 << 20, allow_inf_nan=False)]
    """Bytes per token, including further columns."""
    positions_per_epoch: Annotated[int, Field(ge=1, le=1 << 43)]
    """Records in the source."""
    counts: tuple[Annotated[int, Field(ge=0, lt=1 << 20)], ...] = Field(min_length=1)
    """Samples made from each of the first records; later records are assumed to be like them."""
    lengths: tuple[Length, ...] = Field(min_length=1)
    """Tokens of each of these samples."""

    @model_validator(mode="after")
    def _samples_are_all_there(self) -> Self:
        if sum(self.counts) != len(self.lengths):
            raise ValueError(
                f"counts sum to {sum(self.counts)}, and there are {len(self.lengths)} lengths; measure again"
            )
        return self


class BuildCosts(StrictModel):
    """Costs of handing samples over and of building batches."""

    slices_request_s: Seconds
    """Seconds for each source that a constructor asks for."""
    slices_token_s: Seconds
    """Seconds for each token."""
    rows_s: Seconds
    """Seconds to build a window of steps, whatever its content."""
    rows_token_s: Seconds
    """Seconds for each token of the window."""


class RoleCosts(StrictModel):
    """Costs of a role's process, apart from reading, planning and building."""

    end_s: Seconds
    """Seconds of a message sent or received, with its answer and consequences; for a node, of one that passes through
    it."""
    byte_s: Seconds = 0.0
    """Seconds of each byte of a message, and of all work that grows with bytes."""
    batch_s: Seconds = 0.0
    """Seconds of each batch of a rank and step in a message."""
    own: Annotated[float, Field(ge=1, le=64, allow_inf_nan=False)] = 1.0
    """Factor by which planning is slower in a plane, where other processes use the same caches, than alone."""
    rested: Annotated[float, Field(ge=1 / 64, le=64, allow_inf_nan=False)] = 1.0
    """Factor by which a message takes longer on a host that was idle since the message before, as while ranks train; 1
    in profiles that were kept before this was measured."""
    clock: Annotated[float, Field(ge=0, le=64, allow_inf_nan=False)] = 0.0
    """Cores that it uses while no role asks for anything: heartbeats, and Ray's time-driven work."""

    def message_s(self, size_bytes: float = 0, batches: float = 0) -> float:
        """Return the cost of a message at full speed."""
        return self.end_s + size_bytes * self.byte_s + batches * self.batch_s


class MessageCosts(StrictModel):
    """Costs of a message from one role to another."""

    latencies_s: tuple[Seconds, ...] = Field(min_length=1)
    """Latencies of several messages, without processor time."""
    roles: dict[Role, RoleCosts]
    """Costs by the role of a message's end."""
    takes_s: tuple[Annotated[tuple[Seconds, ...], Field(min_length=1)], ...] = ()
    """Seconds to take a batch that is ready, if its rank has trained since the previous one. Several times by the place
    of the batch among those that arrived together, because the next ones are requested at the second; later places take
    as long as the last. At full speed, and in a profile without these times, taking a batch costs nothing."""
    idle: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.0
    """Share of the wanted cores of a host that processes lose because an idle core is woken late; 0 if other work used
    all idle cores."""
    process_bytes: Size
    """Memory of a role's empty process; 0 if roles are threads."""
    node_bytes: Size
    """Memory of Ray's own processes on a host."""

    @model_validator(mode="after")
    def _roles_are_all_there(self) -> Self:
        if missing := [role for role in ROLES if role not in self.roles]:
            raise ValueError(
                f"roles has no {missing[0]!r}, only {sorted(self.roles)}; measure again"
            )
        return self


class PlannerCosts(StrictModel):
    """Costs of planning for a number of ranks, sources and tokens per step."""

    ranks: Annotated[int, Field(ge=1, le=1 << 31)]
    sources: Annotated[int, Field(ge=1, le=1 << 31)]
    tokens: Annotated[int, Field(ge=1, le=1 << 40)]
    """Tokens of a step."""
    report_s: Seconds
    """Seconds of a loader's report that leads to no plan."""
    taken_s: Seconds
    """Seconds of a rank that took steps, if no plan follows."""
    step_s: Seconds
    """Seconds to plan and journal a step."""
    part_s: Seconds
    """Seconds of one constructor's part of a step."""

    def times(self, factor: float) -> Self:
        """Return the costs multiplied by a factor."""
        named = ("report_s", "taken_s", "step_s", "part_s")
        return self.model_copy(update={name: getattr(self, name) * factor for name in named})


class Profile(StrictModel):
    """Measured costs of a mix and a machine."""

    version: Literal[11] = 11
    """Version of this format. Version 1 lacks the costs of several readers, 2 the costs of a message at each role, and
    3 the costs of its batches, with too little decoding for some sources. In 4, messages of many ranks cost what those
    of one rank do. In 5, blocks decoded by small planes count as bytes of messages, and time-driven work is too small.
    In 6, messages of ranks cost what they do if several ranks share a process. In 7, ranks of the opener count as Ray's
    time-driven work, and no wanted core is idle. Version 9 draws one time for all batches after the first of a window.
    In 10, ranks ask for whole windows after pauses."""
    machine: Annotated[str, Field(max_length=200)]
    """Model of the processor."""
    cores: Annotated[int, Field(ge=1, le=1 << 16)]
    """Cores that were used for measuring."""
    load: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Processes that wanted a core during the measurement, averaged over a minute."""
    threads: Annotated[float, Field(ge=1, le=1 << 16, allow_inf_nan=False)]
    """Cores that the threads of one process got at the same time."""
    sources: dict[str, SourceCosts] = Field(min_length=1)
    """Costs of sources, by name."""
    builds: dict[str, BuildCosts] = Field(default_factory=dict)
    """Costs of building, by runtime: between processes, samples are copied once more."""
    messages: dict[str, MessageCosts] = Field(default_factory=dict)
    """Costs of messages, by runtime."""
    planners: tuple[PlannerCosts, ...] = ()
    """Costs of planning, one entry for each size."""

    @property
    def is_of_a_busy_machine(self) -> bool:
        """Whether other work delayed messages and threads while they were measured."""
        return self.load > self.cores

    def planner_of(self, *, ranks: int, sources: int, tokens: int) -> PlannerCosts | None:
        """Return the costs of planning at a size, if they were measured."""
        wanted = (ranks, sources, tokens)
        return next((p for p in self.planners if (p.ranks, p.sources, p.tokens) == wanted), None)


def read_profile(path: Path) -> Profile:
    """Read a profile written by ``write_profile``.

    Raises:
        ConfigError: The file is no profile, or is of another version.
    """
    content = read_small_file(path, most_bytes=_LARGEST_BYTES, what="a profile")
    try:
        return Profile.model_validate(orjson.loads(content))
    except (orjson.JSONDecodeError, ValidationError) as error:
        first = str(error).splitlines()
        raise ConfigError(
            f"{path}: is no profile of this release ({' '.join(first[:3]):.200}); remove it to measure again"
        ) from error


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile for later simulations, here or elsewhere.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        write_whole(path, orjson.dumps(profile.model_dump()))
    except OSError as error:
        raise ConfigError(f"{path}: the profile cannot be kept there: {error}") from error
