"""The ranks of a run from a step on. They change while it runs; what a step trains on does not.

A *world* is one generation of them::

    generation   0                1              2
    step         0 1 2 ... 15 16  17 18 ... 39   40 41 ...
    dp           4                3              4
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Self

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import Json, JsonObject, whole_number
from omniload.base.units import counted
from omniload.mix.config import MixConfig
from omniload.mix.state import COUNT_LIMIT
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Edition", "RanksServed", "World", "WorldRank", "require_follows", "require_rows"]

_RANKS_LIMIT = 1 << 31


class WorldRank(NamedTuple):
    """A rank as one of a world: what it asks for and tells is of that world alone."""

    dp: int
    """Place along dp."""
    cp: int = 0
    """Place along cp."""
    generation: int = 0
    """Generation of the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """The plans of a run as they were written last: taking some back makes another edition of those behind a step."""

    life: int = 0
    """Planners before the one that made it."""
    turn: int = 0
    """Number of it, of the planner's life."""
    since: int = 0
    """First step whose plan may be another one than in editions before. Where it is, no rank was given the other."""

    @property
    def number(self) -> tuple[int, int]:
        """Sort key of editions."""
        return self.life, self.turn

    def keeps(self, before: "Edition", step: int) -> bool:
        """Return whether the plan of a step that was published under ``before`` is still valid under this edition.

        A planner that takes plans back publishes the remaining ones again. A planner that takes over plans the last
        steps again, and all steps from ``since`` on are built from its plans.
        """
        if before.life == self.life:
            return before.turn >= self.turn
        return before.life > self.life or step < self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksServed:
    """The ranks that one data constructor builds for."""

    dp_ranks: tuple[int, ...]
    """Data-parallel ranks, rising; none where there are fewer than constructors."""
    generation: int = 0
    """Generation of the ranks' world."""
    step: int = 0
    """First step of that world."""
    edition: Edition = Edition()
    """Edition of the plans that are built for them."""

    @property
    def number(self) -> tuple[int, tuple[int, int]]:
        """Their generation, and the number of the edition: neither ever falls."""
        return self.generation, self.edition.number


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a run from a step on, until the next world begins."""

    tree: ClientPlaceTree
    """Their mesh."""
    generation: int = 0
    """Rises with every change; 0 for the ranks that a plane was opened for."""
    step: int = 0
    """First step that these ranks train on."""

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.tree.size_of("dp")

    def ranks(self) -> Iterator[tuple[int, int]]:
        """Yield the place of every rank along dp and cp."""
        return product(range(self.dp), range(self.tree.size_of("cp")))

    def constructor_of(self, dp_rank: int, num_constructors: int) -> int:
        """Return the number of the data constructor that serves a rank.

        Raises:
            ValueError: There is no such rank.
        """
        # Constructors stay as ranks come and go; if there are fewer ranks, some constructors serve none.
        return self.tree.constructor_of(dp_rank, min(num_constructors, self.dp))

    def served_by(self, constructor: int, num_constructors: int) -> RanksServed:
        """Return the ranks of one data constructor."""
        serving = min(num_constructors, self.dp)
        theirs = self.tree.dp_ranks_of(constructor, serving) if constructor < serving else ()
        return RanksServed(dp_ranks=tuple(theirs), generation=self.generation, step=self.step)

    def followed_by(self, *, dp: int, step: int, generation: int | None = None) -> "World":
        """Return the world that a rank counts itself to.

        Every rank of a world asks for it, one after another: the first one makes it, to the others it is this one.

        Args:
            dp: Data-parallel ranks.
            step: First step that they train on.
            generation: Theirs, above this one's; ``None`` for the next, or for this world where it is the same.

        Returns:
            This world where it is what is asked for; else the one that follows it.

        Raises:
            StateError: The generation is over, or has other ranks or another first step.
        """
        is_same = (dp, step) == (self.dp, self.step)
        if is_same and generation in (None, self.generation):
            return self
        if generation is not None and generation <= self.generation:
            is_over = generation < self.generation
            said = "is over" if is_over else f"has dp {self.dp} from step {self.step}"
            remedy = (
                "join again with the numbers of now"
                if is_over
                else "give every rank the same numbers, at the same step boundary"
            )
            raise StateError(
                f"a rank counts dp {dp} from step {step} as generation {generation}, which {said}; the plane is at "
                f"generation {self.generation}: {remedy}"
            )
        tree = ClientPlaceTree(
            axes=self.tree.axes,
            sizes=tuple(
                dp if axis == "dp" else size
                for axis, size in zip(self.tree.axes, self.tree.sizes, strict=True)
            ),
        )
        number = self.generation + 1 if generation is None else generation
        return World(tree=tree, generation=number, step=step)

    def to_json(self) -> JsonObject:
        """Return it as plain JSON."""
        sizes: dict[str, Json] = dict(zip(self.tree.axes, self.tree.sizes, strict=True))
        return {"step": self.step, "generation": self.generation, "sizes": sizes}

    @classmethod
    def from_json(cls, stored: Mapping[str, Json]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            StateError: It is damaged.
        """
        try:
            sizes: Mapping[str, Json] = stored["sizes"]  # type: ignore[assignment]
            numbers = [whole_number(s, least=1, below=_RANKS_LIMIT) for s in sizes.values()]
            return cls(
                # The order of the keys is that of the levels; ``to_json`` wrote it and JSON keeps it.
                tree=ClientPlaceTree(axes=tuple(sizes), sizes=tuple(numbers)),  # type: ignore[arg-type]
                generation=whole_number(stored["generation"], below=COUNT_LIMIT),
                step=whole_number(stored["step"], below=COUNT_LIMIT),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"a world in the journal is damaged ({error!r:.200}); resume from a checkpoint"
            ) from error


