"""Another version of a path is another inode for as long as the older one is read."""

import errno
import os
from types import SimpleNamespace

import pytest
from typing_extensions import override

from fusefs.bridge.api.protocol import ROOT_INODE, Change
from fusefs.bridge.api.waiting import run_blocking
from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from fusefs.tree.file_attributes import set_attributes
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs import inode_table
from fusefs.vfs.attribute_cache import TTL_S
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.session import STATS_DIRECTORY_INODE
from fusefs.vfs.store_filesystem import StoreFileSystem
from omniload.base.errors import StateError
from tests.support.fusefs.bridge.mount import CONFIG, DATA, Mount, held

PLAIN = b"plain " * 50


class Copying(MemoryStore):
    """Renames by copying, as object stores do: the copy has a time stamp of its own."""

    @override
    def rename(self, source, target):
        super().rename(source, target)
        self.mtimes_ns[target] += 10**9


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def mount(store):
    made = Mount(store)
    made.files.write_file("f", DATA)
    made.kernel.can_pass_through = False
    yield made
    made.close()


@pytest.fixture
def elsewhere(store):
    """Another process on the same store."""
    made = StripedFiles(store, CONFIG)
    yield made
    made.close()


def looked_up_anew(mount, name=b"f"):
    """Look a name up when nothing is believed any more."""
    mount.shown.session.attributes.forget_all()
    return mount.lookup(name)


def size(mount, inode):
    return run_blocking(mount.shown.getattr(inode)).size_bytes


def flushed(mount, opened):
    run_blocking(mount.shown.flush(opened.handle))


def stale(call, *arguments):
    """Return whether a call answers ESTALE."""
    try:
        run_blocking(call(*arguments))
    except OSError as error:
        return error.errno == errno.ESTALE
    return False


@pytest.mark.parametrize("new", [DATA[::-1], DATA * 2, b"short"])
@pytest.mark.parametrize("data", [DATA, PLAIN])
def test_who_has_the_old_version_open_reads_it_whole_or_not_at_all(mount, elsewhere, data, new):
    elsewhere.write_file("f", data)
    old = looked_up_anew(mount)
    reader = mount.open(old)
    run_blocking(mount.shown.read(reader.handle, 0, 10))
    elsewhere.write_file("f", new)

    with pytest.raises(OSError, match="another inode"):
        mount.open(old)
    newer = mount.open(mount.lookup())

    assert mount.read(newer) == new
    assert size(mount, old) == len(data)
    try:
        assert mount.read(reader) == data
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        assert data is DATA, "the bytes of a plain file came with the open"
    assert size(mount, old) == len(data)


def test_a_name_leads_to_the_new_version_though_nobody_opened_it(mount, elsewhere):
    old = mount.lookup()
    reader = mount.open(old)
    elsewhere.write_file("f", b"newer")

    new = looked_up_anew(mount)

    assert new != old
    assert (size(mount, new), size(mount, old)) == (5, len(DATA))
    mount.release(reader)


def test_a_listing_leads_to_the_new_version_and_tells_its_size(mount, elsewhere):
    old = mount.lookup()
    mount.open(old)
    elsewhere.write_file("f", b"newer")

    (line,) = mount.shown.readdir(run_blocking(mount.shown.opendir(ROOT_INODE)).handle, 0)

    assert line.entry.inode != old
    assert line.entry.size_bytes == 5


def test_a_line_of_a_listing_whose_name_leads_elsewhere_by_now_is_not_believed(mount, elsewhere):
    old = mount.lookup()
    listing = run_blocking(mount.shown.opendir(ROOT_INODE))
    mount.open(old)
    elsewhere.write_file("f", b"newer")
    assert looked_up_anew(mount) != old

    (line,) = mount.shown.readdir(listing.handle, 0)

    assert (line.entry.inode, line.entry.size_bytes) == (old, len(DATA))
    assert line.entry.entry_timeout_s == 0


def test_what_is_removed_elsewhere_while_it_is_open_has_no_name_and_can_be_made_again(
    mount, elsewhere
):
    old = mount.lookup()
    mount.open(old)
    elsewhere.names.remove("f")

    with pytest.raises(FileNotFoundError):
        looked_up_anew(mount)
    made, entry = run_blocking(mount.shown.create(ROOT_INODE, b"f", 0o644, os.O_RDWR | os.O_EXCL))

    assert entry.inode != old
    assert (size(mount, old), size(mount, entry.inode)) == (len(DATA), 0)
    mount.release(made)


