"""Messages between simulated processes: their cost at either end, their latency, and which processes communicate."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from omniload.simulation.clock import Host, Process
from omniload.simulation.profile import MessageCosts

__all__ = ["Wire"]


@dataclass(slots=True)
class Wire:
    """Carries messages; the seed decides the latency of each."""

    costs: MessageCosts
    seed: int
    hop_s: float
    """Extra latency of a message to another host."""
    nodes: dict[int, Process] = field(default_factory=dict)
    """Ray's own processes of each host, by the host's ``id``; empty if roles are threads."""
    trains: bool = False
    """Whether ranks train between two batches; otherwise they take batches as they come."""
    connections: set[frozenset[int]] = field(default_factory=set, init=False)
    """Pairs of processes that have communicated, each by its ``id``."""
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 -- no secret

    def end_s(self, process: Process, size_bytes: int = 0, batches: int = 0) -> float:
        """Return the time that a process spends on a message that it sends or receives, and count the message."""
        process.messages += 1
        process.message_bytes += size_bytes
        process.batches += batches
        costs = self.costs.roles[process.role]
        times = 1.0 + process.host.rest * (costs.rested - 1.0)
        return times * costs.message_s(size_bytes, batches)

    def take_s(self, place: int) -> float:
        """Return the time that a rank which has trained takes for a batch that is ready; 0 if it has not trained.

        Args:
            place: Place of the batch among those that arrived together.
        """
        by_place = self.costs.takes_s
        if not self.trains or not by_place:
            return 0.0
        return self._random.choice(by_place[min(place, len(by_place) - 1)])

    def connect(self, one: Process, other: Process) -> None:
        """Count a connection of two processes."""
        # If roles are threads, a process communicates with itself, which is no connection.
        if one is not other:
            self.connections.add(frozenset((id(one), id(other))))

    def carry(
        self, sender: Process, receiver: Process, then: Callable[[], None], size_bytes: int = 0
    ) -> None:
        """Call ``then`` once a message has arrived; the ends count their own costs."""
        # Drawn from the measured latencies instead of their mean, because waits come from the few late messages.
        latency_s = self._random.choice(self.costs.latencies_s)
        self.connect(sender, receiver)
        hosts: list[Host] = [sender.host]
        if receiver.host is not sender.host:
            hosts.append(receiver.host)
            # Both networks work at the same time, because bytes arrive as they leave, so the slower one decides.
            latency_s += self.hop_s + max(host.transfer_s(size_bytes) for host in hosts)
        # A message to another host passes Ray's processes of both hosts.
        for host in hosts:
            if (node := self.nodes.get(id(host))) is not None:
                node.work(self.end_s(node, size_bytes), lambda: None)
        sender.host.clock.after(latency_s, then)

    def connections_by(self) -> Counter[int]:
        """Return how many processes each process communicates with, by its ``id``."""
        return Counter(end for pair in self.connections for end in pair)
