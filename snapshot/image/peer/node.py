"""A node among its peers: the tiers its loader asks, and the server that answers others."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import field_validator, model_validator

from omniload.base.clock import Clock
from omniload.base.config import StrictModel, fault_at
from omniload.base.errors import ConfigError
from omniload.base.reading import read_small_file
from snapshot.image.block.loader import BlockTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import LayerIndex
from snapshot.image.peer.peer_tier import PeerTier
from snapshot.image.peer.server import BlockShare, PeerServer
from snapshot.image.peer.single_flight_tier import HeldBlocks, SharedTier
from snapshot.oci.transport import is_loopback

__all__ = ["PeerNode", "PeerSettings"]

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})\Z")
_MAX_TOKEN_BYTES = 4096


class PeerSettings(StrictModel):
    """Which nodes share blocks."""

    peers: tuple[str, ...] = ()
    """``HOST:PORT`` of every node that serves, the same list on all, in any order."""
    serve: str | None = None
    """Where this node listens; it serves nobody if there is none."""
    peer_name: str | None = None
    """This node's entry in ``peers``, where that is not ``serve``."""
    peer_token_file: str | None = None
    """Holds what peers show each other; needed to listen beyond this machine."""

    @field_validator("peers")
    @classmethod
    def _peers_are_addresses(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for peer in peers:
            _address(peer)
        if repeated := sorted({peer for peer in peers if peers.count(peer) > 1}):
            raise ValueError(f"{repeated} named more than once; name each node once")
        return peers

    @model_validator(mode="after")
    def _this_node_can_be_found(self) -> Self:
        if self.serve is None:
            return self
        _address(self.serve)
        if self.peer_token_file is None and not is_loopback(self.serve):
            raise fault_at(
                f"serve={self.serve} is reached from other machines; add peer_token_file=FILE, "
                "the same on all nodes",
                "serve",
            )
        if self.peers and self.name not in self.peers:
            raise fault_at(
                f"this node is {self.name}, not among peers {list(self.peers)[:5]}; add it, or "
                "say which it is with peer_name=HOST:PORT",
                "serve" if self.peer_name is None else "peer_name",
            )
        return self

    @property
    def name(self) -> str:
        """What peers call this node."""
        return self.peer_name or self.serve or ""


class PeerNode:
    """The parts by which a node shares blocks; made before the loader, closed after it.

    Raises:
        ConfigError: The token file cannot be read, or holds no token.
        StateError: The address cannot be listened at.
    """

    def __init__(
        self,
        settings: PeerSettings,
        registry: BlockTier,
        disk: BlockStore | None,
        indexes: Sequence[LayerIndex],
        clock: Clock | None = None,
    ) -> None:
        self.tiers: dict[str, BlockTier] = {"registry": registry}
        """By name, in the order in which they are to be asked."""
        self._peers: PeerTier | None = None
        self._share: BlockShare | None = None
        self._server: PeerServer | None = None
        token = _token(settings.peer_token_file) if settings.peer_token_file else ""
        held = HeldBlocks(disk)
        if others := bool(set(settings.peers) - {settings.name}):
            # The name of a node that serves nobody only has to differ from others'.
            self._peers = PeerTier(
                settings.peers, settings.name or f"{id(self)}", token=token, clock=clock
            )
            self.tiers = {"peer": SharedTier(self._peers, held, by_region=True), **self.tiers}
        if others or settings.serve is not None:
            self.tiers["registry"] = SharedTier(registry, held)
        if settings.serve is not None:
            self._share = BlockShare(held, self.tiers, indexes)
            host, port = _address(settings.serve)
            self._server = PeerServer(self._share, host, port, token=token)

    def numbers(self) -> dict[str, int]:
        """Return bytes: handed to peers, moved for them by tier, and received by peer."""
        found: dict[str, int] = {}
        if self._server is not None and self._share is not None:
            found["served"] = self._server.served_bytes
            found |= {f"for peers from {t}": n for t, n in self._share.bytes_of.items()}
        if self._peers is not None:
            found |= {f"from {peer}": n for peer, n in sorted(self._peers.bytes_of.items())}
        return found

    def close(self) -> None:
        """Stop serving and asking."""
        if self._server is not None:
            self._server.close()
        if self._share is not None:
            self._share.close()
        if self._peers is not None:
            self._peers.close()


def _address(text: str) -> tuple[str, int]:
    found = _ADDRESS.match(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return found["host"].strip("[]"), int(found["port"])


def _token(path: str) -> str:
    try:
        held = read_small_file(Path(path), most_bytes=_MAX_TOKEN_BYTES, what="a peer_token_file")
        token = held.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"peer_token_file={path} cannot be read: {error}") from error
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ConfigError(
            f"peer_token_file={path} holds {len(token)} characters; write one word of 16 or more"
        )
    return token
