"""What another request does while a handler waits: the answer must be right when it comes."""

import errno
import os

import pytest

from fusefs.bridge.api.protocol import ROOT_INODE, Change
from fusefs.bridge.api.waiting import run_blocking
from fusefs.format.attributes import Attributes
from fusefs.read.readahead import Closed, ReadAhead
from fusefs.stores.memory import MemoryStore
from fusefs.stores.retry import RetryingStore
from fusefs.tree.file_attributes import set_attributes
from fusefs.vfs import attributes
from fusefs.vfs.file.open_file import OpenFile
from omniload.base.errors import UnavailableError
from tests.support.fusefs.bridge.mount import DATA, Mount, held


def write(mount, opened, data):
    run_blocking(mount.shown.write(opened.handle, 0, data))
    run_blocking(mount.shown.flush(opened.handle))


def test_a_writer_that_waited_never_gets_the_local_copy_that_a_reader_brought_meanwhile(
    mount, local
):
    inode = mount.lookup()
    reader, writer = mount.shown.open(inode, os.O_RDONLY), mount.shown.open(inode, os.O_RDWR)
    with held(mount.files, "open", reader):
        assert not writer.send(None).done()
    os.close(run_blocking(reader).local_fd)
    mount.kernel.inodes.add(inode)

    with pytest.raises(OSError, match="another inode") as caught:
        run_blocking(writer)
    assert caught.value.errno == errno.ESTALE
    assert mount.lookup() != inode


def test_a_reader_that_waited_for_a_writer_gets_no_local_copy(mount, local):
    inode = mount.lookup()
    writer, reader = mount.shown.open(inode, os.O_RDWR), mount.shown.open(inode, os.O_RDONLY)
    with held(mount.files, "open", writer):
        assert not reader.send(None).done()
    run_blocking(writer)

    assert run_blocking(reader).local_fd is None


def test_readers_that_waited_for_a_reader_share_its_local_copy(mount, local):
    inode = mount.lookup()
    first, *others = (mount.shown.open(inode, os.O_RDONLY) for _ in range(3))
    with held(mount.files, "open", first):
        assert all(not other.send(None).done() for other in others)
    os.close(run_blocking(first).local_fd)
    mount.kernel.inodes.add(inode)

    assert [run_blocking(other).local_fd for other in others] == [None, None]
    assert len(mount.shown.session.handles.files) == 3


def test_an_open_outlives_the_last_close_of_a_local_copy(mount, local):
    inode = mount.lookup()
    reader = mount.open(inode)
    late = mount.shown.open(inode, os.O_RDONLY)
    with held(mount.files, "stat", late):
        mount.kernel.inodes.clear()
        mount.release(reader)

    opened = run_blocking(late)

    os.close(opened.local_fd)
    assert mount.read(opened) == DATA


def test_what_is_renamed_while_it_is_opened_is_written_where_it_lies_now(mount):
    opening = mount.shown.open(mount.lookup(), os.O_RDWR)
    with held(mount.files, "open", opening):
        run_blocking(mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0))

    write(mount, run_blocking(opening), b"new")

    assert [info.name for info in mount.files.listing("")] == ["g"]
    with mount.files.open("g") as file:
        assert bytes(file.reader.read(0, 3)) == b"new"


@pytest.mark.parametrize("flags", [2, 4, 1 | 4])
def test_a_rename_that_no_store_knows_changes_nothing(mount, flags):
    with pytest.raises(OSError, match="no store knows") as caught:
        run_blocking(mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", flags))

    assert caught.value.errno == errno.EINVAL
    assert [info.name for info in mount.files.listing("")] == ["f"]


def test_what_is_opened_while_it_is_renamed_is_written_where_it_lies_then(mount):
    inode = mount.lookup()
    renaming = mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0)
    mount.files.write_file("h", b"other")
    with held(mount.files.names, "rename", renaming):
        mount.files.write_file("f", DATA)  # as the open found it before
        opened = mount.open(inode, os.O_RDWR)
        mount.files.names.remove("f")
    run_blocking(renaming)

    write(mount, opened, b"new")

    assert [info.name for info in mount.files.listing("")] == ["g", "h"]


