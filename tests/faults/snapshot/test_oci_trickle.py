"""A registry, a mirror or a peer that trickles: the reader goes on to the next, or hears who was too slow."""

import contextlib
import hashlib
import io
import logging
import socket
import socketserver
import threading
import time
from types import SimpleNamespace

import pytest

from omniload.base.clock import FakeClock
from omniload.base.errors import UnavailableError
from snapshot.image.layer.index import BlockRef
from snapshot.image.peer.peer_tier import PeerPatience, PeerTier
from snapshot.oci import slow_servers
from snapshot.oci.layout import OciLayout
from snapshot.oci.manifest import Descriptor
from snapshot.oci.registry import Registry
from snapshot.oci.slow_servers import Pace, paced_pool
from snapshot.oci.store import AWAY_S, MirroredStore
from snapshot.oci.transport import RegistrySettings, Transport
from tests.support.snapshot.registries.contract import push
from tests.support.snapshot.registries.fake import FakeRegistry, serving

DATA = bytes(range(256)) * 8192
LIMITS = {"timeout_s": 0.4, "least_bytes_per_s": 1000, "attempts": 2, "give_up_s": 60.0}
MORE_AND_MORE = [{"timeout_s": seconds, "attempts": 1} for seconds in (1.5, 6.0, 24.0)]
"""Where something must have come in time, however busy the machine is."""
_TRICKLES_S = 30.0
"""At most, of a connection: whoever reads on for so long would for ever, and the test fails in place of hanging."""


@contextlib.contextmanager
def trickling(head=b"", every_s=0.05):
    """Serve a port that answers ``head`` at once, then a byte each ``every_s`` until the client is gone.

    Takes requests as slowly as it answers them. Yields its address and the number of connections.
    """
    ended, seen = threading.Event(), []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            seen.append(self.client_address)
            self.request.settimeout(5)
            with contextlib.suppress(OSError):
                self.request.recv(300)
                self.request.sendall(head)
                until_s = time.monotonic() + _TRICKLES_S
                while time.monotonic() < until_s and not ended.wait(every_s):
                    self.request.sendall(b"x")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

        def get_request(self):
            request, address = super().get_request()
            request.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            return request, address

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", seen
        finally:
            ended.set()
            server.shutdown()
            thread.join()


def wait_until(holds):
    """Wait until something holds; the limit of the test is for what never does."""
    while not holds():
        threading.Event().wait(0.01)


def client(address, **changes):
    return Registry(Transport(address, RegistrySettings(**LIMITS | changes)), "a/b")


def blob_of(data):
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return Descriptor(media_type="application/x", digest=digest, size=len(data))


