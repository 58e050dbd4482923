"""What a short profile measures of a mix and a machine: all that a simulation takes from the world.

Two simulations of one profile and one seed are the same; a profile may be carried to another machine.
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
"""Processor seconds, unless said otherwise."""
Size = Annotated[int, Field(ge=0, le=1 << 50)]
"""Bytes."""
Length = Annotated[int, Field(ge=1, lt=1 << 31)]
Role = Literal["planner", "loader", "shadow", "reader", "constructor", "rank", "node", "process"]
"""Kind of process: ``node`` is Ray's own of a host, ``process`` the one process of the local runtime."""
ROLES: tuple[Role, ...] = tuple(role for role in get_args(Role) if role != "shadow")
"""Those that are measured: a shadow is a loader that nobody asks for samples."""


class SourceCosts(StrictModel):
    """What reading a source takes, and what its samples are like."""

    read_s: Seconds
    """A read, whatever its size."""
    token_s: Seconds
    """Each token of it, transforms included."""
    block_s: Seconds
    """Decoding a block: read whenever positions of another one are wanted."""
    merge_s: Seconds
    """Putting what several readers have read of a range together."""
    merge_token_s: Seconds
    """Each token of it."""
    block_positions: Annotated[int, Field(ge=1, le=1 << 43)]
    """Records of a block."""
    block_units: Annotated[int, Field(ge=1, le=1 << 43)]
    """Units of a block, which several readers divide among them."""
    block_bytes: Size
    """Memory of a decoded block."""
    bytes_per_token: Annotated[float, Field(ge=4, le=1 << 20, allow_inf_nan=False)]
    """Of tokens and further columns."""
    positions_per_epoch: Annotated[int, Field(ge=1, le=1 << 43)]
    """Records of the source."""
    counts: tuple[Annotated[int, Field(ge=0, lt=1 << 20)], ...] = Field(min_length=1)
    """Samples that each of the first records gave; those after them are taken to be like them."""
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
    """What handing samples over and building batches takes."""

    slices_request_s: Seconds
    """Each source that it asks for."""
    slices_token_s: Seconds
    """Each token."""
    rows_s: Seconds
    """Building a window of steps, whatever is in it."""
    rows_token_s: Seconds
    """Each token of it."""


class RoleCosts(StrictModel):
    """What a process of a role takes beside reading, planning and building."""

    end_s: Seconds
    """A message that it sends or takes, answers and whatever follows from it included; of a node, one that passes."""
    byte_s: Seconds = 0.0
    """Each byte of it, and whatever goes with bytes."""
    batch_s: Seconds = 0.0
    """Each batch of a rank and step in it."""
    own: Annotated[float, Field(ge=1, le=64, allow_inf_nan=False)] = 1.0
    """Times as long as by itself that the planner plans where other processes use the same caches."""
    rested: Annotated[float, Field(ge=1 / 64, le=64, allow_inf_nan=False)] = 1.0
    """Times as long that a message takes on a host of which nothing wants a core between two of them, as ranks train; 1
    in profiles that were kept before this was measured."""
    clock: Annotated[float, Field(ge=0, le=64, allow_inf_nan=False)] = 0.0
    """Cores that it keeps busy while nobody asks for anything: heartbeats, and what Ray does by the clock."""

    def message_s(self, size_bytes: float = 0, batches: float = 0) -> float:
        """Return what a message takes at full speed."""
        return self.end_s + size_bytes * self.byte_s + batches * self.batch_s


class MessageCosts(StrictModel):
    """What a message from one role to another takes."""

    latencies_s: tuple[Seconds, ...] = Field(min_length=1)
    """Time on the way beside processor time, of several messages."""
    roles: dict[Role, RoleCosts]
    """By the role of its ends."""
    takes_s: tuple[Annotated[tuple[Seconds, ...], Field(min_length=1)], ...] = ()
    """A batch that is at hand, where its rank has trained since the one before: of several, by their place among those
    that came together, as those behind them are asked for at the second; what is further behind takes as long as the
    last. At full speed it takes nothing, nor in a profile without them."""
    idle: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.0
    """Part of what processes want of a host's cores that none has, as a core that idles is woken late for what comes;
    0 where other work had whatever they left."""
    process_bytes: Size
    """Memory of a role's process that holds nothing yet; 0 where roles are threads."""
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
    """What planning takes for so many ranks, sources and tokens of a step."""

    ranks: Annotated[int, Field(ge=1, le=1 << 31)]
    sources: Annotated[int, Field(ge=1, le=1 << 31)]
    tokens: Annotated[int, Field(ge=1, le=1 << 40)]
    """Of a step."""
    report_s: Seconds
    """A report of a loader from which no plan follows."""
    taken_s: Seconds
    """A rank that took steps, where no plan follows."""
    step_s: Seconds
    """A step that is planned and journaled."""
    part_s: Seconds
    """One constructor's part of a step."""

    def times(self, factor: float) -> Self:
        """Return the costs where all take so many times as long."""
        named = ("report_s", "taken_s", "step_s", "part_s")
        return self.model_copy(update={name: getattr(self, name) * factor for name in named})


class Profile(StrictModel):
    """What was measured."""

    version: Literal[11] = 11
    """Of this format; 1 cannot tell what several readers take, 2 what a message takes at each role, 3 what batches in
    it do, and what decoding takes was too little of some sources, 4 has messages of many ranks cost what those of one
    do, 5 has blocks that small planes decoded among the bytes of messages, and too little done by the clock, 6 has
    messages of ranks cost what they do where several share a process, 7 has ranks of the opener in what Ray does by the
    clock, and no core idle while something wants it, 9 draws the batch behind the first of a window for all of them, 10
    has ranks ask for whole windows after pauses."""
    machine: Annotated[str, Field(max_length=200)]
    """The processor."""
    cores: Annotated[int, Field(ge=1, le=1 << 16)]
    """Cores it was measured on."""
    load: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Processes that wanted a core when it was measured, on average over a minute."""
    threads: Annotated[float, Field(ge=1, le=1 << 16, allow_inf_nan=False)]
    """Cores that the threads of one process got at once."""
    sources: dict[str, SourceCosts] = Field(min_length=1)
    """By name."""
    builds: dict[str, BuildCosts] = Field(default_factory=dict)
    """By runtime: across processes samples are copied once more."""
    messages: dict[str, MessageCosts] = Field(default_factory=dict)
    """By runtime."""
    planners: tuple[PlannerCosts, ...] = ()
    """One for each size."""

    @property
    def is_of_a_busy_machine(self) -> bool:
        """Whether other work kept messages and threads waiting as they were measured."""
        return self.load > self.cores

    def planner_of(self, *, ranks: int, sources: int, tokens: int) -> PlannerCosts | None:
        """Return what planning takes at a size, if it was measured."""
        wanted = (ranks, sources, tokens)
        return next((p for p in self.planners if (p.ranks, p.sources, p.tokens) == wanted), None)


def read_profile(path: Path) -> Profile:
    """Read what ``write_profile`` wrote.

    Raises:
        ConfigError: It is no profile, or one of another version.
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
    """Keep a profile for later simulations, here or elsewhere.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        write_whole(path, orjson.dumps(profile.model_dump()))
    except OSError as error:
        raise ConfigError(f"{path}: the profile cannot be kept there: {error}") from error