def test_what_is_opened_while_it_is_replaced_does_not_come_back(mount):
    mount.files.write_file("g", b"replaced")
    old = mount.lookup(b"g")
    mount.lookup(b"f")
    renaming = mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0)
    with held(mount.files.names, "rename", renaming):
        opened = mount.open(old, os.O_RDWR)
    run_blocking(renaming)

    write(mount, opened, b"late")

    with mount.files.open("g") as file:
        assert bytes(file.reader.read(0, len(DATA))) == DATA


def test_what_is_opened_while_it_is_removed_does_not_come_back(mount):
    inode = mount.lookup()
    removing = mount.shown.unlink(ROOT_INODE, b"f")
    mount.files.write_file("copy", DATA)
    with held(mount.files.names, "remove", removing):
        mount.files.names.rename("copy", "f")  # as the open found it before
        opened = mount.open(inode, os.O_RDWR)
        mount.files.names.remove("f")
    run_blocking(removing)

    write(mount, opened, b"late")

    assert mount.files.listing("") == []


def test_what_is_removed_while_it_is_opened_is_looked_up_again(mount):
    opening = mount.shown.open(mount.lookup(), os.O_RDONLY)
    with held(mount.files, "open", opening):
        run_blocking(mount.shown.unlink(ROOT_INODE, b"f"))

    with pytest.raises(OSError, match="or none") as caught:
        run_blocking(opening)
    assert caught.value.errno == errno.ESTALE


def test_of_two_opens_at_once_the_later_sees_the_newer_version(mount):
    inode = mount.lookup()
    first, later = (mount.shown.open(inode, os.O_RDONLY) for _ in range(2))
    with held(mount.files, "open", first):
        mount.files.write_file("f", DATA[::-1])
        assert not later.send(None).done()
    reader = run_blocking(first)

    with pytest.raises(OSError, match="another inode") as caught:
        run_blocking(later)
    assert caught.value.errno == errno.ESTALE
    assert mount.read(mount.open(mount.lookup())) == DATA[::-1]
    assert run_blocking(mount.shown.getattr(inode)).size_bytes == len(DATA)
    mount.release(reader)


def test_an_open_that_waited_begins_anew_where_the_first_was_closed_meanwhile(mount):
    inode = mount.lookup()
    first, later = (mount.shown.open(inode, os.O_RDONLY) for _ in range(2))
    with held(mount.files, "open", first):
        later.send(None)
    opened = run_blocking(first)
    with held(mount.files, "stat", later):
        mount.release(opened)
        mount.files.write_file("f", DATA[::-1])

    assert mount.read(run_blocking(later)) == DATA[::-1]


def test_a_version_is_looked_for_while_the_one_that_is_open_is_read(mount):
    inode = mount.lookup()
    reader, other = mount.open(inode), mount.shown.open(inode, os.O_RDONLY)
    run_blocking(mount.shown.read(reader.handle, 10, len(DATA)))  # what is read whole goes

    with held(mount.files, "stat", other):
        reading = mount.shown.read(reader.handle, 0, 10)
        with pytest.raises(StopIteration) as answered:
            reading.send(None)  # without a wait

    assert bytes(answered.value.value) == DATA[:10]
    run_blocking(other)


def test_a_file_renamed_just_before_its_version_is_looked_for_is_found_where_it_lies_now(
    mount, monkeypatch
):
    inode, stat, asked = mount.lookup(), mount.files.stat, []
    mount.open(inode)

    def renamed_first(path):
        asked.append(path)
        if len(asked) == 1:
            run_blocking(mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0))
            mount.files.write_file("g", DATA[::-1])
        return stat(path)

    monkeypatch.setattr(mount.files, "stat", renamed_first)

    with pytest.raises(OSError, match="another inode"):
        mount.open(inode)
    assert asked == ["f", "g"]
    assert mount.read(mount.open(mount.lookup(b"g"))) == DATA[::-1]


def test_a_size_that_an_open_finds_outdated_is_asked_for_again(mount):
    inode = mount.lookup()
    mount.files.write_file("f", DATA * 2)

    opened = mount.open(inode)

    assert mount.kernel.told_outdated == [inode]
    assert run_blocking(mount.shown.getattr(inode)).size_bytes == 2 * len(DATA)
    mount.release(opened)
    assert run_blocking(mount.shown.getattr(inode)).size_bytes == 2 * len(DATA)
    mount.release(mount.open(inode))
    assert mount.kernel.told_outdated == [inode]


