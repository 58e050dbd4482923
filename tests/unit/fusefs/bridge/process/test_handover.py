"""The old process's side of a hand-over: the mount stays with it whatever goes wrong."""

import errno
import mmap
import os
import select
import socket
import struct
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import orjson
import pytest

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.device.loop import REQUEST_BYTES
from fusefs.bridge.device.passthrough import NO_PASSTHROUGH, Passthrough
from fusefs.bridge.libfuse import binding as libfuse_binding
from fusefs.bridge.process import handover
from fusefs.bridge.server import chosen
from omniload.base.errors import StateError


class Peer:
    """One who asks for a mount, and is gone when it is to be told that it has it."""

    def __init__(self, *, dies=True):
        self.dies = dies
        self.words = [b"ready"]
        self.heard = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.heard.append("closed")

    def settimeout(self, _):
        pass

    def getsockopt(self, *_):
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())

    def recv(self, _):
        return self.words.pop(0)

    def sendmsg(self, parts, ancillary):
        assert ancillary
        self.heard.append("descriptor")

    def sendall(self, data):
        if data == b"yours" and self.dies:
            raise BrokenPipeError
        self.heard.append(bytes(data))


class Listener:
    def __init__(self, peer):
        self.peer, self.closed = peer, False

    def accept(self):
        return self.peer, b""

    def close(self):
        self.closed = True


def test_one_who_dies_before_it_has_the_mount_leaves_it_where_it_can_be_asked_for_again():
    listener = Listener(Peer())

    assert not handover.handed_over(listener.peer, listener, 0, dict)
    assert not listener.closed


def test_the_address_is_let_go_before_the_connection_is():
    peer = Peer(dies=False)
    listener = Listener(peer)

    assert handover.handed_over(
        listener.peer, listener, 0, dict, lambda: peer.heard.append("let go")
    )
    assert listener.closed
    assert peer.heard[-3:] == [b"yours", "let go", "closed"]


@pytest.mark.parametrize("error", [StateError("no \udcff"), KeyError("a defect"), OSError(5, "x")])
def test_what_cannot_be_handed_over_stays_and_the_reason_is_told(error):
    def state():
        raise error

    peer = Peer()
    listener = Listener(peer)

    assert not handover.handed_over(listener.peer, listener, 0, state)
    assert not listener.closed
    told = peer.heard[-2]
    assert told.startswith(bytes(8))
    assert len(told) > 8


def test_the_new_process_waits_until_the_address_is_free():
    ours, theirs = socket.socketpair()
    taken = handover.Taken(theirs, os.open(os.devnull, os.O_RDONLY), {})
    with ours:
        ours.sendall(b"yours")
        ours.shutdown(socket.SHUT_WR)
        taken.confirm()
        assert ours.recv(64) == b"ready"
    assert theirs.fileno() == -1
    os.close(taken.device)


def test_a_process_without_descriptors_to_answer_with_keeps_its_mount(monkeypatch):
    class Full:
        def accept(self):
            raise OSError(errno.EMFILE, "too many open files")

    rests = []
    monkeypatch.setattr(handover.time, "sleep", rests.append)

    assert handover.admitted(Full()) is None
    assert rests == [handover.REST_S]


@pytest.mark.parametrize(
    "state", [orjson.dumps({"version": 2}), b"no JSON", b'{"version": 1, "cut sho']
)
def test_a_state_that_cannot_be_used_leaves_no_descriptor_of_the_mount_here(state):
    """It would keep the connection from ending when the other process does."""
    ours, theirs = socket.socketpair()
    read, write = os.pipe2(os.O_NONBLOCK)
    is_cut = state.endswith(b"sho")
    with ours, theirs:
        socket.send_fds(ours, [handover.LENGTH.pack(len(state) + is_cut)], [write])
        os.close(write)
        ours.sendall(state)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises((StateError, ValueError)):
            handover.received(theirs, "/mnt")

        assert os.read(read, 1) == b""  # nobody writes there any more
    os.close(read)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError("timed out"), "process 12, which serves it, has not answered within 60 s"),
        (ConnectionRefusedError(111, "no"), "process 12 serves it with bridge=pyfuse3 and hands"),
    ],
)
def test_a_process_that_is_slow_is_not_taken_for_one_that_cannot(monkeypatch, error, reason):
    waiter = SimpleNamespace(about={"process": 12, "bridge": "pyfuse3"}, close=lambda: None)
    monkeypatch.setattr(handover.UnmountClient, "of", lambda _: waiter)

    assert handover.why_nobody("/mnt", error).startswith(reason)


