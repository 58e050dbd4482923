"""Shared by both runtimes: the specification of a run, and the protocols of a plane and of a rank's handle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

from omniload.base.state import Json, JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.messages import ResizeAsked
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import Edit
from omniload.mix.edits.edits_file import edits_in, read_history, write_history
from omniload.mix.edits.found import merged
from omniload.mix.edits.history import History
from omniload.mix.run_record import MixText, write_run_record
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import World

__all__ = [
    "DataPlane",
    "PlaneSpec",
    "RankHandle",
    "first_step_of",
    "join_world",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpec:
    """The specification of a run: its mix file, and everything that is not in the file."""

    mix: MixConfig
    """The declared mix."""
    base_dir: Path
    """Folder from which relative paths of the mix file start."""
    tree: ClientPlaceTree
    """The ranks of the job."""
    run_dir: Path | None = None
    """Folder of the run, for its journal; ``None`` keeps none."""
    state: Mapping[str, Json] | None = None
    """Loader state to resume from."""
    num_steps: int | None = None
    """First step that is not planned, the end of the run."""
    restarts: int = 0
    """Number of times that its launcher has restarted the job."""
    cache_dir: Path | None = None
    """Folder that keeps the indexes of sources."""
    edits: tuple[Edit, ...] = ()
    """Edits of the mix; for a run with a folder they are read there when its plane is opened."""
    mix_text: MixText | None = None
    """Text of the mix, to be kept in the run's folder; ``None`` if the opener of the plane keeps it."""

    passed_on: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the opener's environment that planner and loaders get too, on whichever host."""

    @property
    def history(self) -> History:
        """The mix and its edits."""
        return History(self.mix, self.edits)

    def with_edits(self) -> Self:
        """Return the run with the edits that its folder keeps, or that its state carries; nothing is written.

        Raises:
            StateError: The edits are damaged, belong to another mix, or contradict each other.
        """
        # Both are read, because a state may be older than the folder, or come from another folder.
        kept = read_history(self.run_dir, self.mix) if self.run_dir else self.history
        return replace(self, edits=merged(kept, edits_in(self.state)).edits)

    def keep(self) -> None:
        """Write the edits of the state, and the mix that the run was started with, to the run's folder.

        This happens once a planner has accepted the state. If it happened earlier, a state given by mistake would leave
        the edits of another run behind.

        Raises:
            StateError: They cannot be written.
        """
        if self.run_dir is None:
            return
        if read_history(self.run_dir, self.mix).edits != self.edits:
            write_history(self.run_dir, self.history)
        if self.mix_text is not None:
            sizes = {axis: self.tree.size_of(axis) for axis in ("dp", "cp")}
            step = first_step_of(self)
            given = self.mix_text
            write_run_record(self.run_dir, given.path, sizes, from_step=step, text=given.text)


class RankHandle(Protocol):
    """What one rank calls to get its batches.

    For each step: ``take``, then ``taken`` once the trainer has the batch. Meanwhile the rank may look at the next one:
    ``is_ready`` tells whether it is built, and ``lent`` returns its batch early, for a copy to a device. What is lent
    is not given: until ``take``, a change of the mix may take its plan back, and then another batch comes.
    """

    first_step: int
    """Step that the data plane started from."""

    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        """Wait for the batch of ``step`` and return it; ``None`` if the data ends before it.

        Args:
            step: The step; after a timeout the call can be repeated.
            timeout_s: Longest wait; ``None`` for the mix's ``runtime.batch_timeout``.

        Raises:
            UnavailableError: The time has passed; names the role that holds the batch up, and why.
            OmniloadError: The data plane has failed; this is the error that was raised there.
        """
        ...

    def is_ready(self, step: int) -> bool:  # noqa: ARG002 -- for handles that know
        """Return whether ``take`` would return the batch of ``step`` at once; ``False`` also if that is unknown."""
        return False

    def lent(self, step: int, timeout_s: float | None = None) -> Batch | None:  # noqa: ARG002 -- for handles that lend
        """Return the batch of a ready ``step`` without taking it; ``take`` returns the same unless the plan changes.

        Returns ``None`` if nothing is lent, and ``take`` may be called instead. A lent batch is not taken yet, so a
        change of the mix may still take effect at that step.

        Raises:
            OmniloadError: As for ``take``.
        """
        return None

    def taken(self, step: int) -> None:
        """Report that the trainer has the batch of ``step``."""
        ...

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``."""
        ...

    def resize(self, asked: ResizeAsked, dp_rank: int) -> None:
        """Become a rank of another world from a step on; prefetched batches are dropped, and that step comes next.

        Raises:
            ConfigError: The plane's ranks stay as they are, or there is no such rank.
            StateError: Other ranks named another world, or the step cannot be placed on other ranks.
            UnavailableError: No planner answered in time.
        """
        ...

    def close(self) -> None:
        """Leave the data plane, which keeps running for other ranks."""
        ...


class DataPlane(Protocol):
    """A running data plane."""

    def handle(
        self, dp_rank: int, cp_rank: int = 0, asked: ResizeAsked | None = None
    ) -> RankHandle:
        """Return the handle of one of the ranks that the plane was opened for, or of the ranks of ``asked``."""
        ...

    def close(self) -> None:
        """End everything that was started; repeated and concurrent calls do no harm."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def first_step_of(spec: PlaneSpec) -> int:
    """Return the step that a plane starts from."""
    step = 0 if spec.state is None else spec.state["step"]
    assert isinstance(step, int), "a planner was made of it"
    return step


def join_world(
    asked: ResizeAsked,
    resize: Callable[[ResizeAsked], World],
    was_held: Callable[[World], bool],
) -> World:
    """Add a joining rank to a plane, and return the world that the rank belongs to.

    A rank that names no generation and replaces a rank that is gone belongs to the next world, to which the remaining
    ranks are resized.

    Args:
        asked: The number of ranks as the joining rank knows it.
        resize: Asks the planner for a world.
        was_held: Returns whether the rank's place in a world had a holder that is gone.

    Raises:
        OmniloadError: ``resize`` or ``was_held`` raised it.
    """
    world = resize(asked)
    if asked.generation is None and was_held(world):
        return resize(asked.after(world.generation))
    return world
