"""What an open answers the kernel: which closes it is to ask about."""

import os
import struct

import pytest

from fusefs.bridge.api.protocol import Entry, FileSystem, Opened
from fusefs.bridge.device.passthrough import Passthrough
from fusefs.bridge.device.requests import Requests
from fusefs.bridge.device.wire import Opcode, OpenReply


class Opening(FileSystem):
    async def open(self, inode, flags):
        return Opened(5)

    async def create(self, parent, name, mode, flags):
        return Opened(5), Entry(7)


def asks_about_the_close(opcode, body):
    requests = Requests(Opening(), Passthrough(-1, agreed=False))
    with pytest.raises(StopIteration) as stop:
        requests.of_opcode[opcode](7, memoryview(body)).send(None)
    handle, flags, _ = struct.unpack("<QIi", bytes(stop.value.value)[-16:])
    assert handle == 5
    return not flags & OpenReply.NOFLUSH


@pytest.mark.parametrize(
    ("flags", "asks"),
    [
        (os.O_RDONLY, False),
        (os.O_RDONLY | os.O_DIRECT, False),
        (os.O_RDONLY | os.O_TRUNC, True),
        (os.O_WRONLY, True),
        (os.O_RDWR | os.O_APPEND, True),
    ],
)
def test_the_kernel_asks_about_a_close_of_what_may_have_changed(flags, asks):
    assert asks_about_the_close(Opcode.OPEN, struct.pack("<2I", flags, 0)) is asks


def test_the_kernel_asks_about_the_close_of_a_file_that_an_open_to_read_made():
    body = struct.pack("<4I", os.O_RDONLY | os.O_CREAT, 0o100644, 0, 0) + b"new\0"

    assert asks_about_the_close(Opcode.CREATE, body)
