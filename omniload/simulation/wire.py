"""Messages between simulated processes: what they cost either end, how long they are on the way, who speaks to whom."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from omniload.simulation.clock import Host, Process
from omniload.simulation.profile import MessageCosts

__all__ = ["Wire"]


@dataclass(slots=True)
class Wire:
    """Carries messages; the seed decides how long each is on its way."""

    costs: MessageCosts
    seed: int
    hop_s: float
    """How much longer a message is on its way to another host."""
    nodes: dict[int, Process] = field(default_factory=dict)
    """Ray's own processes of each host, by the host's ``id``; none where roles are threads."""
    trains: bool = False
    """Whether ranks train between two batches; else they take them as they come."""
    connections: set[frozenset[int]] = field(default_factory=set, init=False)
    """Pairs of processes that have spoken to each other, each by its ``id``."""
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 -- no secret

    def end_s(self, process: Process, size_bytes: int = 0, batches: int = 0) -> float:
        """Return what a process spends on a message that it sends or takes, which is counted."""
        process.messages += 1
        process.message_bytes += size_bytes
        process.batches += batches
        costs = self.costs.roles[process.role]
        times = 1.0 + process.host.rest * (costs.rested - 1.0)
        return times * costs.message_s(size_bytes, batches)

    def take_s(self, place: int) -> float:
        """Return what a rank that has trained takes for a batch that is at hand; nothing where it has not.

        Args:
            place: Of the batch among those that came together.
        """
        by_place = self.costs.takes_s
        if not self.trains or not by_place:
            return 0.0
        return self._random.choice(by_place[min(place, len(by_place) - 1)])

    def connect(self, one: Process, other: Process) -> None:
        """Count a connection of two processes."""
        # A process speaks to itself where roles are threads: that is none.
        if one is not other:
            self.connections.add(frozenset((id(one), id(other))))

    def carry(
        self, sender: Process, receiver: Process, then: Callable[[], None], size_bytes: int = 0
    ) -> None:
        """Call ``then`` once a message is there; what its ends spend is for them to count."""
        # Drawn from what was measured, not a mean: waits are made of the few that are late.
        latency_s = self._random.choice(self.costs.latencies_s)
        self.connect(sender, receiver)
        hosts: list[Host] = [sender.host]
        if receiver.host is not sender.host:
            hosts.append(receiver.host)
            # Both networks at once: bytes arrive as they leave, so the slower of the two tells.
            latency_s += self.hop_s + max(host.transfer_s(size_bytes) for host in hosts)
        # What goes to another host passes Ray's processes of both.
        for host in hosts:
            if (node := self.nodes.get(id(host))) is not None:
                node.work(self.end_s(node, size_bytes), lambda: None)
        sender.host.clock.after(latency_s, then)

    def connections_by(self) -> Counter[int]:
        """Return to how many processes each speaks, by its ``id``."""
        return Counter(end for pair in self.connections for end in pair)
