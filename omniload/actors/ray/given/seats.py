"""Bundles for roles that must stay on a certain node, and the placement group that this process is in."""

from collections.abc import Callable, Mapping, Sequence

from omniload.actors.ray.environment import ray
from omniload.actors.ray.hosts.bundles import bundles_in, some_of
from omniload.actors.ray.hosts.nodes import NodeSeen, beside, nodes_seen
from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.machine.roster.members import Member
from omniload.mix.schema.places import CURRENT, PlaceConfig, RolePlaceConfig

__all__ = ["Seats", "at_current"]

_LOG = get_logger(__name__)


class Seats:
    """Bundles of the planner and the data constructors. For one thread at a time."""

    def __init__(self, look: Callable[[str], Sequence[NodeSeen]] = nodes_seen) -> None:
        """Begin without members; ``look`` returns the nodes, and the bundles of a group."""
        self._look = look
        self._coming: dict[Member, tuple[str, Mapping[str, float]]] = {}
        """Members whose process is not known yet. Ray may not have subtracted their resources there yet."""

    def of(
        self, member: Member, node: str, wanted: RolePlaceConfig
    ) -> tuple[str, Mapping[str, float]]:
        """Return where on a node a member is to be started, and which resources it asks for there."""
        asked = wanted.asked()
        if not wanted.placement_group:
            return node, asked
        there = [
            self._left(each) for each in beside(wanted, node, self._look(wanted.placement_group))
        ]
        if not there:
            _LOG.warning(
                "placement group %r has no bundle on node %s: %s is started there outside the group",
                *(wanted.placement_group, node, member.name),
            )
            return node, {}
        # If no bundle has room, the resources of a lost member will be free again in a moment.
        place = max(there, key=lambda each: (each.room(asked), each.place)).place
        self._coming[member] = place, asked
        return place, asked

    def forget(self, member: Member) -> None:
        """Note that a member has ended, or is present and counted by Ray."""
        self._coming.pop(member, None)

    def _left(self, node: NodeSeen) -> NodeSeen:
        for place, asked in self._coming.values():
            if place == node.place:
                node = node.without(asked)
        return node


def at_current(place: PlaceConfig) -> PlaceConfig:
    """Return the places of roles, with ``current`` replaced by the unused bundles of this process's placement group.

    Raises:
        ConfigError: The process is in no placement group, or all of the group is used.
    """
    if CURRENT not in place.groups():
        return place
    group = ray.util.get_current_placement_group()
    if group is None:
        raise ConfigError(
            "runtime.place has placement_group 'current', but the process that opens the plane is in no placement "
            "group; give a name or a number, or leave placement_group out"
        )
    number = group.id.hex()
    bundles = bundles_in(ray.util.placement_group_table(), number)
    unused = {each.place for each in nodes_seen(number) if each.groups and each.room(each.has)}
    spare = [each for each in bundles if each.place in unused]
    if not spare:
        raise ConfigError(
            f"runtime.place has placement_group 'current', but all {len(bundles)} bundles of group {number} are in "
            "use, mostly by ranks; reserve more bundles than there are ranks, or leave placement_group out"
        )
    return place.in_group(CURRENT, some_of(spare))