def test_attributes_asked_for_before_a_write_are_not_remembered_after_it(mount):
    inode = mount.lookup()
    mount.shown.session.attributes.forget_all()
    asking = mount.shown.getattr(inode)
    with held(mount.files, "stat", asking):
        writer = mount.open(inode, os.O_RDWR | os.O_TRUNC)
        write(mount, writer, b"short")
        mount.release(writer)
    run_blocking(asking)

    assert run_blocking(mount.shown.getattr(inode)).size_bytes == 5


def test_a_listing_shows_what_was_written_since_it_was_opened(mount):
    listing = run_blocking(mount.shown.opendir(ROOT_INODE))
    writer = mount.open(mount.lookup(), os.O_RDWR | os.O_TRUNC)
    write(mount, writer, b"short")

    (line,) = mount.shown.readdir(listing.handle, 0)

    assert line.entry.size_bytes == 5
    mount.release(writer)


def test_a_release_cut_off_by_the_end_of_the_mount_loses_nothing(mount):
    writer = mount.open(mount.lookup(), os.O_RDWR | os.O_TRUNC)
    run_blocking(mount.shown.write(writer.handle, 0, b"last words"))
    releasing = mount.shown.release(writer.handle)
    with held(mount.files, "publish", releasing):
        releasing.close()

    mount.shown.close()

    assert mount.files.stat("f").size_bytes == len(b"last words")


def test_an_open_cut_off_by_the_end_of_the_mount_is_no_defect(mount):
    opening = mount.shown.open(mount.lookup(), os.O_RDWR | os.O_TRUNC)
    with held(OpenFile, "truncate", opening):
        opening.close()  # a RuntimeError if it waited once more

    assert len(mount.shown.session.handles.files) == 1


def test_a_file_made_during_an_outage_leaves_nothing_behind(mount, monkeypatch):
    def fails(*_, **__):
        raise UnavailableError("no store")

    monkeypatch.setattr(mount.files, "publish", fails)
    with pytest.raises(UnavailableError):
        run_blocking(mount.shown.mknod(ROOT_INODE, b"made", 0o100644, 0))

    assert mount.shown.session.handles.files == {}
    listing = run_blocking(mount.shown.opendir(ROOT_INODE))
    assert [line.name for line in mount.shown.readdir(listing.handle, 0)] == [b"f"]


def test_a_reader_is_told_when_a_handle_is_gone(mount, monkeypatch):
    left, handle = [], ReadAhead.handle

    def noted(machine, event):
        if isinstance(event, Closed):
            left.append(event.process)
        return handle(machine, event)

    monkeypatch.setattr(ReadAhead, "handle", noted)
    inode = mount.lookup()
    first, second = mount.open(inode), mount.open(inode)

    mount.release(first)
    assert left == [first.handle]
    mount.release(second)
    assert left == [first.handle, second.handle]


@pytest.mark.parametrize("name", ["open_published", "publish"])
def test_what_is_appended_while_another_handle_closes_goes_behind_what_was_there(mount, name):
    owner = mount.files.opener if name == "open_published" else mount.files
    inode = mount.lookup()
    first = mount.open(inode, os.O_WRONLY | os.O_APPEND)
    second = mount.open(inode, os.O_WRONLY | os.O_APPEND)
    run_blocking(mount.shown.write(first.handle, 0, b"1" * 5000))
    closing, size = mount.shown.flush(second.handle), len(DATA) + 5000
    with held(owner, name, closing):
        appending = mount.shown.write(first.handle, 0, b"2" * 3000)
        appended = appending.send(None)
        asked = run_blocking(mount.shown.getattr(inode))

    run_blocking(closing)
    appended.result(60)
    assert run_blocking(appending) == 3000
    run_blocking(mount.shown.flush(first.handle))

    assert asked.size_bytes == size
    with mount.files.open("f") as file:
        assert bytes(file.reader.read(0, 1 << 20)) == DATA + b"1" * 5000 + b"2" * 3000