def heard(door, within_s=30):
    return select.select([door], [], [], within_s)[0] == [door]


def test_a_silent_client_keeps_neither_the_loop_nor_who_asks_after_it(monkeypatch):
    monkeypatch.setattr(handover, "HELLO_WITHIN_S", 0.2)
    silent, asks = socket.socketpair(), socket.socketpair()
    asks[1].sendall(b"take over 1")
    clients = SimpleQueue()

    class Listener:
        def accept(self):
            client = clients.get()
            if client is None:
                raise OSError(errno.EINVAL, "closed")
            return client, b""

        def shutdown(self, _):
            clients.put(None)

        def close(self):
            pass

    clients.put(silent[0])
    clients.put(asks[0])
    with handover.Door(Listener()) as door:
        assert heard(door)
        peer = door.next()
        assert peer is asks[0]
        assert not heard(door, within_s=0)
        assert silent[1].recv(1) == b""  # hung up on
        peer.close()
    silent[1].close()
    asks[1].close()


def test_the_address_is_let_go_of_once_nobody_waits_there_for_a_connection():
    waits, shut, left = threading.Event(), threading.Event(), threading.Event()
    left_at_close = []

    class Listener:
        """Its ``accept`` leaves three times as late as a thread that ends is waited for, as on a busy machine."""

        def accept(self):
            waits.set()
            shut.wait()
            threading.Event().wait(3 * handover.REST_S)
            left.set()
            raise OSError(errno.EINVAL, "closed")

        def shutdown(self, _):
            shut.set()

        def close(self):
            left_at_close.append(left.is_set())

    with handover.Door(Listener()):
        assert waits.wait(30)

    assert left_at_close == [True]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (bytes(8) + b"timed out", "kept the mount: timed out; try again"),
        (b"", "did not let the mount go: it ended; try again"),
    ],
)
def test_who_does_not_get_the_mount_hears_why_and_keeps_no_descriptor_of_it(answer, reason):
    ours, theirs = socket.socketpair()
    read, write = os.pipe2(os.O_NONBLOCK)
    taken = handover.Taken(theirs, write, {})
    with ours:
        ours.sendall(answer)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(StateError, match=reason):
            taken.confirm()
    assert os.read(read, 1) == b""
    os.close(read)


def test_one_who_asks_and_says_nothing_is_not_waited_for_as_long_as_one_who_opens_files():
    waits = []

    class Silent(Peer):
        def settimeout(self, within_s):
            waits.append(within_s)

        def recv(self, _):
            raise TimeoutError("timed out")

        def close(self):
            self.heard.append("closed")

    assert handover.admitted(Listener(Silent())) is None
    assert waits == [handover.HELLO_WITHIN_S]
    assert handover.HELLO_WITHIN_S < handover.ANSWER_WITHIN_S / 10


@pytest.mark.parametrize("bridge", ["auto", "pyfuse3", "device"])
def test_a_mount_that_is_taken_over_is_served_by_our_own_binding_whatever_is_asked(bridge):
    assert chosen(BridgeOptions(bridge=bridge, take_over=True)) == "device"


@pytest.mark.parametrize(
    ("allowed", "pages"), [("256\n", 256), ("1024\n", 1024), ("16\n", 256), ("", 256), (None, 256)]
)
def test_libfuse_is_read_after_with_room_for_the_largest_request_it_can_have_agreed_to(
    tmp_path, monkeypatch, allowed, pages
):
    limit = tmp_path / "max_pages_limit"
    if allowed is not None:
        limit.write_text(allowed)
    monkeypatch.setattr(libfuse_binding, "_MAX_PAGES", limit)

    told = libfuse_binding._largest_request()

    assert told == pages * mmap.PAGESIZE + mmap.PAGESIZE
    assert told >= REQUEST_BYTES


def test_a_connection_that_libfuse_began_passes_nothing_through():
    passthrough = Passthrough(0, agreed=NO_PASSTHROUGH["agreed"])
    passthrough.resume(NO_PASSTHROUGH)

    assert not passthrough.can_pass_through
    assert passthrough.state() == NO_PASSTHROUGH
