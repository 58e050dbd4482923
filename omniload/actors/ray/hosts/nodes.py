"""The nodes of a Ray: which nodes exist, which of them may have a role, and for how many members they have room."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.hosts.bundles import Bundle, bundles_in, group_at, node_at
from omniload.base.clock import Clock
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.log import get_logger
from omniload.mix.schema.places import LoaderPlaceConfig, PlaceConfig, RolePlaceConfig

__all__ = [
    "NodeSeen",
    "Team",
    "beside",
    "nodes_seen",
    "nodes_with_room",
    "room_for",
    "wait_for_room",
    "why_no_room",
    "why_not",
]

_LEAST_CORES = 1.0
"""Unclaimed cores that a node must have to count as a node with room."""
_MANY = 1 << 20
"""Room of a node for members that ask for no resource."""
_LOOK_S, _TOLD_AFTER_S = 1.0, 10.0
_SHOWN = 8
"""Most nodes listed in a message."""
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A live node, or a bundle on one, as reported by Ray."""

    place: str
    address: str
    """IP address."""
    has: Mapping[str, float]
    """Amount of each resource."""
    free: Mapping[str, float]
    """Unclaimed amount of each resource."""
    labels: Mapping[str, str]
    groups: frozenset[str] = frozenset()
    """Names under which a mix may ask for the bundle's placement group: its name, its number, or both."""

    def is_of(self, group: str) -> bool:
        """Return whether this is a whole node, or a bundle of the named placement group."""
        return not self.groups or group in self.groups

    def room(self, asked: Mapping[str, float]) -> int:
        """Return for how many members there is room, if each asks for these resources."""
        # Ray counts in units of 1/10000, so a free amount may be a trace less than a whole number.
        each = [int(self.free.get(name, 0.0) / amount + 1e-6) for name, amount in asked.items()]
        return min(each, default=_MANY)

    def without(self, asked: Mapping[str, float]) -> "NodeSeen":
        """Return the node with these resources subtracted from the free ones."""
        free = {n: amount - asked.get(n, 0.0) for n, amount in self.free.items()}
        return replace(self, free=free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The members that a plane is opened with."""

    home: str
    """Node of the planner."""
    loaders: int
    """Number of loaders, including their shadows."""
    constructors: Sequence[str]
    """Node of each constructor."""


def why_not(wanted: LoaderPlaceConfig, node: NodeSeen) -> str:
    """Return why a loader may not be on a node, regardless of other claims there; empty if it may."""
    if wanted.without_gpu and (gpus := node.has.get("GPU", 0.0)):
        return f"has {gpus:g} GPUs"
    for label, value in wanted.labels.items():
        if (found := node.labels.get(label)) != value:
            return f"has {'no label' if found is None else f'{found!r} for label'} {label!r}"
    for name, amount in wanted.asked().items():
        if (has := node.has.get(name, 0.0)) < amount:
            return f"has {has:g} of {name!r}, less than the {amount:g} that a loader asks for"
    return ""


def _of_kind(
    wanted: LoaderPlaceConfig | RolePlaceConfig, nodes: Iterable[NodeSeen]
) -> list[NodeSeen]:
    """Return the bundles of the placement group if one is named, else the whole nodes."""
    group = wanted.placement_group
    return [n for n in nodes if bool(group_at(n.place)) == bool(group) and n.is_of(group)]


def beside(wanted: RolePlaceConfig, node: str, nodes: Iterable[NodeSeen]) -> list[NodeSeen]:
    """Return the places of a role on a certain node: its bundles there if a placement group is named, else the node."""
    return [each for each in _of_kind(wanted, nodes) if node_at(each.place) == node]


def room_for(wanted: LoaderPlaceConfig) -> dict[str, int]:
    """Return the places where loaders may be, each with its remaining room; empty if Ray does not report its nodes."""
    nodes = _of_kind(wanted, nodes_seen(wanted.placement_group))
    return {n.place: n.room(wanted.asked()) for n in nodes if not why_not(wanted, n)}


def why_no_room(place: PlaceConfig, team: Team, nodes: Sequence[NodeSeen]) -> str:
    """Return what is missing to place all members of a plane as asked; empty if nothing is."""
    left = {node.place: node for node in nodes}
    there = [(team.home, "the planner", place.planner)]
    there += [(node, "a data constructor", place.constructors) for node in team.constructors]
    for number, who, asks in there:
        asked, spots = asks.asked(), beside(asks, number, left.values())
        node = next((spot for spot in spots if spot.room(asked)), None)
        if (asked or asks.placement_group) and node is None:
            return _why_none_beside(who, asks, spots, left.get(number))
        if node is not None:
            left[node.place] = node.without(asked)
    return (
        "" if place.loaders is None else _why_none_for(place.loaders, team.loaders, left.values())
    )


def _why_none_beside(
    who: str, asks: RolePlaceConfig, spots: Sequence[NodeSeen], node: NodeSeen | None
) -> str:
    """Return why a role has no place on the node that it must be on."""
    asked = asks.asked()
    which = "a node that Ray does not name" if node is None else node.address
    if asks.placement_group and not spots:
        return f"{who} is to be on {which}, where placement group {asks.placement_group!r} has no bundle"
    free = [{n: spot.free.get(n, 0.0) for n in asked} for spot in spots] or [
        dict.fromkeys(asked, 0.0)
    ]
    which = "; ".join(spot.address for spot in spots[:_SHOWN]) or which
    has = "; ".join(_amounts(each) for each in free[:_SHOWN])
    return f"{who} asks for {_amounts(asked)} on {which}, which has {has} free"


def _why_none_for(wanted: LoaderPlaceConfig, count: int, nodes: Iterable[NodeSeen]) -> str:
    """Return what is missing for this number of loaders."""
    looked_at = [(node, why_not(wanted, node)) for node in _of_kind(wanted, nodes)]
    room = sum(node.room(wanted.asked()) for node, why in looked_at if not why)
    if room >= count:
        return ""
    group = wanted.placement_group
    found = sorted(
        f"{node.address} {why or f'has room for {node.room(wanted.asked())}'}"
        for node, why in looked_at
    ) or [f"Ray has reserved no placement group {group!r}" if group else "Ray names no node"]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"nodes that runtime.place.loaders names have room for {room} of {count} source loaders and shadows: "
        f"{'; '.join(found[:_SHOWN])}{more}"
    )


def wait_for_room(
    place: PlaceConfig,
    team: Team,
    look: Callable[[], Sequence[NodeSeen]],
    clock: Clock,
) -> None:
    """Wait until there is room for all members of a plane.

    Args:
        place: Where the members are to be.
        team: The members.
        look: Returns the present nodes.
        clock: Clock of the wait.

    Raises:
        ConfigError: Several placement groups have the given name.
        UnavailableError: There is no room within ``place.wait``; the message says what is missing, and where.
    """
    began_s, is_told = clock.now_s(), False
    if place == PlaceConfig():  # nothing is asked for, so Ray is not consulted
        return
    while missing := why_no_room(place, team, nodes := look()):
        waited_s = clock.now_s() - began_s
        if waited_s >= place.wait:
            raise UnavailableError(
                f"{missing}; waited {waited_s:.0f} s for it: start such nodes, let other jobs release theirs, ask for "
                "less in runtime.place, or set a longer wait in runtime.place.wait"
            )
        if waited_s >= _TOLD_AFTER_S and not is_told:
            is_told = True
            _LOG.warning("waiting for at most %.0f s for room: %s", place.wait, missing)
        clock.sleep(_LOOK_S)
    for name in place.groups():
        of = {group_at(node.place) for node in nodes if node.is_of(name)} - {""}
        if len(of) > 1:
            raise ConfigError(
                f"{len(of)} placement groups of this Ray have the name that runtime.place gives: "
                f"{sorted(of)[:_SHOWN]}; give the number of one of them"
            )


def _amounts(asked: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} of {name!r}" for name, amount in asked.items())


def nodes_seen(*groups: str) -> list[NodeSeen]:
    """Return the live nodes in a fixed order, and bundles of groups on them; empty if Ray does not report them."""
    try:
        living = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        free = _free_by_node()
        table = ray.util.placement_group_table() if any(groups) else {}
    except (RayError, RuntimeError, ConnectionError) as error:
        _LOG.warning("Ray does not say which nodes it has: %s", error)
        return []
    nodes = {
        node["NodeID"]: NodeSeen(
            place=node["NodeID"],
            address=node["NodeManagerAddress"],
            has=node["Resources"],
            free=free.get(node["NodeID"], node["Resources"]),
            labels=node.get("Labels", {}),
        )
        for node in sorted(living, key=lambda node: str(node["NodeID"]))
    }
    # Each bundle appears once, under all its names: listed twice, its free resources would count twice, or not at all.
    bundles: dict[str, NodeSeen] = {}
    for group in filter(None, groups):
        for each in bundles_in(table, group):
            if each.node in nodes:
                before = bundles.get(each.place)
                named = {group} if before is None else before.groups | {group}
                bundles[each.place] = _seen(each, nodes[each.node], frozenset(named))
    return [*nodes.values(), *bundles.values()]


def _seen(bundle: Bundle, node: NodeSeen, groups: frozenset[str]) -> NodeSeen:
    return replace(
        node,
        groups=groups,
        place=bundle.place,
        address=f"bundle {bundle.index} on {node.address}",
        has=bundle.has,
        free=bundle.free(node.free),
    )


def nodes_with_room() -> list[str]:
    """Return the numbers of the live nodes that have an unclaimed core, always in one order."""
    return [n.place for n in nodes_seen() if n.free.get("CPU", 0.0) >= _LEAST_CORES]


def _free_by_node() -> dict[str, dict[str, float]]:
    """Return the unclaimed resources of each node; empty if this version of Ray does not report them."""
    try:
        state: Any = import_module("ray._private.state")
        found: dict[str, dict[str, float]] = state.available_resources_per_node()
    except (ImportError, AttributeError) as error:
        _LOG.debug("what nodes have is taken for free: %s", error)
        return {}
    return found