def test_attributes_that_are_set_while_the_last_handle_is_let_go_are_kept(mount, monkeypatch):
    inode = mount.lookup()
    opened = mount.open(inode)
    body = mount.shown.session.handles.files[opened.handle].body
    note = body.set_attributes

    def after_the_release(changes):
        run_blocking(mount.shown.release(opened.handle))
        note(changes)

    body.set_attributes = after_the_release
    monkeypatch.setattr(attributes, "_set_now", lambda *_: False)  # its content is in use
    change = Change(mode=0o600, mtime_ns=10**9)

    entry = run_blocking(mount.shown.setattr(inode, change, None))

    assert (entry.mode & 0o777, entry.mtime_ns) == (0o600, 10**9)
    info = mount.files.stat("f")
    assert (info.mode, info.mtime_ns) == (0o600, 10**9)
    assert not mount.shown.session.handles.files


def set_to_be_private(mount, inode):
    return mount.shown.setattr(inode, Change(mode=0o600), None)


def assert_written_and_private(mount, opened):
    write(mount, opened, b"new")
    mount.release(opened)

    assert mount.files.stat("f").mode == 0o600
    with mount.files.open("f") as file:
        assert bytes(file.reader.read(0, 3)) == b"new"


def test_attributes_wait_for_an_open_that_has_asked_what_the_file_is(mount):
    inode = mount.lookup()
    opening, setting = mount.shown.open(inode, os.O_RDWR), set_to_be_private(mount, inode)
    with held(mount.files, "open", opening):
        assert not setting.send(None).done()
        assert mount.files.stat("f").mode == 0o644
    opened = run_blocking(opening)
    run_blocking(setting)

    assert_written_and_private(mount, opened)


def test_an_open_waits_for_attributes_that_are_being_set(mount):
    inode = mount.lookup()
    setting, opening = set_to_be_private(mount, inode), mount.shown.open(inode, os.O_RDWR)
    with held(attributes, "set_attributes", setting):
        assert not opening.send(None).done()
        assert not mount.shown.session.handles.files
    run_blocking(setting)

    assert_written_and_private(mount, run_blocking(opening))


def test_what_was_renamed_over_is_looked_up_again_where_it_is_opened_by_its_name(mount):
    inode = mount.lookup()
    mount.files.write_file("g", b"newer")
    mount.lookup(b"g")
    run_blocking(mount.shown.rename(ROOT_INODE, b"g", ROOT_INODE, b"f", 0))

    with pytest.raises(OSError, match="or none") as caught:
        mount.open(inode)

    assert caught.value.errno == errno.ESTALE
    assert mount.read(mount.open(mount.lookup())) == b"newer"


def test_what_another_mount_removed_is_looked_up_again_and_found_to_be_gone(mount):
    inode = mount.lookup()
    mount.files.names.remove("f")

    with pytest.raises(OSError, match="or none") as caught:
        mount.open(inode)

    assert caught.value.errno == errno.ESTALE
    with pytest.raises(FileNotFoundError):
        mount.lookup()  # at once, though what was found a moment ago is believed for a second


def test_attributes_of_a_name_that_leads_elsewhere_are_looked_up_again(mount):
    inode = mount.lookup()
    run_blocking(mount.shown.unlink(ROOT_INODE, b"f"))

    for asked in (set_to_be_private(mount, inode), mount.shown.setxattr(inode, b"user.a", b"1")):
        with pytest.raises(OSError, match=r"or none|not open") as caught:
            run_blocking(asked)
        assert caught.value.errno == errno.ESTALE


def listed_for_s(mount, listing):
    """Return for how long the kernel may believe what a listing tells of each name."""
    lines = list(mount.shown.readdir(listing.handle, 0))
    run_blocking(mount.shown.releasedir(listing.handle))
    return {line.name: line.entry.attr_timeout_s for line in lines}


