"""The device loop over a pair of sockets in place of /dev/fuse: answers, waits, errors, interrupts."""

import errno
import os
import socket
import struct
import threading
from concurrent.futures import Future

import pytest
from typing_extensions import override

from fusefs.bridge.api.protocol import Entry, FileSystem, Named, Opened
from fusefs.bridge.api.waiting import all_done, result_of, run_blocking
from fusefs.bridge.device.loop import Loop, Replies
from fusefs.bridge.device.passthrough import Passthrough
from fusefs.bridge.device.requests import Requests
from fusefs.bridge.device.wire import IN_HEADER, OUT_HEADER, Opcode
from omniload.base.errors import IntegrityError

NOBODY = 2**22 + 7  # no thread has such a number: limits of the kernel


class Scripted(FileSystem):
    """Answers reads with the future of their handle."""

    def __init__(self):
        self.futures = {}
        self.forgotten = []
        self.told_of = []

    @override
    async def lookup(self, parent, name):
        if name == b"broken":
            raise KeyError("a defect")
        if name == b"damaged":
            raise IntegrityError("flipped")
        if name in self.futures:
            await result_of(self.futures[name])
        return Entry(inode=7)

    @override
    async def getattr(self, inode):
        return Entry(inode=inode)

    @override
    async def opendir(self, inode):
        return Opened(1)

    @override
    def readdir(self, handle, start):
        return (Named(b"n%02d" % i, Entry(inode=100 + i)) for i in range(start, 10))

    @override
    def advertised(self, inode):
        self.told_of.append(inode)

    @override
    def forget(self, inode, lookups):
        self.forgotten.append((inode, lookups))

    @override
    async def open(self, inode, flags):
        return Opened(inode * 10)

    @override
    async def read(self, handle, offset, size_bytes):
        if handle in self.futures:
            return await result_of(self.futures[handle])
        return memoryview(b"0123456789")[offset : offset + size_bytes]


class Kernel:
    """The other end of the device."""

    def __init__(self, loop, end, filesystem):
        self.loop, self.end, self.filesystem = loop, end, filesystem
        self.unique = 0

    def ask(self, opcode, body=b"", inode=1, pid=None):
        self.unique += 1
        size = IN_HEADER.size + len(body)
        pid = os.getpid() if pid is None else pid
        self.end.send(IN_HEADER.pack(size, opcode, self.unique, inode, 0, 0, pid, 0, 0) + body)
        self.loop.once(0)
        return self.unique

    def answers(self):
        found = {}
        while True:
            try:
                data = self.end.recv(1 << 20)
            except BlockingIOError:
                return found
            size, number, unique = OUT_HEADER.unpack_from(data)
            assert size == len(data)
            found[unique] = (-number, data[16:])

    def answer(self, opcode, body=b"", inode=1):
        return self.answers_to(self.ask(opcode, body, inode))

    def answers_to(self, unique):
        return self.answers()[unique]


@pytest.fixture
def kernel():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    filesystem = Scripted()
    passthrough = Passthrough(ours.fileno(), agreed=False)
    loop = Loop(ours.fileno(), filesystem, Requests(filesystem, passthrough))
    loop.take_requests(on=True)
    with ours, theirs:
        yield Kernel(loop, theirs, filesystem)
        loop.close()


def read_of(handle, offset=0, size=4):
    return struct.pack("<2QI20x", handle, offset, size)


def test_a_read_from_memory_is_answered_at_once(kernel):
    assert kernel.answer(Opcode.READ, read_of(1, offset=3)) == (0, b"3456")


def test_a_read_that_waits_holds_nobody_up_and_is_answered_when_it_is_done(kernel):
    future = kernel.filesystem.futures[5] = Future()
    waits = kernel.ask(Opcode.READ, read_of(5))
    assert kernel.answer(Opcode.READ, read_of(1)) == (0, b"0123")

    future.set_result(b"late")
    kernel.loop.once(0)

    assert kernel.answers() == {waits: (0, b"late")}


def test_an_error_of_what_is_awaited_is_the_errno_of_the_request(kernel):
    future = kernel.filesystem.futures[5] = Future()
    waits = kernel.ask(Opcode.READ, read_of(5))

    future.set_exception(OSError(errno.ESTALE, "gone"))
    kernel.loop.once(0)

    assert kernel.answers() == {waits: (errno.ESTALE, b"")}


@pytest.mark.parametrize(
    ("name", "number"), [(b"broken", errno.EIO), (b"damaged", errno.EIO), (b"fine", 0)]
)
def test_a_defect_is_an_errno_and_the_mount_goes_on(kernel, name, number):
    assert kernel.answer(Opcode.LOOKUP, name + b"\0")[0] == number
    assert kernel.answer(Opcode.GETATTR)[0] == 0


def test_what_is_not_known_is_enosys_which_the_kernel_remembers(kernel):
    for opcode in (39, 43, 46, 999):
        assert kernel.answer(opcode) == (errno.ENOSYS, b"")


def test_a_read_only_file_system_refuses_changes(kernel):
    assert kernel.answer(Opcode.UNLINK, b"name\0") == (errno.EROFS, b"")
    assert kernel.answer(Opcode.MKDIR, struct.pack("<2I", 0o755, 0) + b"d\0") == (errno.EROFS, b"")


