"""Replies over a pair of sockets in place of /dev/fuse: in place, aside, refused."""

import errno
import socket

import pytest

from fusefs.bridge.device.replies import Replies
from fusefs.bridge.device.wire import OUT_HEADER

LARGE = bytes(range(256)) * 512


class Device:
    """Both ends, and replies to one of them."""

    def __init__(self, ours, theirs, num_threads=2):
        self.theirs = theirs
        self.replies = Replies(ours.fileno(), num_threads)

    def request_waits(self):
        self.theirs.send(b"the next request")

    def answer(self):
        data = self.theirs.recv(1 << 20)
        size, number, unique = OUT_HEADER.unpack_from(data)
        assert size == len(data)
        return unique, -number, data[16:]

    @property
    def aside(self):
        return len(self.replies._threads)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.settimeout(30)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def device(ends):
    made = Device(*ends)
    yield made
    made.replies.close()


def test_a_small_reply_is_written_in_place(device):
    device.request_waits()

    device.replies.write(7, 0, b"body")

    assert device.answer() == (7, 0, b"body")
    assert device.aside == 0


def test_an_error_has_no_body(device):
    device.replies.write(7, errno.ENOENT, LARGE)

    assert device.answer() == (7, errno.ENOENT, b"")


def test_a_large_reply_is_written_in_place_while_nobody_else_waits(device):
    device.replies.write(7, 0, memoryview(LARGE))

    assert device.answer() == (7, 0, LARGE)
    assert device.aside == 0


def test_large_replies_go_aside_while_requests_wait_and_all_come_out(device):
    device.request_waits()
    for unique in range(10):
        device.replies.write(unique, 0, memoryview(LARGE))

    found = {device.answer() for _ in range(10)}

    assert found == {(unique, 0, LARGE) for unique in range(10)}
    assert device.aside == 2
    assert device.replies.finish(30.0)


def test_without_threads_everything_is_written_in_place(ends):
    device = Device(*ends, num_threads=0)
    device.request_waits()

    device.replies.write(7, 0, LARGE)

    assert device.answer() == (7, 0, LARGE)
    assert device.replies.finish(0.0)


def test_a_reply_that_is_not_taken_becomes_eio_and_one_nobody_waits_for_is_dropped(
    device, monkeypatch
):
    errors = iter([errno.EINVAL, None, errno.ENOENT])
    written = []

    def writev(_device, parts):
        if (number := next(errors)) is not None:
            raise OSError(number, "refused")
        written.append(b"".join(parts))

    monkeypatch.setattr("fusefs.bridge.device.replies.os.writev", writev)

    device.replies.write(7, 0, b"body")
    device.replies.write(8, 0, b"body")

    assert written == [OUT_HEADER.pack(16, -errno.EIO, 7)]


def test_nothing_is_left_over_when_it_is_closed(device):
    device.request_waits()
    device.replies.write(1, 0, LARGE)

    device.replies.close()

    assert device.answer()[0] == 1
    assert device.aside == 0
