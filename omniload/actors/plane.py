"""What both runtimes share: what a run is, and the handle of a rank."""

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
from omniload.plan.world import require_rows as plan_requires

__all__ = [
    "DataPlane",
    "PlaneSpec",
    "RankHandle",
    "first_step_of",
    "join_world",
    "require_rows",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpec:
    """What a run is: its mix file, and what the file does not say."""

    mix: MixConfig
    """The declared mix."""
    base_dir: Path
    """Folder that the mix file's relative paths start at."""
    tree: ClientPlaceTree
    """The trainers."""
    run_dir: Path | None = None
    """Folder of the run, for its journal; ``None`` keeps none."""
    state: Mapping[str, Json] | None = None
    """Loader state to resume from."""
    num_steps: int | None = None
    """First step that is not planned."""
    restarts: int = 0
    """Times that its launcher has started the job again."""
    cache_dir: Path | None = None
    """Folder for indexes of sources that have none of their own."""
    edits: tuple[Edit, ...] = ()
    """Edits of the mix; those of a run with a folder are read there when its plane is opened."""
    read: MixText | None = None
    """Text of the mix, which the run's folder is to keep; ``None`` where the opener of the plane keeps it."""

    passed_on: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the opener's environment that planner and loaders have as well, wherever they are."""

    @property
    def history(self) -> History:
        """The mix and its edits."""
        return History(self.mix, self.edits)

    def with_edits(self) -> Self:
        """Return the run with the edits that its folder keeps, or that its state carries; nothing is written.

        Raises:
            StateError: They are damaged, of another mix, or contradict each other.
        """
        # Both are taken: a state may be older than the folder, or of a folder that is another.
        kept = read_history(self.run_dir, self.mix) if self.run_dir else self.history
        return replace(self, edits=merged(kept, edits_in(self.state)).edits)

    def keep(self) -> None:
        """Have the run's folder keep the edits that the state brought, and what the run was started with.

        Done once a planner has accepted the state. Earlier would leave the edits of another run behind, where
        its state was given by mistake.

        Raises:
            StateError: They cannot be written.
        """
        if self.run_dir is None:
            return
        if read_history(self.run_dir, self.mix).edits != self.edits:
            write_history(self.run_dir, self.history)
        if self.read is not None:
            sizes = {axis: self.tree.size_of(axis) for axis in ("dp", "cp")}
            step = first_step_of(self)
            write_run_record(
                self.run_dir, self.read.path, sizes, from_step=step, text=self.read.text
            )


class RankHandle(Protocol):
    """One rank's access to its batches."""

    first_step: int
    """Step that the data plane started from."""

    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        """Wait for the batch of ``step``; ``None`` when the data ends before it.

        Args:
            step: The step; asked again after a timeout it is waited for again.
            timeout_s: Longest wait; ``None`` for the mix's ``runtime.batch_timeout``.

        Raises:
            UnavailableError: The time has passed; names the role that holds the batch up, and why.
            OmniloadError: The data plane has failed; the cause as it was raised there.
        """
        ...

    def is_ready(self, step: int) -> bool:  # noqa: ARG002 -- of those that can tell
        """Tell whether ``take`` would return the batch of ``step`` at once; ``False`` also where that is not known."""
        return False

    def lent(self, step: int, timeout_s: float | None = None) -> Batch | None:  # noqa: ARG002 -- of those that lend
        """Return the batch of ``step``, which ``is_ready``, as ``take`` will unless its plan is taken back before.

        ``None`` where nothing is lent, and ``take`` may as well be asked. What is returned is not given yet: a change
        of the mix may still hold from that step on.

        Raises:
            OmniloadError: As for ``take``.
        """
        return None

    def taken(self, step: int) -> None:
        """Tell that the trainer has the batch of ``step``."""
        ...

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``."""
        ...

    def resize(self, asked: ResizeAsked, dp_rank: int) -> None:
        """Become a rank of another world from a step on: later batches are dropped, and that step comes next.

        Raises:
            ConfigError: The plane's ranks stay as they are, or there is no such rank.
            StateError: Other ranks name another world, or the step cannot be placed on other ranks.
            UnavailableError: No planner has answered in time.
        """
        ...

    def close(self) -> None:
        """Leave the data plane; it runs on for other ranks."""
        ...


class DataPlane(Protocol):
    """A running data plane."""

    def handle(
        self, dp_rank: int, cp_rank: int = 0, asked: ResizeAsked | None = None
    ) -> RankHandle:
        """Return a rank's handle: of the ranks that the plane was opened for, or of those that ``asked`` says."""
        ...

    def close(self) -> None:
        """End everything that was started; once more, or by two threads at once, does no harm."""
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
    """Have a plane count a rank that joins it, and return the world that the rank is of.

    A rank that names no generation, and joins in the place of one that is gone, is of the next world, to which the
    ranks that stay are resized.

    Args:
        asked: The ranks that the joining one counts.
        resize: Asks the planner for a world.
        was_held: Tells whether the rank's place in a world had a holder, which is gone.

    Raises:
        OmniloadError: As ``resize`` and ``was_held`` raise it.
    """
    world = resize(asked)
    if asked.generation is None and was_held(world):
        return resize(asked.after(world.generation))
    return world


def require_rows(spec: PlaneSpec) -> None:
    """Refuse a batch that cannot give every data-parallel rank a row.

    Raises:
        ConfigError: With the rows there are and the rows needed.
    """
    plan_requires(spec.mix, spec.tree)
