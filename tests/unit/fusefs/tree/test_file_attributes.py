"""Attributes of what is at a path: whatever keeps them, they are set and read alike."""

import errno

import pytest

from fusefs.format.attributes import Attributes
from fusefs.tree import file_attributes
from fusefs.tree.file_attributes import set_attributes, xattrs_at
from tests.support.fusefs.builders import contents, some_files

DATA = bytes(range(250)) * 100
KEPT = Attributes(mode=0o600, mtime_ns=10**9, xattrs={"user.a": b"1"})


@pytest.fixture
def files():
    with some_files() as built:
        built.names.make_directory("d")
        built.write_file("plain", b"a few bytes")
        built.write_file("striped", DATA)
        yield built


@pytest.mark.parametrize("path", ["d", "plain", "striped"])
def test_what_is_set_shows_and_what_is_not_given_stays(files, path):
    assert xattrs_at(files, path) == {}

    set_attributes(files, path, KEPT)
    set_attributes(files, path, Attributes(mode=0o640))

    info = files.stat(path)
    assert (info.mode, info.mtime_ns, xattrs_at(files, path)) == (0o640, 10**9, {"user.a": b"1"})


@pytest.mark.parametrize(("path", "data"), [("plain", b"a few bytes"), ("striped", DATA)])
def test_a_file_keeps_its_bytes(files, path, data):
    set_attributes(files, path, KEPT)

    assert contents(files, path) == data


def test_a_plain_file_larger_than_the_limit_becomes_a_striped_one(files):
    files.store.publish("large", DATA)

    set_attributes(files, "large", KEPT)

    assert contents(files, "large") == DATA
    assert len(files.manifest("large").segments) == 1


def test_a_file_that_others_replace_over_and_over_is_busy(files, monkeypatch):
    monkeypatch.setattr(file_attributes, "MOST_VERSIONS", 3)
    replace = files.publisher.replace
    tries = []

    def replaced_first(path, *arguments, **named):
        tries.append(path)
        files.store.publish(path, b"version %d" % len(tries))
        return replace(path, *arguments, **named)

    monkeypatch.setattr(files.publisher, "replace", replaced_first)
    with pytest.raises(OSError, match="replaced 3 times") as caught:
        set_attributes(files, "plain", KEPT)

    assert caught.value.errno == errno.EBUSY
    assert tries == ["plain"] * 3
    assert contents(files, "plain") == b"version 3"


def test_what_belongs_to_the_store_has_no_attributes_to_set(files):
    for change in (lambda path: set_attributes(files, path, KEPT), lambda p: xattrs_at(files, p)):
        with pytest.raises(PermissionError):
            change(".omnifs/objects")