def test_forgets_have_no_answer(kernel):
    kernel.ask(Opcode.FORGET, struct.pack("<Q", 3), inode=8)
    kernel.ask(Opcode.BATCH_FORGET, struct.pack("<2I4Q", 2, 0, 5, 1, 6, 2))

    assert kernel.answers() == {}
    assert kernel.filesystem.forgotten == [(8, 3), (5, 1), (6, 2)]


def test_a_listing_fills_the_room_there_is_and_counts_what_it_told(kernel):
    plain = kernel.answer(Opcode.READDIR, read_of(1, size=32 * 3 + 31))[1]
    assert len(plain) == 32 * 3
    assert kernel.filesystem.told_of == []

    plus = kernel.answer(Opcode.READDIRPLUS, read_of(1, offset=7, size=1 << 16))[1]
    assert len(plus) == 160 * 3
    assert kernel.filesystem.told_of == [107, 108, 109]


def test_a_close_of_what_was_only_read_is_not_asked_about(kernel):
    _, reply = kernel.answer(Opcode.OPEN, struct.pack("<2I", os.O_RDONLY, 0), inode=3)
    assert struct.unpack("<QIi", reply) == (30, 1 << 5, 0)

    _, reply = kernel.answer(Opcode.OPEN, struct.pack("<2I", os.O_RDWR, 0), inode=3)
    assert struct.unpack("<QIi", reply) == (30, 0, 0)


def test_a_caller_that_is_gone_is_answered_and_the_late_answer_is_dropped(kernel):
    future = kernel.filesystem.futures[5] = Future()
    waits = kernel.ask(Opcode.READ, read_of(5), pid=NOBODY)
    kernel.ask(Opcode.INTERRUPT, struct.pack("<Q", waits))
    assert kernel.answers() == {waits: (errno.EINTR, b"")}

    future.set_result(b"late")
    kernel.loop.once(0)

    assert kernel.answers() == {}


def test_a_caller_of_another_namespace_waits_on(kernel):
    kernel.filesystem.futures[5] = Future()
    waits = kernel.ask(Opcode.READ, read_of(5), pid=0)
    kernel.ask(Opcode.INTERRUPT, struct.pack("<Q", waits))

    assert kernel.answers() == {}


def test_a_caller_that_lives_waits_on_though_a_signal_came(kernel):
    future = kernel.filesystem.futures[5] = Future()
    waits = kernel.ask(Opcode.READ, read_of(5))
    kernel.ask(Opcode.INTERRUPT, struct.pack("<Q", waits))
    assert kernel.answers() == {}

    future.set_result(b"late")
    kernel.loop.once(0)

    assert kernel.answers() == {waits: (0, b"late")}


def test_an_inode_that_was_found_too_late_is_forgotten_for_the_kernel(kernel):
    future = kernel.filesystem.futures[b"slow"] = Future()
    waits = kernel.ask(Opcode.LOOKUP, b"slow\0", pid=NOBODY)
    kernel.ask(Opcode.INTERRUPT, struct.pack("<Q", waits))

    future.set_result(None)
    kernel.loop.once(0)

    assert kernel.answers() == {waits: (errno.EINTR, b"")}
    assert kernel.filesystem.forgotten == [(7, 1)]


def test_no_request_is_taken_while_the_loop_finishes_what_waits(kernel):
    future = kernel.filesystem.futures[5] = Future()
    waits = kernel.ask(Opcode.READ, read_of(5))
    kernel.loop.take_requests(on=False)
    kernel.ask(Opcode.GETATTR)
    assert not kernel.loop.finish_tasks(0.0)

    future.set_result(b"late")
    assert kernel.loop.finish_tasks(10.0)
    assert kernel.answers() == {waits: (0, b"late")}

    kernel.loop.take_requests(on=True)
    kernel.loop.once(0)
    assert len(kernel.answers()) == 1


def test_a_future_that_is_done_after_the_loop_closed_hurts_nobody(kernel):
    future = kernel.filesystem.futures[5] = Future()
    kernel.ask(Opcode.READ, read_of(5))
    kernel.loop._closed = True  # as close() leaves it

    future.set_result(b"late")

    kernel.loop._closed = False
    assert kernel.answers() == {}


def test_a_handler_can_be_run_without_any_loop():
    done = Future()
    done.set_result(b"1")

    async def handler():
        await all_done([done])
        return await result_of(done)

    assert run_blocking(handler()) == b"1"


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


def test_a_large_reply_for_which_there_is_no_thread_is_written_in_place(device, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    device.request_waits()

    device.replies.write(7, 0, LARGE)

    assert device.answer() == (7, 0, LARGE)
    assert device.replies.finish(0.0)
    device.replies.close()


def test_a_reply_that_is_not_taken_becomes_eio_and_one_nobody_waits_for_is_dropped(
    device, monkeypatch
):
    errors = iter([errno.EINVAL, None, errno.ENOENT])
    written = []

    def writev(_device, parts):
        if (number := next(errors)) is not None:
            raise OSError(number, "refused")
        written.append(b"".join(parts))

    monkeypatch.setattr("fusefs.bridge.device.loop.os.writev", writev)

    device.replies.write(7, 0, b"body")
    device.replies.write(8, 0, b"body")

    assert written == [OUT_HEADER.pack(16, -errno.EIO, 7)]


def test_nothing_is_left_over_when_it_is_closed(device):
    device.request_waits()
    device.replies.write(1, 0, LARGE)

    device.replies.close()

    assert device.answer()[0] == 1
    assert device.aside == 0
