"""The old process's side of a hand-over: the mount stays with it whatever goes wrong."""

import mmap
import os
import socket
import struct

import pytest

from fusefs.bridge import pyfuse3_binding
from fusefs.bridge.device import handover
from fusefs.bridge.device.loop import REQUEST_BYTES
from fusefs.bridge.device.passthrough import NO_PASSTHROUGH, Passthrough
from fusefs.bridge.options import BridgeOptions
from fusefs.bridge.serving import chosen
from omniload.base.errors import StateError


class Peer:
    """One who asks for a mount, and is gone when it is to be told that it has it."""

    def __init__(self, *, dies=True):
        self.dies = dies
        self.words = [b"take over 1", b"ready"]
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

    assert not handover.handed_over(listener, 0, dict)
    assert not listener.closed


def test_the_address_is_let_go_before_the_connection_is():
    peer = Peer(dies=False)
    listener = Listener(peer)

    assert handover.handed_over(listener, 0, dict)
    assert listener.closed
    assert peer.heard[-2:] == [b"yours", "closed"]


@pytest.mark.parametrize("error", [StateError("no \udcff"), KeyError("a defect"), OSError(5, "x")])
def test_what_cannot_be_handed_over_stays_and_the_reason_is_told(error):
    def state():
        raise error

    peer = Peer()
    listener = Listener(peer)

    assert not handover.handed_over(listener, 0, state)
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
    monkeypatch.setattr(pyfuse3_binding, "_MAX_PAGES", limit)

    told = pyfuse3_binding._largest_request()

    assert told == pages * mmap.PAGESIZE + mmap.PAGESIZE
    assert told >= REQUEST_BYTES


def test_a_connection_that_libfuse_began_passes_nothing_through():
    passthrough = Passthrough(0, agreed=NO_PASSTHROUGH["agreed"])
    passthrough.resume(NO_PASSTHROUGH)

    assert not passthrough.can_pass_through
    assert passthrough.state() == NO_PASSTHROUGH
