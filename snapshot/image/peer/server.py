"""Serves a node's blocks to its peers over HTTP. Hands out only what was compared with its digest."""

import hmac
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from typing_extensions import override

from omniload.base.errors import OmniloadError, StateError
from omniload.base.log import get_logger
from snapshot.image.block.loader import BlockTier
from snapshot.image.layer.index import BlockRef, LayerIndex, block_refs
from snapshot.image.peer.single_flight_tier import HeldBlocks
from snapshot.image.peer.wire import (
    ABSENT,
    MAX_REQUEST_BYTES,
    PATH,
    WAITING,
    BlocksAsked,
    block_frame,
    parse_request,
)

__all__ = [
    "BlockShare",
    "PeerServer",
    "Promise",
]

_log = get_logger(__name__)

Promise = Future[dict[str, bytes]]
"""Of the blocks that could be had, by digest."""


class BlockShare:
    """Looks for blocks, and has absent ones fetched through the node's own tiers.

    A fetch begins at once or not at all: were it queued, nodes that wait for each other's
    threads could wait for ever.

    Each tier is a ``SharedTier``, so that what a reader of this node is already waiting for is not
    asked for again.
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

    def promise(self, asked: BlocksAsked) -> Promise | None:
        """Begin to fetch what is asked for and absent; None if it is not to be had.

        It is not, where the peer does not wait, the layer is unknown or indexed otherwise,
        or as many fetches as are allowed are on their way.
        """
        index = self._index_of.get(asked.blob)
        if not asked.waits or index is None:
            return None
        numbers = [
            number
            for number, digest in asked.blocks
            if number < len(index.blocks_B)
            and index.digest(number) == digest
            and not self.held.has(digest)
        ]
        # Not waited for: nodes that wait for each other's threads could wait for ever.
        if not numbers or not self._free.acquire(blocking=False):
            return None
        try:
            return self._pool.submit(self._fetch, index, list(block_refs(index, numbers)))
        except RuntimeError:  # closed meanwhile
            self._free.release()
            return None

    def close(self) -> None:
        """End the threads, when their requests have ended."""
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


_log = get_logger(__name__)

# Well below ``PeerPatience.silent_s``, after which a peer takes this node for gone.
_SAY_SO_S = 1.0
_IDLE_S = 15.0
# By hand: a connection too many gets no handler.
_FULL = b"HTTP/1.1 503 Too many connections\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class PeerServer(ThreadingHTTPServer):
    """Listens from the moment it is made, in threads of its own.

    Port 0 is any that is free. Peers show ``token``, unless it is empty; connections over the most
    are answered with 503.

    Raises:
        StateError: The address cannot be listened at.
    """

    # A peer that still reads must not keep an unmount waiting.
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
        """Bytes of blocks handed out."""
        self.lock = threading.Lock()
        self._free = threading.BoundedSemaphore(connections)
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

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stop listening, and close every connection; the thread of each ends with it."""
        stopping = threading.Thread(target=self.shutdown)
        stopping.start()
        with suppress(OSError):  # wakes the thread that listens, which else looks twice a second
            self.socket.shutdown(socket.SHUT_RDWR)
        stopping.join()
        self._thread.join()
        self.server_close()
        with self.lock:
            open_now = list(self._open)
        for connection in open_now:
            with suppress(OSError):  # it may have hung up before
                connection.shutdown(socket.SHUT_RDWR)

    @override
    def server_bind(self) -> None:
        # The base class looks its own name up, which may wait long for a name server.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    @override
    def verify_request(self, request: Any, client_address: Any) -> bool:
        if not self._free.acquire(blocking=False):
            with suppress(OSError):  # raised here it would end the server
                request.settimeout(1.0)
                request.sendall(_FULL)
            return False
        with self.lock:
            self._open.add(request)
        return True

    @override
    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            known = request in self._open
            self._open.discard(request)
        if known:
            self._free.release()
        super().shutdown_request(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("peer %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a peer."""

    # With the base class's 1.0 each request would need a connection of its own.
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = _IDLE_S
    # A frame is several writes: the last of them would wait for the peer to acknowledge the first.
    disable_nagle_algorithm = True

    @override
    def setup(self) -> None:
        assert isinstance(self.server, PeerServer)
        self.ours = self.server
        super().setup()

    @override
    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def do_POST(self) -> None:
        """Answer a request for blocks."""
        length = self.headers.get("Content-Length", "")
        # Never compared byte by byte as far as they agree: the time would tell how far.
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if self.ours.expected and not hmac.compare_digest(given, self.ours.expected):
            self._refuse(401, "the token is not this node's; give all peers one peer_token_file")
        elif self.path != PATH:
            self._refuse(404, f"post to {PATH}")
        elif not (length.isascii() and length.isdigit()) or int(length) > MAX_REQUEST_BYTES:
            self._refuse(413, f"{length[:20]!r} bytes; send at most {MAX_REQUEST_BYTES}")
        else:
            try:
                asked = parse_request(self.rfile.read(int(length)))
            except ValueError as error:
                self._refuse(400, str(error))
            else:
                self._answer(asked)

    def _answer(self, asked: BlocksAsked) -> None:
        promise = self.ours.share.promise(asked)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        served = 0
        for _, digest in asked.blocks:
            data = self.ours.share.held.get(digest)
            if data is None and promise is not None:
                data = self._kept(promise).get(digest) or self.ours.share.held.get(digest)
            if data is None:
                self._send(ABSENT)
            else:
                self._send(block_frame(len(data)), data)
                served += len(data)
        with self.ours.lock:  # before the end of the answer: a peer that has it finds it counted
            self.ours.served_bytes += served
        self.wfile.write(b"0\r\n\r\n")

    def _kept(self, promise: Promise) -> dict[str, bytes]:
        """Wait for what was promised, and say so to the peer all the while."""
        while not wait([promise], _SAY_SO_S).done:
            self._send(WAITING)
        return {} if promise.cancelled() else promise.result()

    def _send(self, head: bytes, data: bytes = b"") -> None:
        self.wfile.write(b"%x\r\n%b" % (len(head) + len(data), head))
        if data:
            self.wfile.write(data)
        self.wfile.write(b"\r\n")

    def _refuse(self, status: int, reason: str) -> None:
        body = reason.encode("utf-8", "replace")
        self.close_connection = True  # a body that was not read would be taken for a request
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
