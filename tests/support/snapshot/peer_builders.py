"""A layer, nodes that share its blocks on loopback, a scripted registry, and peers that misbehave."""

import socket
import threading
from contextlib import contextmanager

import pytest

from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import block_refs
from snapshot.image.peer import peer_tier
from snapshot.image.peer.node import PeerNode, PeerSettings
from tests.support.ports import free_ports
from tests.support.snapshot.image_builders import a_member, a_tar, an_index, zran_friendly
from tests.support.snapshot.peer_process import patient

__all__ = [
    "BLOCKS",
    "HandTier",
    "fetched",
    "free_addresses",
    "nodes_of",
    "peer_by_hand",
    "peer_index",
    "peer_refs",
]

TAR = a_tar(a_member("big", zran_friendly(10_000_000)))
BLOCKS = [TAR[i : i + (1 << 20)] for i in range(0, len(TAR), 1 << 20)]
"""Ten blocks of 1 MiB or less, each a separate region."""


def peer_index(folder):
    return an_index(folder, TAR)


def peer_refs(index, numbers=range(10)):
    return list(block_refs(index, numbers))


class HandTier:
    """A scripted tier: its blocks, the requests that it lets through, and the requests that it received."""

    contents = BLOCKS

    def __init__(self, has=range(99), gate=None, error=None):
        self.has, self.gate, self.error = set(has), gate, error
        self.asked, self.arrived = [], threading.Semaphore(0)

    def fetch(self, index, blocks):
        self.asked.append([ref.number for ref in blocks])
        self.arrived.release()
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        found = {ref.digest: self.contents[ref.number] for ref in blocks if ref.number in self.has}
        return found, sum(map(len, found.values()))

    @property
    def numbers(self):
        return sorted(number for numbers in self.asked for number in numbers)


def free_addresses(count):
    """Return addresses of this machine on which no process listens."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


@contextmanager
def nodes_of(folder, index, registry, addresses, *, up=None, **settings):
    """Yield nodes by address, all with one registry; only the nodes in ``up`` run.

    They wait for one another as long as a busy machine takes. A node that does not run refuses connections at once.
    """
    nodes = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_tier, "PeerPatience", patient)
            for number, address in enumerate(addresses):
                if up is None or address in up:
                    nodes[address] = PeerNode(
                        PeerSettings(peers=addresses, serve=address, **settings),
                        registry,
                        BlockStore(folder / f"blocks{number}", 64 << 20),
                        [index],
                    )
        yield nodes
    finally:
        for node in nodes.values():
            node.close()


def fetched(node, index, refs):
    """Request blocks from a node's tiers in their order, as a loader does; return the blocks and bytes by tier."""
    found, moved = {}, {}
    for name, tier in node.tiers.items():
        absent = [ref for ref in refs if ref.digest not in found]
        if absent:
            came, moved[name] = tier.fetch(index, absent)
            found |= came
    return found, moved


@contextmanager
def peer_by_hand(answer):
    """Yield the address of a peer that passes each connection to ``answer``, and the data that it received."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    sent, over = [], threading.Event()

    def serve():
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(60)
                head = b""
                while b"\r\n\r\n" not in head and (part := connection.recv(65536)):
                    head += part
                if head:
                    sent.append(head)
                    answer(connection, over)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname()), sent
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
