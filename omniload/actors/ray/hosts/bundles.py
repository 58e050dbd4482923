"""Bundles of a user's own placement group, as places for members in addition to whole nodes.

A place is named ``NODE`` or, if it is a bundle, ``NODE/BUNDLE/GROUP``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from omniload.actors.ray.environment import ray

__all__ = ["Bundle", "bundles_in", "group_at", "node_at", "some_of", "strategy_for"]

_BETWEEN = "/"
_THERE = "CREATED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle that Ray has reserved on a node."""

    group: str
    """Number of the bundle's placement group."""
    index: int
    node: str
    has: Mapping[str, float]
    """Amount of each resource in the bundle."""

    @property
    def place(self) -> str:
        """Name of the bundle as a place."""
        return _BETWEEN.join((self.node, str(self.index), self.group))

    def free(self, free: Mapping[str, float]) -> dict[str, float]:
        """Return the bundle's unclaimed resources, given the unclaimed resources of its node."""
        # Ray lists the resources of a bundle among those of its node, under names of this form.
        return {name: free.get(f"{name}_group_{self.index}_{self.group}", 0.0) for name in self.has}


def bundles_in(table: Mapping[str, Mapping[str, Any]], wanted: str) -> list[Bundle]:
    """Return the bundles of a placement group, by its name or number; none until Ray has reserved the group.

    Args:
        table: Ray's table of all placement groups, by number.
        wanted: Name or number. If several groups have this name, the bundles of all of them are returned. A number may
            be followed by the bundles that are wanted, as in ``NUMBER/2,3``.
    """
    of, _, some = wanted.partition(_BETWEEN) if wanted not in _names(table) else (wanted, "", "")
    return [
        Bundle(group=number, index=int(index), node=node, has=dict(group["bundles"][index]))
        for number, group in sorted(table.items())
        if of in {number, group["name"]} and group["state"] == _THERE
        for index, node in group["bundles_to_node_id"].items()
        if not some or str(index) in some.split(",")
    ]


def _names(table: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {group["name"] for group in table.values()}


def some_of(bundles: Sequence[Bundle]) -> str:
    """Return the text that asks for these bundles of a group and no others; see ``bundles_in``."""
    return f"{bundles[0].group}{_BETWEEN}{','.join(str(each.index) for each in bundles)}"


def group_at(place: str) -> str:
    """Return the number of a place's placement group; empty for a whole node."""
    return place.rpartition(_BETWEEN)[2] if _BETWEEN in place else ""


def node_at(place: str) -> str:
    """Return the node of a place."""
    return place.partition(_BETWEEN)[0]


def strategy_for(place: str, *, is_soft: bool) -> Any:  # noqa: ANN401 -- Ray's strategies have no base
    """Return Ray's scheduling strategy for an actor at a place; ``is_soft`` allows another node if this one is gone."""
    node, *bundle = place.split(_BETWEEN)
    if not bundle:
        return NodeAffinitySchedulingStrategy(node_id=node, soft=is_soft)
    index, group = bundle
    return PlacementGroupSchedulingStrategy(
        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))),
        placement_group_bundle_index=int(index),
    )