def require_rows(mix: MixConfig, tree: ClientPlaceTree) -> None:
    """Refuse a batch that cannot give every data-parallel rank a row.

    Raises:
        ConfigError: With the rows there are and the rows needed.
    """
    dp, cp = tree.size_of("dp"), tree.size_of("cp")
    if mix.rows_per_step < dp:
        raise ConfigError(
            f"batch.tokens {mix.batch.tokens} is {counted(mix.rows_per_step, 'row')} of pack.length {mix.pack.length}, "
            f"fewer than the {dp} data-parallel ranks; raise batch.tokens to {dp * mix.pack.length} or more, or "
            "use fewer ranks"
        )
    # Peers along cp take two slices of a row each, an early one and a late one.
    if cp > 1 and mix.pack.length % (2 * cp):
        raise ConfigError(
            f"pack.length {mix.pack.length} is not a multiple of 2 * cp = {2 * cp}; change it"
        )


def require_follows(held: World, world: World, mix: MixConfig, within: range) -> None:
    """Refuse a world that cannot follow the one that is held.

    Args:
        held: The current world.
        world: What a rank counts itself to, as ``held.followed_by`` gives it.
        mix: The mix.
        within: Possible first steps, which are those that can still be given to other ranks.

    Raises:
        ConfigError: The plane was opened for ranks that stay, or there are more of them than rows in a step.
        StateError: The ranks cannot begin at their step.
    """
    if not mix.runtime.elastic:
        raise ConfigError(
            f"a rank counts dp {world.dp} from step {world.step} on, and the ranks of this plane stay as they are; "
            "open it with elastic=True, or runtime.elastic: true in the mix"
        )
    require_rows(mix, world.tree)
    # Not before the current world's first step, because a world that has begun is not taken back.
    least, most = max(held.step, within.start), within.stop - 1
    if not least <= world.step <= most:
        raise StateError(
            f"dp {world.dp} cannot begin at step {world.step}: steps {least} to {most} can be given to other ranks; "
            "resize on all ranks at one step boundary, with the first step that is not committed"
        )