def test_who_writes_to_a_version_that_was_replaced_hears_of_it(mount, elsewhere):
    old = mount.lookup()
    writer = mount.open(old, os.O_RDWR)
    elsewhere.write_file("f", b"newer")
    assert looked_up_anew(mount) != old

    assert stale(mount.shown.write, writer.handle, 0, b"lost")
    assert stale(mount.shown.setattr, old, Change(size_bytes=3), writer.handle)
    assert stale(mount.shown.setattr, old, Change(mode=0o600), writer.handle)
    mount.release(writer)

    with elsewhere.open("f") as file:
        assert bytes(file.reader.read(0, 100)) == b"newer"
        assert file.info.mode == 0o644


def test_what_was_written_before_a_file_is_replaced_is_published_by_the_close(mount, elsewhere):
    inode = mount.lookup()
    writer = mount.open(inode, os.O_RDWR)
    run_blocking(mount.shown.write(writer.handle, 0, DATA[::-1]))
    elsewhere.write_file("f", b"newer")

    assert looked_up_anew(mount) == inode
    reader = mount.open(inode)
    assert mount.read(reader) == DATA[::-1]
    flushed(mount, writer)

    with elsewhere.open("f") as file:
        assert bytes(file.reader.read(0, len(DATA))) == DATA[::-1]


def test_who_only_writes_goes_on_in_the_new_version(mount, elsewhere):
    inode = mount.lookup()
    log = mount.open(inode, os.O_WRONLY | os.O_APPEND)
    elsewhere.write_file("f", b"turned over\n")

    assert looked_up_anew(mount) == inode
    assert size(mount, inode) == 12
    run_blocking(mount.shown.write(log.handle, 0, b"next line\n"))
    flushed(mount, log)

    with elsewhere.open("f") as file:
        assert bytes(file.reader.read(0, 100)) == b"turned over\nnext line\n"


def test_a_file_that_became_a_directory_is_not_taken_up_by_who_only_writes(mount, elsewhere):
    inode = mount.lookup()
    log = mount.open(inode, os.O_WRONLY | os.O_APPEND)
    elsewhere.names.remove("f")
    elsewhere.names.make_directory("f")

    assert looked_up_anew(mount) != inode
    assert stale(mount.shown.write, log.handle, 0, b"line\n")


@pytest.mark.parametrize("data", [DATA, PLAIN, b""])
def test_what_was_published_here_is_the_version_that_is_open(mount, elsewhere, data):
    inode = mount.lookup()
    writer = mount.open(inode, os.O_RDWR | os.O_TRUNC)
    run_blocking(mount.shown.write(writer.handle, 0, data))
    for end in (mount.shown.fsync, mount.shown.flush):
        run_blocking(end(writer.handle))
        assert looked_up_anew(mount) == inode
        assert mount.read(mount.open(inode)) == data

    elsewhere.write_file("f", data[::-1] or b"x")
    assert looked_up_anew(mount) != inode
    assert mount.read(mount.open(mount.lookup())) == (data[::-1] or b"x")


def test_a_version_renamed_here_keeps_its_inode_on_a_store_that_copies():
    made = Mount(Copying())
    for name, data in (("f", DATA), ("p", PLAIN), ("long", b"long" * 5000)):
        made.files.write_file(name, data)
    made.files.store.publish("long", b"long" * 5000)  # plain, and too long to come whole
    for name in (b"f", b"p", b"long"):
        inode = made.lookup(name)
        reader = made.open(inode)
        run_blocking(made.shown.rename(ROOT_INODE, name, ROOT_INODE, b"new " + name, 0))

        assert looked_up_anew(made, b"new " + name) == inode
        assert len(made.read(reader)) == size(made, inode)
        assert made.read(made.open(inode)) == made.read(reader)
    made.close()


def test_a_version_that_was_replaced_is_not_followed_by_a_rename(mount, elsewhere, store):
    elsewhere.write_file("f", PLAIN)
    store.mtimes_ns["f"] -= 10**10  # so old that its bytes may leave memory
    old = looked_up_anew(mount)
    reader = mount.open(old)
    mount.files.cache.drop(list(mount.files.cache._blocks))
    elsewhere.write_file("f", PLAIN[::-1])

    run_blocking(mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0))

    assert stale(mount.shown.read, reader.handle, 0, 10)
    assert mount.read(mount.open(looked_up_anew(mount, b"g"))) == PLAIN[::-1]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_attributes_set_elsewhere_are_no_other_version(mount, elsewhere, flags):
    inode = mount.lookup()
    opened = mount.open(inode, flags)
    set_attributes(elsewhere, "f", Attributes(mode=0o600))

    assert looked_up_anew(mount) == inode
    assert run_blocking(mount.shown.getattr(inode)).mode & 0o777 == 0o600
    assert mount.read(opened) == DATA


