"""Where the bytes of an open file are: which class holds them, and what each says of itself."""

import errno

import pytest

from fusefs.vfs.file.file_content import FileContent
from fusefs.vfs.file.states import ContentState
from fusefs.write.spool import SpoolPlace
from tests.support.fusefs.builders import object_paths, some_files

DATA = bytes(range(250)) * 100
UNIT = 4096


@pytest.fixture
def files():
    with some_files() as built:
        built.write_file("f", DATA)
        yield built


@pytest.fixture
def content(files):
    made = FileContent(files, SpoolPlace(), files.open("f"))
    yield made
    made.close()


@pytest.fixture
def new(files):
    made = FileContent(files, SpoolPlace(), None)
    yield made
    made.close()


def test_a_version_is_clean_and_needed(content):
    held = content.bytes

    assert (held.state, held.size_bytes, held.version) == (
        ContentState.CLEAN,
        len(DATA),
        content.opened,
    )
    assert held.needs_version
    assert not held.writes_now("f", len(DATA), 1)


def test_a_new_file_takes_the_first_bytes_of_a_unit_at_once(new):
    assert (new.bytes.size_bytes, new.bytes.is_small, new.bytes.version) == (0, True, None)
    assert new.bytes.writes_now("f", 0, UNIT - 1)
    assert not new.bytes.writes_now("f", 0, UNIT)
    assert not new.bytes.writes_now("f", 1, 1)


def test_what_is_appended_needs_no_version_and_goes_on_at_its_end(content):
    content.sequential("f").write(b"more")
    held = content.bytes

    assert (held.state, held.size_bytes, held.version) == (
        ContentState.SEQUENTIAL,
        len(DATA) + 4,
        None,
    )
    assert not held.needs_version
    assert held.try_read(0, 10, 0) is None
    assert held.writes_now("f", len(DATA) + 4, 1)
    assert not held.writes_now("f", 0, 1)


def test_a_spool_needs_the_version_until_all_of_it_is_there(content):
    spool = content.spooled("f")
    assert (content.bytes.state, content.bytes.size_bytes) == (ContentState.SPOOLED, len(DATA))
    assert content.bytes.needs_version
    assert not content.bytes.is_small

    spool.hold_all()

    assert not content.bytes.needs_version
    assert content.bytes.try_read(0, 5, 0) == DATA[:5]


def test_what_was_appended_is_durable_before_a_spool_lies_over_it(files, new):
    new.sequential("g").write(DATA)
    before = object_paths(files.store)

    spool = new.spooled("g")

    assert spool.read(0, len(DATA)) == DATA
    assert len(object_paths(files.store)) > len(before)
    assert new.bytes.take_loose()
    assert new.bytes.take_loose() == b""


def test_a_file_that_is_emptied_begins_anew_whatever_it_held(content):
    for begin in (lambda: None, lambda: content.sequential("f"), lambda: content.spooled("f")):
        begin()

        content.emptied("f")

        assert (content.bytes.state, content.bytes.size_bytes) == (ContentState.SEQUENTIAL, 0)


def test_another_version_is_what_is_read_from_then_on(files, content):
    files.write_file("f", DATA[::-1])

    content.hold(files.open("f"))

    assert content.bytes.version is content.opened
    content.bytes.version.reader.read(0, len(DATA))
    assert content.bytes.try_read(0, 5, 0) == DATA[::-1][:5]


def test_content_that_builds_on_what_another_mount_replaced_is_not_published(files, content):
    content.sequential("f").write(b"more")
    sealed = content.bytes.seal("f", content.manifest, last=True)
    with some_files(files.store) as elsewhere:
        elsewhere.write_file("f", b"theirs")

    with pytest.raises(OSError, match="another mount replaced") as caught:
        content.settle("f", sealed)

    assert caught.value.errno == errno.ESTALE
