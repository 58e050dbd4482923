"""Who may read a file's bytes in a local store itself: whom its mode lets, on a mount as there."""

import os
import stat

import pytest

from fusefs.format.attributes import Attributes
from fusefs.stores.local.store import LocalStore
from fusefs.tree.file_attributes import set_attributes
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace
from tests.support.fusefs.builders import contents, tiny_files

BIG = bytes(range(256)) * 64


@pytest.fixture
def root(tmp_path):
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def modes_below(root):
    """Return the modes of all files of a store."""
    return {stat.S_IMODE(p.stat().st_mode) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("data", [b"small", BIG], ids=["plain", "striped"])
def test_what_has_the_mode_of_any_file_is_readable_as_any_file(root, data):
    with tiny_files(LocalStore(root)) as files:
        files.write_file("f", data)

    assert modes_below(root) == {0o644}


@pytest.mark.parametrize("data", [b"small", BIG], ids=["plain", "striped"])
def test_chmod_takes_the_bytes_from_other_users_of_the_store_and_gives_them_back(root, data):
    with tiny_files(LocalStore(root)) as files:
        files.write_file("f", data)

        set_attributes(files, "f", Attributes(mode=0o600))
        assert modes_below(root) == {0o600}
        set_attributes(files, "f", Attributes(mtime_ns=10**9))
        assert modes_below(root) == {0o600}
        set_attributes(files, "f", Attributes(mode=0o754))
        assert modes_below(root) == {0o644}
        assert (contents(files, "f"), files.stat("f").mode) == (data, 0o754)


@pytest.mark.parametrize("data", [b"small", BIG], ids=["plain", "striped"])
def test_a_file_that_is_made_private_never_lies_open(root, data, monkeypatch):
    seen = set()

    def looked_at(call):
        def made(*arguments, **named):
            seen.update(modes_below(root))
            return call(*arguments, **named)

        return made

    # Before its mode is set, its bytes are there; before it is renamed, its mode is.
    monkeypatch.setattr(os, "fchmod", looked_at(os.fchmod))
    monkeypatch.setattr(os, "rename", looked_at(os.rename))
    with tiny_files(LocalStore(root)) as files:
        body = OpenFile(files, SpoolPlace(), "f", None)
        body.set_attributes(Attributes(mode=0o600))
        body.write(0, data)
        body.flush(last=False)
        body.write(7, b"in the middle")
        body.flush()
        body.close()

    assert seen | modes_below(root) == {0o600}


def test_objects_are_private_until_their_file_shows(root):
    with tiny_files(LocalStore(root)) as files:
        writer = files.writers.file("f")
        writer.write(BIG)
        content = writer.finish()

        assert modes_below(root) == {0o600}
        files.publish("f", content)
        assert modes_below(root) == {0o644}


def test_what_is_appended_to_a_private_file_is_private(root):
    with tiny_files(LocalStore(root)) as files:
        files.write_file("f", BIG, Attributes(mode=0o640))
        body = OpenFile(files, SpoolPlace(), "f", files.open("f"))
        body.write(None, BIG)
        body.flush()
        body.close()

        assert contents(files, "f") == BIG + BIG
    assert modes_below(root) == {0o640}


def test_nobody_else_may_write_what_the_store_holds(root):
    with tiny_files(LocalStore(root)) as files:
        files.write_file("f", BIG, Attributes(mode=0o666))
        files.names.make_directory("d", 0o777)

        assert files.stat("f").mode == 0o666
    assert modes_below(root) == {0o644}
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o755


def test_a_directory_has_its_mode_in_the_store_and_needs_no_attributes_for_it(root):
    with tiny_files(LocalStore(root)) as files:
        files.names.make_directory("d", 0o700)

        assert stat.S_IMODE((root / "d").stat().st_mode) == 0o700
        assert files.stat("d").mode == 0o700
        assert list((root / "d").iterdir()) == []
        set_attributes(files, "d", Attributes(mode=0o2775))
        assert stat.S_IMODE((root / "d").stat().st_mode) == 0o755
        assert files.stat("d").mode == 0o2775
        set_attributes(files, "", Attributes(mode=0o777))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700, "of who made the store"


def folders_of(root):
    """Return the modes of the folders of fusefs itself."""
    below = [root / ".omnifs", *(root / ".omnifs").rglob("*")]
    names = {p: "/".join(p.relative_to(root).parts[:2]) for p in below if p.is_dir()}
    return {(name, stat.S_IMODE(path.stat().st_mode)) for path, name in names.items()}


@pytest.mark.parametrize(
    ("mask", "hidden", "listed"), [(0o022, 0o711, 0o755), (0o002, 0o771, 0o775), (0, 0o771, 0o775)]
)
def test_nobody_else_lists_where_objects_lie_or_writes_there(root, mask, hidden, listed):
    os.umask(mask)
    with tiny_files(LocalStore(root)) as files:
        files.names.make_directory("private", 0o700)
        files.write_file("private/f", BIG)
        set_attributes(files, "private", Attributes(xattrs={"user.a": b"b"}))

    assert folders_of(root) == {
        (".omnifs", listed),
        (".omnifs/objects", hidden),
        (".omnifs/new", hidden),
        (".omnifs/directories", listed),
    }


def test_objects_of_older_releases_are_hidden_by_the_first_that_is_written(root):
    with tiny_files(LocalStore(root)) as files:
        files.write_file("f", BIG)
    for folder in (".omnifs/objects", ".omnifs/new"):
        for path in (root / folder, *(root / folder).iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o600)

    with tiny_files(LocalStore(root)) as files:
        files.write_file("other", BIG)
        assert contents(files, "f") == BIG

    assert {mode for _, mode in folders_of(root)} == {0o755, 0o711}
    assert (".omnifs/objects", 0o755) not in folders_of(root)
