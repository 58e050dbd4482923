"""A node among its peers: the tiers that its loader asks, and the server that gives its blocks to others over HTTP.

Every block that is handed out was compared with its digest.
"""

import hmac
import re
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import field_validator, model_validator
from typing_extensions import override

from omniload.base.config import StrictModel, fault_at
from omniload.base.errors import ConfigError, OmniloadError, StateError
from omniload.base.log import get_logger
from omniload.base.reading import read_small_file
from omniload.base.units import decimal_of
from snapshot.image.block.loader import BlockTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import BlockRef, LayerIndex, block_refs
from snapshot.image.peer.peer_tier import HeldBlocks, PeerTier, SharedTier
from snapshot.image.peer.protocol import (
    ABSENT,
    MAX_REQUEST_BYTES,
    PATH,
    WAITING,
    block_frame,
    parse_request,
)
from snapshot.oci.transport import is_loopback

__all__ = ["BlockShare", "PeerNode", "PeerServer", "PeerSettings"]

_log = get_logger(__name__)

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})\Z")
# Well below ``PeerPatience.silent_s``, after which a peer considers this node gone.
_SAY_SO_S = 1.0
# Written by hand, because a connection above the limit gets no handler.
_FULL = b"HTTP/1.1 503 Too many connections\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


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
        """Name of this node among its peers."""
        return self.peer_name or self.serve or ""