def ranged(size):
    return (
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n"
        b"Content-Range: bytes 0-%d/%d\r\n\r\n" % (size, size - 1, size)
    )


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA)
HEADS = {"status line": b"", "headers": b"HTTP/1.1 200 OK\r\nX-Slow: ", "body": ranged(5000)}
ASKED = {
    "range": lambda store: store.blob_range(blob_of(DATA).digest, 0, 5000),
    "blob": lambda store: b"".join(store.blob_chunks(blob_of(DATA))),
    "manifest": lambda store: store.manifest("v"),
    "head": lambda store: store.has_blob(blob_of(DATA).digest),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("head", ["status line", "headers"])
def test_headers_that_trickle_are_given_up_whatever_was_asked(asked, head):
    with trickling(HEADS[head]) as (address, seen):
        with pytest.raises(UnavailableError, match=f"(?s){address}.*all headers were wanted"):
            ASKED[asked](client(address))

        # It is asked again before it is given up, by a connection that may be taken later.
        wait_until(lambda: len(seen) >= 2)


@pytest.mark.parametrize("asked", ["range", "blob", "manifest"])
def test_a_body_that_trickles_is_given_up(asked):
    head = WHOLE if asked == "blob" else HEADS["body"]
    # Of a busy machine the headers may come late too, which is told as that.
    for limits in MORE_AND_MORE:
        with trickling(head) as (address, _), pytest.raises(UnavailableError) as caught:
            ASKED[asked](client(address, **limits))
        if "all headers were wanted" not in str(caught.value):
            break

    assert "at least 1000 bytes/s" in str(caught.value)


def test_a_token_that_trickles_is_given_up():
    fake = FakeRegistry()
    with (
        trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{") as (address, _),
        serving(fake),
    ):
        # On a busy machine the registry itself may be too late to send who asks to the token.
        for limits in MORE_AND_MORE:
            fake.faults = [
                lambda handler: handler.answer(
                    401, b"", WWW_Authenticate=f'Bearer realm="http://{address}/token"'
                )
            ] * 2
            with pytest.raises(UnavailableError) as caught:
                client(fake.address, **limits).blob_range(blob_of(DATA).digest, 0, 10)
            if "/token" in str(caught.value):
                break

    assert "/token" in str(caught.value)


def test_a_registry_that_takes_a_push_byte_by_byte_is_given_up():
    with trickling(every_s=60) as (address, _):
        data = bytes(32 << 20)
        request = Transport(address, RegistrySettings(**LIMITS | {"attempts": 1}))
        with pytest.raises(UnavailableError, match=address):
            request.repeated(
                lambda: request.request("PUT", "/v2/a/b", body=lambda: io.BytesIO(data))
            )
        request.close()


def test_a_mirror_that_trickles_is_passed_over_and_left_alone_for_a_while(tmp_path, caplog):
    origin, clock = OciLayout.create(tmp_path / "origin"), FakeClock()
    blob = push(origin, DATA)
    with trickling(ranged(5000)) as (address, seen):
        store = MirroredStore(origin, [client(address, attempts=1)], clock)

        with caplog.at_level(logging.WARNING, "omniload"):
            assert store.blob_range(blob.digest, 0, 5000) == DATA[:5000]
        assert "the next store is asked" in caplog.text
        wait_until(lambda: len(seen) == 1)
        assert store.blob_range(blob.digest, 5000, 9) == DATA[5000:5009]
        assert len(seen) == 1
        clock.advance(AWAY_S + 1)
        assert store.blob_range(blob.digest, 0, 5000) == DATA[:5000]
        wait_until(lambda: len(seen) == 2)


def test_a_blob_goes_on_from_the_next_store_where_a_mirror_breaks_off(tmp_path):
    origin = OciLayout.create(tmp_path / "origin")
    blob = push(origin, DATA)
    with trickling(WHOLE + DATA[:1_300_000]) as (address, _):
        store = MirroredStore(origin, [client(address, attempts=1)])

        assert b"".join(store.blob_chunks(blob)) == DATA


def test_a_peer_whose_headers_trickle_is_left_for_the_next_tier():
    ref = BlockRef(blob_of(DATA).digest, blob_of(b"layer").digest, 0, 0, 10)
    with trickling() as (address, seen):
        tier = PeerTier([address], "me", patience=PeerPatience(silent_s=0.4, total_s=1.0))
        index = type("Index", (), {"blob_digest": blob_of(b"layer").digest})()

        found, moved = tier.fetch(index, [ref])

        assert (found, moved) == ({}, 0)
        wait_until(lambda: seen)
        tier.close()


def test_a_reader_who_pauses_is_no_slow_server(monkeypatch):
    fake, clock = FakeRegistry(), FakeClock()
    # Time passes in the pauses alone, however busy the machine is.
    monkeypatch.setattr(slow_servers, "time", SimpleNamespace(monotonic=clock.now_s))
    digest = fake.put(DATA)
    with serving(fake):
        pool = paced_pool(Pace(silent_s=60.0, least_bytes_per_s=1e6), connect_s=60.0)
        response = pool.request(
            "GET", f"http://{fake.address}/v2/a/b/blobs/{digest}", preload_content=False
        )
        parts = [response.read(1000)]
        for _ in range(3):
            clock.advance(40.0)  # longer in all than the server may take
            parts.append(response.read(1000))
        parts.append(response.read())
        pool.clear()

    assert b"".join(parts) == DATA