@pytest.mark.parametrize("data", [DATA, PLAIN])
def test_attributes_set_here_go_to_the_version_that_is_open_and_at_once(mount, elsewhere, data):
    elsewhere.write_file("f", data)
    inode = looked_up_anew(mount)
    reader = mount.open(inode)

    run_blocking(mount.shown.setattr(inode, Change(mode=0o600), None))
    assert elsewhere.stat("f").mode == 0o600
    assert looked_up_anew(mount) == inode

    elsewhere.write_file("f", b"newer")
    assert stale(mount.shown.setattr, inode, Change(mode=0o640), None)
    assert elsewhere.stat("f").mode == 0o644
    assert looked_up_anew(mount) != inode
    assert size(mount, inode) == len(data)
    mount.release(reader)


def test_attributes_of_what_another_mount_removed_have_its_name_looked_up_again(mount, elsewhere):
    inode = mount.lookup()
    elsewhere.names.remove("f")
    mount.shown.session.attributes.forget_all()

    assert stale(mount.shown.getattr, inode)
    with pytest.raises(FileNotFoundError):
        mount.lookup()


def test_a_look_that_began_before_a_rename_takes_no_name_away(mount):
    inode = mount.lookup()
    reader = mount.open(inode)
    mount.shown.session.attributes.forget_all()
    looking = mount.shown.lookup(ROOT_INODE, b"f")
    with held(mount.files, "stat", looking):
        run_blocking(mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0))
        mount.files.write_file("f", b"another")
    run_blocking(looking)

    assert mount.lookup(b"g") == inode
    assert looked_up_anew(mount) != inode
    mount.release(reader)


def test_a_look_during_a_rename_takes_no_name_away(mount):
    inode = mount.lookup()
    reader = mount.open(inode)
    renaming = mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0)
    with held(mount.files.names, "rename", renaming):
        assert looked_up_anew(mount) == inode  # the store has it at its new name already
    run_blocking(renaming)

    assert looked_up_anew(mount, b"g") == inode
    assert mount.read(reader) == DATA


def test_sizes_that_the_kernel_may_have_been_told_of_in_any_order_are_asked_for_again(
    mount, elsewhere
):
    inode = mount.lookup()
    elsewhere.write_file("f", b"newer")
    looked_up_anew(mount)  # of two answers on their way, the kernel may believe the older one

    mount.release(mount.open(inode))
    assert mount.kernel.told_outdated == [inode]
    size(mount, inode)
    mount.release(mount.open(inode))
    assert mount.kernel.told_outdated == [inode]


