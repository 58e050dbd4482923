"""Who needs what: the trainers' mesh as a tree.

The paper's ``ClientPlaceTree``. Each level is an axis of the mesh, the outermost
first; each leaf is a rank. How an axis takes its data decides what a rank is sent:

====== ==================================================================
dp     other samples: the axis that batches are dealt along
cp, ep the same rows, other slices of them
tp     the same data: one rank fetches, the trainer broadcasts
pp     the same batch for every stage: one stage fetches, or all do
world  not a level: every rank takes its own samples (encoders)
====== ==================================================================

Source:
    OVERLORD / Omniload / MegaScale-Data, arXiv 2504.09844, on the client place tree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.units import counted

__all__ = ["Axis", "BucketAxis", "ClientPlaceTree", "MeshAxis", "require_broadcast"]

MeshAxis: TypeAlias = Literal["pp", "dp", "cp", "tp", "ep"]
"""An axis of the mesh, a level of the tree."""
BucketAxis: TypeAlias = Literal["dp", "cp", "ep", "world"]
"""An axis that samples can be dealt along."""
Axis: TypeAlias = Literal["pp", "dp", "cp", "tp", "ep", "world"]
"""Any axis."""

_MESH_AXES: tuple[MeshAxis, ...] = ("pp", "dp", "cp", "tp", "ep")
_CONSUMER_AXES: Mapping[str, tuple[MeshAxis, ...]] = MappingProxyType(
    {"dp": ("dp",), "cp": ("dp", "cp"), "ep": ("dp", "ep"), "world": _MESH_AXES}
)
"""Ranks that differ in one of these are different consumers along the bucket axis."""

_CHILDREN_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlaceTree:
    """The ranks of a training job by their coordinates on the mesh.

    Ranks are numbered with the last axis running fastest, as in Megatron and torch's device mesh.
    """

    axes: tuple[MeshAxis, ...]
    """Levels of the tree, the outermost first."""
    sizes: tuple[int, ...]
    """Size of each level."""

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes):
            raise ValueError(
                f"axes {self.axes} and sizes {self.sizes} differ in number; give each axis one size"
            )
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis not in _MESH_AXES:
                raise ValueError(
                    f"axis {axis!r} is no level of a mesh; choose among {list(_MESH_AXES)}"
                )
            if size < 1:
                raise ValueError(
                    f"axis {axis} has size {size}; a size is at least 1, leave the axis out for 1"
                )
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axes {self.axes} name an axis twice; give each one level")

    @classmethod
    def of(cls, *, dp: int = 1, cp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1) -> Self:
        """Return the tree of a mesh in the usual order: pp outermost, then dp, cp and tp; an axis ep innermost.

        For another order, use ``from_sizes``, as in ``{"pp": 2, "ep": 2, "dp": 4}``.
        """
        tree = cls(axes=("pp", "dp", "cp", "tp", "ep"), sizes=(pp, dp, cp, tp, ep))
        # Show the mesh as it is used, without a level that hardly any mesh has.
        return tree if ep > 1 else cls(axes=tree.axes[:-1], sizes=tree.sizes[:-1])

    @classmethod
    def from_sizes(
        cls, sizes: Mapping[MeshAxis, int], *, world_size: int | None = None
    ) -> "ClientPlaceTree":
        """Return the tree with the levels of ``sizes``, the outermost first.

        Raises:
            ValueError: An axis is unknown, a size is below 1, or the product of the sizes is not ``world_size``, if
                given.
        """
        tree = cls(axes=tuple(sizes), sizes=tuple(sizes.values()))
        if world_size is not None and tree.world_size != world_size:
            shown = " * ".join(f"{axis} {size}" for axis, size in sizes.items()) or "no axes"
            raise ValueError(
                f"{shown} make {counted(tree.world_size, 'rank')}, the job has {world_size}; "
                "change a size or the number of ranks"
            )
        return tree

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return math.prod(self.sizes)

    def size_of(self, axis: Axis) -> int:
        """Return the size of an axis; 1 if the mesh does not have it."""
        if axis == "world":
            return self.world_size
        return dict(zip(self.axes, self.sizes, strict=True)).get(axis, 1)

    def coordinates_of(self, rank: int) -> Mapping[MeshAxis, int]:
        """Return the coordinates of a rank on every axis of the mesh.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank is {rank}; this mesh has ranks 0 to {self.world_size - 1} ({self._shape()})"
            )
        found: dict[MeshAxis, int] = {}
        # From the innermost axis, which runs fastest.
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return MappingProxyType({axis: found[axis] for axis in self.axes})

    def ranks_at(
        self,
        *,
        pp: int | None = None,
        dp: int | None = None,
        cp: int | None = None,
        tp: int | None = None,
        ep: int | None = None,
    ) -> tuple[int, ...]:
        """Return the ranks at the given coordinates, in rising order; an axis that is not given is free.

        Raises:
            ValueError: A coordinate is outside its axis.
        """
        fixed = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}
        # Axes that the mesh lacks are allowed too; their only coordinate is 0.
        for axis in _MESH_AXES:
            at, size = fixed[axis], self.size_of(axis)
            if at is not None and not 0 <= at < size:
                raise ValueError(
                    f"{axis} is {at}; this mesh has {axis} 0 to {size - 1} ({self._shape()})"
                )
        ranks = [0]
        for axis, size in zip(self.axes, self.sizes, strict=True):
            at = fixed[axis]
            places = range(size) if at is None else (at,)
            ranks = [rank * size + place for rank in ranks for place in places]
        return tuple(ranks)

    def ranks_by_place(self) -> NDArray[np.int64]:
        """Return the numbers of all ranks by place, ``[dp, cp, peers]``.

        Peers take the same rows, or the same slices of rows. Their numbers rise, and the first peer fetches for all.
        """
        return _ranks_by_place(self)

    def slice_of(self, rank: int) -> tuple[int, int]:
        """Return the index of the slice of its rows that a rank takes, and the number of slices: its place along cp."""
        return self.coordinates_of(rank).get("cp", 0), self.size_of("cp")

    def fetching_ranks(self, broadcast: Sequence[MeshAxis] = ()) -> tuple[int, ...]:
        """Return the ranks that fetch from a data constructor, in rising order; the others get their data by broadcast.

        Raises:
            ValueError: The data cannot be broadcast along an axis, because ranks along dp take different samples.
        """
        require_broadcast(broadcast)
        first = dict.fromkeys(broadcast, 0)
        return self.ranks_at(**first)

    def buckets(self, axis: BucketAxis, group_size: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the buckets that samples are dealt to, each as the ranks that consume it.

        Args:
            axis: ``dp``: a bucket for every dp rank, shared by all its ranks. ``cp`` or ``ep``: a bucket for every
                place on dp and that axis. ``world``: a bucket for every rank.
            group_size: Number of neighbouring consumers that share a bucket.

        Returns:
            Ranks of each bucket; every rank is in exactly one.

        Raises:
            ValueError: Samples cannot be dealt along the axis, or ``group_size`` does not divide the consumers.
        """
        levels, num = self._consumers_along(axis, group_size)
        # A mesh without axes is one rank, at no place.
        places = np.unravel_index(np.arange(self.world_size), self.sizes or (1,))
        consumer = np.zeros(self.world_size, np.int64)
        for level, place in zip(self.axes, places, strict=False):
            if level in levels:
                consumer = consumer * self.size_of(level) + place
        # Neighbouring consumers lie side by side, and all have as many ranks: equal cuts are groups of them.
        order = np.argsort(consumer, kind="stable").reshape(num, -1)
        return tuple(map(tuple, order.tolist()))

    def num_buckets(self, axis: BucketAxis, group_size: int = 1) -> int:
        """Return the number of ``buckets`` without making them.

        Raises:
            ValueError: As for ``buckets``.
        """
        return self._consumers_along(axis, group_size)[1]

    def require_fetched(
        self, axis: BucketAxis, group_size: int, broadcast: Sequence[MeshAxis]
    ) -> None:
        """Refuse to broadcast along an axis whose ranks are in different buckets: a rank would get another's samples.

        Raises:
            ValueError: The message names that rank; otherwise as for ``buckets`` and ``fetching_ranks``.
        """
        require_broadcast(broadcast)
        levels, _ = self._consumers_along(axis, group_size)
        if not set(levels) & set(broadcast):
            return
        numbers = np.arange(self.world_size).reshape(self.sizes)
        first = tuple(slice(1) if level in broadcast else slice(None) for level in self.axes)
        source_W = np.broadcast_to(numbers[first], self.sizes).reshape(-1)
        bucket_W = np.empty(self.world_size, np.int64)
        for bucket, ranks in enumerate(self.buckets(axis, group_size)):
            bucket_W[list(ranks)] = bucket
        if len(wrong := np.flatnonzero(bucket_W != bucket_W[source_W])):
            rank = int(wrong[0])
            raise ValueError(
                f"rank {rank} has samples of its own along {axis!r} (bucket {bucket_W[rank]}) and would be sent those "
                f"of rank {source_W[rank]}, by the broadcast along {', '.join(broadcast)}; leave that out, or "
                "have both share a bucket by group_size"
            )

    def constructor_of(self, dp_rank: int, num_constructors: int) -> int:
        """Return the data constructor that serves a dp rank.

        Neighbouring ranks share a constructor, so the ranks of a host connect to few constructors. The numbers of dp
        ranks that two constructors serve differ by at most one.

        Raises:
            ValueError: There is no such dp rank, or a constructor would serve none.
        """
        dp = self.size_of("dp")
        if not 0 <= dp_rank < dp:
            raise ValueError(f"dp_rank is {dp_rank}; this mesh has dp ranks 0 to {dp - 1}")
        if not 1 <= num_constructors <= dp:
            raise ValueError(
                f"num_constructors is {num_constructors} for {counted(dp, 'dp rank')}; choose one from 1 to {dp}"
            )
        # Without a table: ranks, constructors and the planner each work it out, and never differ.
        return dp_rank * num_constructors // dp

    def dp_ranks_of(self, constructor: int, num_constructors: int) -> range:
        """Return the dp ranks that a data constructor serves; see ``constructor_of``."""
        dp = self.size_of("dp")
        # Worked out, not sought: a thousand constructors that each look at every rank take seconds.
        first, stop = (-(-at * dp // num_constructors) for at in (constructor, constructor + 1))
        return range(first, stop)

    def render(self, *, broadcast: Sequence[MeshAxis] = ()) -> str:
        """Draw the tree; the innermost level is one line, and long levels are cut.

        Args:
            broadcast: Axes to broadcast along; if given, the fetching ranks are marked.
        """
        fetching = frozenset(self.fetching_ranks(broadcast)) if broadcast else frozenset()
        lines = [f"world: {counted(self.world_size, 'rank')} ({self._shape()})"]
        levels = [(a, s) for a, s in zip(self.axes, self.sizes, strict=True) if s > 1]
        _draw(lines, levels, 0, "", fetching)
        return "\n".join(lines)

    @override
    def __str__(self) -> str:
        return self.render()

    def _consumers_along(
        self, axis: BucketAxis, group_size: int
    ) -> tuple[tuple[MeshAxis, ...], int]:
        """Return the axes that tell consumers apart, and the number of groups of them."""
        if axis not in _CONSUMER_AXES:
            raise ValueError(
                f"axis {axis!r} has no buckets: its ranks take the same data; "
                f"choose among {list(_CONSUMER_AXES)}"
            )
        levels = _CONSUMER_AXES[axis]
        num = math.prod(self.size_of(level) for level in levels)
        if group_size < 1 or num % group_size:
            raise ValueError(
                f"group_size is {group_size}, which does not divide the {num} consumers along {axis}; "
                "choose a divisor"
            )
        return levels, num // group_size

    def _shape(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.sizes, strict=True))


def require_broadcast(axes: Sequence[MeshAxis]) -> None:
    """Refuse axes that nothing can be broadcast along.

    Raises:
        ValueError: Ranks along dp take other samples; there is no such axis.
    """
    for axis in axes:
        if axis == "dp" or axis not in _MESH_AXES:
            raise ValueError(
                f"broadcast along {axis!r} is not possible; choose among "
                f"{[a for a in _MESH_AXES if a != 'dp']}, whose ranks take the same rows"
            )


@lru_cache(maxsize=8)
def _ranks_by_place(tree: ClientPlaceTree) -> NDArray[np.int64]:
    """Return ``ClientPlaceTree.ranks_by_place``; kept, as every microbatch of every rank asks."""
    numbers = np.arange(tree.world_size).reshape(tree.sizes)
    # Sorting is stable: axes of the same data keep their order, and numbers along them rise.
    places = {"dp": 0, "cp": 1}
    order = sorted(range(len(tree.axes)), key=lambda at: places.get(tree.axes[at], len(places)))
    found = numbers.transpose(order).reshape(tree.size_of("dp"), tree.size_of("cp"), -1)
    found.setflags(write=False)
    return found


def _draw(
    lines: list[str],
    levels: Sequence[tuple[MeshAxis, int]],
    first_rank: int,
    indent: str,
    fetching: frozenset[int],
) -> None:
    """Append the subtree of ``levels`` whose first rank is ``first_rank``."""
    if not levels:
        return
    (axis, size), below = levels[0], levels[1:]
    if not below:
        stop = first_rank + size
        found = [rank for rank in range(first_rank, stop) if rank in fetching]
        note = f", fetching {', '.join(map(str, found))}" if found else ""
        lines.append(f"{indent}`-- {axis} 0-{size - 1}: ranks {first_rank}-{stop - 1}{note}")
        return
    stride = math.prod(s for _, s in below)
    cut = size > _CHILDREN_SHOWN
    # The last one as well: it tells where the numbers of ranks end.
    shown = [*range(_CHILDREN_SHOWN - 1), size - 1] if cut else list(range(size))
    for place in shown:
        last = place == size - 1
        if last and cut:
            lines.append(f"{indent}|   ... {size - _CHILDREN_SHOWN} more")
        start = first_rank + place * stride
        branch = "`-- " if last else "|-- "
        lines.append(f"{indent}{branch}{axis} {place}: ranks {start}-{start + stride - 1}")
        _draw(lines, below, start, indent + ("    " if last else "|   "), fetching)
