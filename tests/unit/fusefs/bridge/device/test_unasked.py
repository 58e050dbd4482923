"""What a file system says the kernel need not ask: not answered, so asked once; reads then go by the inode."""

import struct

import pytest

from fusefs.bridge.api.blocking import BlockingFileSystem, Threaded
from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.device.requests import Requests
from fusefs.bridge.device.wire import Opcode
from snapshot.image.layer.index import Entry
from snapshot.image.tree.merge import merge
from snapshot.image.view.view import ImageView

READ = struct.pack("<2QI", 0, 4096, 100)


class Recorded(FileSystem):
    def __init__(self, *unasked):
        self.unasked, self.reads = frozenset(unasked), []

    async def read(self, handle, offset, size_bytes):
        self.reads.append((handle, offset, size_bytes))
        return b"bytes"


def done(handling):
    with pytest.raises(StopIteration) as stop:
        handling.send(None)
    return stop.value.value


def requests_of(filesystem):
    return Requests(filesystem, None).of_opcode


def test_by_default_everything_is_asked_and_reads_go_by_the_handle():
    filesystem = Recorded()
    found = requests_of(filesystem)

    assert {Opcode.OPEN, Opcode.FLUSH, Opcode.GETXATTR} <= set(found)
    done(found[Opcode.READ](7, memoryview(struct.pack("<2QI", 5, 0, 10))))
    assert filesystem.reads == [(5, 0, 10)]


def test_files_that_need_not_be_opened_are_read_by_their_inode():
    filesystem = Recorded("open")
    found = requests_of(filesystem)

    assert not {Opcode.OPEN, Opcode.FLUSH} & set(found)
    assert {Opcode.RELEASE, Opcode.GETXATTR} <= set(found)
    assert done(found[Opcode.READ](7, memoryview(READ))) == b"bytes"
    assert filesystem.reads == [(7, 4096, 100)]


def test_attributes_that_nothing_has_are_not_asked_for_and_their_names_still_are():
    found = requests_of(Recorded("getxattr"))

    assert Opcode.GETXATTR not in found
    assert {Opcode.LISTXATTR, Opcode.OPEN} <= set(found)


def test_a_file_system_of_blocking_calls_passes_on_what_it_says():
    class InodeTable(BlockingFileSystem):
        unasked = frozenset(["getxattr"])

    class Other(BlockingFileSystem):
        pass

    made = [Threaded(InodeTable()), Threaded(Other())]

    assert [filesystem.unasked for filesystem in made] == [{"getxattr"}, set()]
    for filesystem in made:
        filesystem.close()


@pytest.mark.parametrize(
    ("xattrs", "unasked"),
    [((), {"open", "getxattr"}), ((("security.capability", b"\1"),), {"open"})],
)
def test_an_image_is_asked_for_attributes_only_where_a_file_has_one(xattrs, unasked):
    entries = (Entry(path="a", kind="file"), Entry(path="b", kind="file", xattrs=xattrs))
    filesystem = Threaded(ImageView(merge([entries]), (), None))

    assert filesystem.unasked == unasked
    filesystem.close()