@pytest.fixture
def clock(monkeypatch):
    """The time by which an inode had another size a moment ago, as a list of one."""
    now_s = [100.0]
    monkeypatch.setattr(inode_table, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def valid_s(mount, inode):
    """Return for how long the kernel may keep attributes, by each answer that brings some."""
    listing = mount.shown.readdir(run_blocking(mount.shown.opendir(ROOT_INODE)).handle, 0)
    answers = [*(line.entry for line in listing), run_blocking(mount.shown.getattr(inode))]
    return {answer.attr_timeout_s for answer in answers}


def test_attributes_are_not_valid_until_the_kernel_surely_has_the_size_that_came_with_them(
    mount, elsewhere, clock
):
    inode = mount.lookup()
    assert valid_s(mount, inode) == {TTL_S}
    elsewhere.write_file("f", b"newer")
    run_blocking(mount.shown.getxattr(ROOT_INODE, b"user.omnifs.drop"))

    # Beside the answer that brings another size, ``fstat`` of another process would tell the one of before.
    assert valid_s(mount, inode) == {0}
    clock[0] += 0.9
    assert valid_s(mount, inode) == {0}
    clock[0] += 0.2
    assert valid_s(mount, inode) == {TTL_S}


def test_a_size_that_the_kernel_wrote_or_cut_itself_is_none_that_an_answer_brings(
    mount, elsewhere, clock
):
    inode = mount.lookup()
    opened = mount.open(inode, os.O_RDWR | os.O_TRUNC)
    assert valid_s(mount, inode) == {TTL_S}
    run_blocking(mount.shown.write(opened.handle, 0, PLAIN))
    assert valid_s(mount, inode) == {TTL_S}
    run_blocking(mount.shown.setattr(inode, Change(size_bytes=7), opened.handle))
    flushed(mount, opened)
    mount.release(opened)
    assert valid_s(mount, inode) == {TTL_S}

    elsewhere.write_file("f", b"of another size")
    run_blocking(mount.shown.getxattr(ROOT_INODE, b"user.omnifs.drop"))
    assert valid_s(mount, inode) == {0}


def test_opens_of_a_young_version_share_the_page_cache_while_one_is_open(mount, elsewhere):
    elsewhere.write_file("f", PLAIN)
    inode = looked_up_anew(mount)
    first = mount.open(inode)

    assert mount.read(first) == PLAIN
    assert mount.open(inode).keep_cache


@pytest.mark.parametrize("age_ns", [0, 10**10])
def test_bytes_of_a_version_that_its_time_stamp_does_not_tell_from_another_stay_while_it_is_open(
    mount, elsewhere, store, age_ns
):
    elsewhere.write_file("f", PLAIN)
    store.mtimes_ns["f"] -= age_ns
    stamp_ns = store.mtimes_ns["f"]
    inode = looked_up_anew(mount)
    reader = mount.open(inode)
    mount.files.cache.drop(list(mount.files.cache._blocks))
    elsewhere.write_file("f", PLAIN[::-1])

    if age_ns:
        assert stale(mount.shown.read, reader.handle, 0, 10)
    else:
        store.mtimes_ns["f"] = stamp_ns  # in the same tick of a coarse clock
        assert mount.read(reader) == PLAIN
        assert looked_up_anew(mount) != inode


def test_an_inode_has_its_number_again_when_the_kernel_forgot_it(mount):
    run_blocking(mount.shown.mkdir(ROOT_INODE, b"d", 0o755))
    mount.files.write_file("d/f", DATA)

    def numbers(shown):
        folder = run_blocking(shown.lookup(ROOT_INODE, b"d")).inode
        file = run_blocking(shown.lookup(folder, b"f")).inode
        return folder, file

    first = numbers(mount.shown)
    assert len({*first, ROOT_INODE, STATS_DIRECTORY_INODE}) == 4
    assert all(number < 2**53 for number in first), "a double holds it"
    for number in reversed(first):
        mount.shown.forget(number, 10)
    assert numbers(mount.shown) == first

    other = StoreFileSystem(mount.files, SpoolPlace())
    assert numbers(other) == first
    other.close()


def test_a_number_in_use_is_given_to_no_other_version(mount, elsewhere):
    old = mount.lookup()
    opens, inodes = [mount.open(old)], [old]
    for number in range(3):
        elsewhere.write_file("f", DATA + bytes(number + 1))
        inodes.append(looked_up_anew(mount))
        opens.append(mount.open(inodes[-1]))

    assert len(set(inodes)) == 4
    for opened in opens:
        mount.release(opened)
    for inode in inodes:
        mount.shown.forget(inode, 10)
    assert looked_up_anew(mount) == old


def test_a_version_replaced_between_two_processes_is_not_taken_over_as_another(mount, elsewhere):
    inode = mount.lookup()
    reader = mount.open(inode)
    log = mount.open(inode, os.O_WRONLY)
    state = run_blocking(mount.shown.handed_over())

    other = StoreFileSystem(mount.files, SpoolPlace())
    run_blocking(other.taken_over(state))
    node = other.session.inodes.node(inode)
    assert (node.opens, node.readers) == (2, 1)
    other.close()

    elsewhere.write_file("f", DATA[::-1])
    late = StoreFileSystem(mount.files, SpoolPlace())
    with pytest.raises(StateError, match="'f' is open and was replaced meanwhile"):
        run_blocking(late.taken_over(state))
    for opened in (reader, log):
        mount.release(opened)


def test_a_state_of_a_release_that_told_no_versions_is_taken_over(mount):
    inode = mount.lookup()
    reader = mount.open(inode)
    state = run_blocking(mount.shown.handed_over())
    del state["versions"], state["write_only"]

    other = StoreFileSystem(mount.files, SpoolPlace())
    run_blocking(other.taken_over(state))

    assert bytes(run_blocking(other.read(reader.handle, 0, 10))) == DATA[:10]
    other.close()