def test_what_changed_since_a_listing_was_asked_for_is_not_believed_from_it(mount):
    mount.files.write_file("g", DATA)
    mount.lookup(b"g")
    inode = mount.lookup()

    def changed_by(change):
        listing = run_blocking(mount.shown.opendir(ROOT_INODE))
        change()
        return listed_for_s(mount, listing)

    def written():
        writer = mount.open(inode, os.O_RDWR)
        write(mount, writer, b"short")
        mount.release(writer)

    for change in (written, lambda: run_blocking(set_to_be_private(mount, inode))):
        assert changed_by(change) == {b"f": 0, b"g": 1}
    assert changed_by(lambda: None) == {b"f": 1, b"g": 1}


def test_what_changes_while_a_listing_is_asked_for_is_not_believed_from_it(mount):
    inode = mount.lookup()
    listing = mount.shown.opendir(ROOT_INODE)
    with held(mount.files, "listing", listing):
        writer = mount.open(inode, os.O_RDWR | os.O_TRUNC)
        write(mount, writer, b"short")
        mount.release(writer)

    assert listed_for_s(mount, run_blocking(listing)) == {b"f": 0}
    assert mount.shown.session.handles.listings == {}


def created(mount, name, flags=os.O_EXCL):
    return run_blocking(mount.shown.create(ROOT_INODE, name, 0o644, flags))[0]


def test_a_file_that_was_made_while_it_was_looked_up_in_vain_is_there_for_who_wants_it_new(mount):
    with pytest.raises(FileNotFoundError):
        mount.lookup(b"new")
    late = mount.shown.lookup(ROOT_INODE, b"new")
    with held(mount.files, "stat", late):
        opened = created(mount, b"new")
    with pytest.raises(FileNotFoundError):
        run_blocking(late)

    with pytest.raises(FileExistsError):
        created(mount, b"new")
    mount.release(opened)


@pytest.mark.parametrize("make", ["mkdir", "symlink", "rename"])
def test_what_was_made_since_a_look_up_found_nothing_is_there_for_who_wants_it_new(mount, make):
    with pytest.raises(FileNotFoundError):
        mount.lookup(b"new")
    made = {
        "mkdir": lambda: mount.shown.mkdir(ROOT_INODE, b"new", 0o755),
        "symlink": lambda: mount.shown.symlink(ROOT_INODE, b"new", b"f"),
        "rename": lambda: mount.shown.rename(ROOT_INODE, b"f", ROOT_INODE, b"new", 0),
    }[make]
    run_blocking(made())

    with pytest.raises(FileExistsError):
        created(mount, b"new")


def test_of_two_who_looked_a_file_up_in_vain_one_makes_it(mount):
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            mount.lookup(b"new")
    opened = created(mount, b"new")

    with pytest.raises(FileExistsError):
        created(mount, b"new")
    mount.release(opened)


def test_a_small_file_is_made_by_one_look_and_one_publication():
    store = RetryingStore(MemoryStore())
    mount = Mount(store)
    with pytest.raises(FileNotFoundError):
        mount.lookup(b"warm")
    run_blocking(mount.shown.getattr(ROOT_INODE))
    before = store.counts()[0]

    with pytest.raises(FileNotFoundError):
        mount.lookup(b"new")
    opened = created(mount, b"new")
    run_blocking(mount.shown.write(opened.handle, 0, b"small"))
    inode = next(iter(mount.shown.session.handles.files.values())).node.number
    run_blocking(mount.shown.setattr(inode, Change(mtime_ns=10**9), opened.handle))
    run_blocking(mount.shown.flush(opened.handle))
    mount.release(opened)

    after = store.counts()[0]
    asked = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: count for name, count in asked.items() if count} == {"stat": 1, "publish": 1}
    mount.close()


def test_a_file_made_while_the_time_of_its_directory_cannot_be_moved_is_made(mount, monkeypatch):
    """Else its handle would be known to nobody, and an empty file appear as the mount ends."""

    def fails(_):
        raise UnavailableError("no store")

    set_attributes(mount.files, "", Attributes(mtime_ns=10**18))
    mount.shown.session.attributes.forget_all()
    monkeypatch.setattr(mount.files.directories, "names_changed", fails)

    opened, entry = run_blocking(mount.shown.create(ROOT_INODE, b"made", 0o644, os.O_WRONLY))

    assert mount.shown.session.inodes.node(entry.inode).opens == 1
    mount.release(opened)