class PeerNode:
    """The parts by which a node shares blocks; make it before the loader, close it after the loader.

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
    ) -> None:
        self.tiers: dict[str, BlockTier] = {"registry": registry}
        """Tiers by name, in the order in which they are asked."""
        self._peers: PeerTier | None = None
        self._server: PeerServer | None = None
        token = _token(settings.peer_token_file) if settings.peer_token_file else ""
        held = HeldBlocks(disk)
        if others := bool(set(settings.peers) - {settings.name}):
            # The name of a node that serves nobody only has to differ from all others.
            self._peers = PeerTier(settings.peers, settings.name or f"{id(self)}", token=token)
            self.tiers = {"peer": SharedTier(self._peers, held, by_region=True), **self.tiers}
        if others or settings.serve is not None:
            self.tiers["registry"] = SharedTier(registry, held)
        if settings.serve is not None:
            host, port = _address(settings.serve)
            share = BlockShare(held, self.tiers, indexes)
            self._server = PeerServer(share, host, port, token=token)

    def numbers(self) -> dict[str, int]:
        """Return bytes: given to peers, moved for them by tier, and received by peer."""
        found: dict[str, int] = {}
        if self._server is not None:
            found["served"] = self._server.served_bytes
            found |= {f"for peers from {t}": n for t, n in self._server.share.bytes_of.items()}
        if self._peers is not None:
            found |= {f"from {peer}": n for peer, n in sorted(self._peers.bytes_of.items())}
        return found

    def close(self) -> None:
        """Stop serving and asking."""
        if self._server is not None:
            self._server.close()
        if self._peers is not None:
            self._peers.close()


class BlockShare:
    """Looks up blocks for peers, and fetches missing ones through the node's own tiers.

    Each tier is a ``SharedTier``, so a block that a reader of this node already waits for is not fetched again.
    """

    def __init__(
        self,
        held: HeldBlocks,
        tiers: Mapping[str, BlockTier],
        indexes: Iterable[LayerIndex],
        *,
        fetches: int = 128,
    ) -> None:
        self.held = held
        self._tiers = tiers
        self._index_of = {index.blob_digest: index for index in indexes}
        self._free = threading.BoundedSemaphore(fetches)
        self._pool = ThreadPoolExecutor(fetches, "omniload-peer-fetch")
        self._lock = threading.Lock()
        self.bytes_of: dict[str, int] = dict.fromkeys(tiers, 0)
        """Bytes moved for peers, by tier."""

    def promise(
        self, blob: str, blocks: Sequence[tuple[int, str]]
    ) -> Future[dict[str, bytes]] | None:
        """Begin to fetch the missing blocks of a request, by digest; return None if they are not available.

        They are not available if the layer is unknown or has another index here, or if the largest number of
        fetches is under way.
        """
        index = self._index_of.get(blob)
        if index is None:
            return None
        numbers = [
            number
            for number, digest in blocks
            if number < len(index.blocks_B)
            and index.digest(number) == digest
            and not self.held.has(digest)
        ]
        # Fetch at once or not at all: with a queue, nodes that wait for each other's threads could wait for ever.
        if not numbers or not self._free.acquire(blocking=False):
            return None
        try:
            return self._pool.submit(self._fetch, index, list(block_refs(index, numbers)))
        except RuntimeError:  # closed meanwhile
            self._free.release()
            return None

    def close(self) -> None:
        """End the threads after their requests."""
        self._pool.shutdown(cancel_futures=True)

    def _fetch(self, index: LayerIndex, refs: Sequence[BlockRef]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        try:
            for name, tier in self._tiers.items():
                absent = [ref for ref in refs if ref.digest not in found]
                if not absent:
                    break
                came, moved = tier.fetch(index, absent)
                found |= came
                with self._lock:
                    self.bytes_of[name] += moved
        except (OmniloadError, FileNotFoundError) as error:
            _log.warning("for a peer: %s", error)
        except BaseException:
            _log.exception("defect while fetching for a peer")
            raise
        finally:
            self._free.release()
        self.held.store(found)
        return found


class PeerServer(ThreadingHTTPServer):
    """Listens from the moment it is made, in threads of its own.

    Port 0 stands for any free port. Peers must send ``token``, unless it is empty; connections above the limit
    are answered with 503.

    Raises:
        StateError: The address cannot be listened at.
    """

    # A peer that is still reading must not delay an unmount.
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256  # nodes that start together connect together

    def __init__(
        self,
        share: BlockShare,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str = "",
        connections: int = 512,
    ) -> None:
        self.share = share
        self.expected = f"Bearer {token}".encode() if token else b""
        self.served_bytes = 0
        """Bytes of blocks given to peers."""
        self.lock = threading.Lock()
        self._connections = connections
        self._open: set[socket.socket] = set()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise StateError(
                f"cannot listen at {host}:{port}: {error}; give a free address of this machine"
            ) from error
        self._thread = threading.Thread(
            target=self.serve_forever, name="omniload-peer-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and sharing, and close every connection, which ends its thread."""
        stopping = threading.Thread(target=self.shutdown)
        stopping.start()
        with suppress(OSError):  # wakes the listening thread, which otherwise looks twice a second
            self.socket.shutdown(socket.SHUT_RDWR)
        stopping.join()
        self._thread.join()
        self.server_close()
        with self.lock:
            open_now = list(self._open)
        for connection in open_now:
            with suppress(OSError):  # the peer may have hung up before
                connection.shutdown(socket.SHUT_RDWR)
        self.share.close()

    @override
    def server_bind(self) -> None:
        # The base class looks up its own name, which may wait long for a name server.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    @override
    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self.lock:
            if len(self._open) < self._connections:
                self._open.add(request)
                return True
        with suppress(OSError):  # an error here would end the server
            request.settimeout(1.0)  # the listening thread sends this, and other peers wait for it
            request.sendall(_FULL)
        return False

    @override
    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self._open.discard(request)
        super().shutdown_request(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("peer %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a peer."""

    # With HTTP/1.0, the default of the base class, each request would need a new connection.
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = 15.0  # between two requests
    # A frame is several writes: without this, the last write would wait until the peer acknowledges the first.
    disable_nagle_algorithm = True
    server: PeerServer  # type: ignore[mutable-override]  # nobody else makes one

    @override
    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def do_POST(self) -> None:
        """Answer a request for blocks."""
        size = decimal_of(self.headers.get("Content-Length", ""))
        # Compare in constant time: otherwise the time would show how many bytes agree.
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if self.server.expected and not hmac.compare_digest(given, self.server.expected):
            self._refuse(401, "the token is not this node's; give all peers one peer_token_file")
        elif self.path != PATH:
            self._refuse(404, f"post to {PATH}")
        elif size is None or size > MAX_REQUEST_BYTES:
            self._refuse(413, f"{size} bytes; send at most {MAX_REQUEST_BYTES}")
        else:
            try:
                blob, blocks = parse_request(self.rfile.read(size))
            except ValueError as error:
                self._refuse(400, str(error))
            else:
                self._answer(blob, blocks)

    def _answer(self, blob: str, blocks: Sequence[tuple[int, str]]) -> None:
        promise = self.server.share.promise(blob, blocks)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        served = 0
        for _, digest in blocks:
            data = self.server.share.held.get(digest)
            if data is None and promise is not None:
                data = self._kept(promise).get(digest) or self.server.share.held.get(digest)
            if data is None:
                self._send(ABSENT)
            else:
                self._send(block_frame(len(data)), data)
                served += len(data)
        # before the end of the answer, so that a peer that has it finds it counted
        with self.server.lock:
            self.server.served_bytes += served
        self.wfile.write(b"0\r\n\r\n")

    def _kept(self, promise: Future[dict[str, bytes]]) -> dict[str, bytes]:
        """Wait for a promised result, and keep telling the peer that it is being fetched."""
        while not wait([promise], _SAY_SO_S).done:
            self._send(WAITING)
        return {} if promise.cancelled() else promise.result()

    def _send(self, head: bytes, data: bytes = b"") -> None:
        self.wfile.write(b"%x\r\n%b" % (len(head) + len(data), head))
        self.wfile.write(data)
        self.wfile.write(b"\r\n")

    def _refuse(self, status: int, reason: str) -> None:
        body = reason.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        # Close the connection, because an unread body would be taken for a request.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _address(text: str) -> tuple[str, int]:
    found = _ADDRESS.match(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return found["host"].strip("[]"), int(found["port"])


def _token(path: str) -> str:
    held = read_small_file(Path(path), most_bytes=4096, what="a peer_token_file")
    token = held.decode("ascii", "replace").strip()
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"peer_token_file={path} holds {len(token)} characters; write one word of 16 or more, "
            "in ASCII"
        )
    return token
