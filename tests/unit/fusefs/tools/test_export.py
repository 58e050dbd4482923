"""Striped files copied to plain ones: whole or not at all, never over what is there."""

import json
import os

import pytest
import xxhash
from click.testing import CliRunner

from fusefs.cli import command
from fusefs.format.attributes import Attributes
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.tools.export import Copy, copies_of, export_file, parted, place_on_mount, require_free
from omniload.base.errors import IntegrityError, StateError, UnavailableError
from tests.support.fusefs.builders import contents, object_paths, some_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage

BIG = bytes(range(256)) * 100


@pytest.fixture
def files():
    with some_files() as built:
        built.write_file("d/big", BIG)
        built.write_file("d/e/small", b"small")
        built.write_file("d/empty", b"")
        yield built


def plain(store, path):
    return store.read(path, 0, store.stat(path).size_bytes)


def names(store, path=""):
    return sorted(entry.name for entry in store.listing(path))


@pytest.mark.parametrize("name", ["d/big", "d/e/small", "d/empty"])
def test_a_copy_holds_the_bytes_of_the_file_and_nothing_else_is_left(files, name):
    store, told = MemoryStore(), []

    exported = export_file(files, name, store, "out", told.append)

    data = contents(files, name)
    assert plain(store, "out") == data
    assert exported.size_bytes == len(data) == sum(told)
    assert exported.xxh3 == xxhash.xxh3_128_hexdigest(data)
    assert names(store) == ["out"]


def test_a_file_of_many_windows_is_copied_in_order(files, monkeypatch):
    monkeypatch.setattr("fusefs.tools.export._WINDOW_BYTES", 1000)
    store, told = MemoryStore(), []

    export_file(files, "d/big", store, "deep/out", told.append)

    assert plain(store, "deep/out") == BIG
    assert told == [1000] * 25 + [600]


def test_an_inline_file_with_attributes_is_copied_as_its_bytes(files):
    files.write_file("f", b"inline", Attributes(mode=0o600))
    store = MemoryStore()

    export_file(files, "f", store, "f", lambda _: None)

    assert plain(store, "f") == b"inline"


def test_what_was_at_the_target_is_replaced_by_the_whole_copy(files):
    store = MemoryStore()
    store.publish("out", b"old")

    export_file(files, "d/big", store, "out", lambda _: None)

    assert plain(store, "out") == BIG


def test_a_damaged_object_ends_the_copy_and_leaves_the_old_target(files):
    victim = object_paths(files.store)[1]
    data = bytearray(plain(files.store, victim))
    data[5] ^= 1
    files.store.remove(victim)
    writer = files.store.create(victim)
    writer.write(data)
    writer.close()
    store = MemoryStore()
    store.publish("out", b"old")

    with pytest.raises(IntegrityError, match=victim):
        export_file(files, "d/big", store, "out", lambda _: None)

    assert plain(store, "out") == b"old"
    assert names(store) == ["out"]


@pytest.mark.parametrize("call", ["stat", "rename"])
def test_a_target_store_that_fails_leaves_no_target(files, call):
    inner = MemoryStore()
    store = FaultyStore(inner, {(call, 1): Outage})

    with pytest.raises(UnavailableError):
        export_file(files, "d/big", store, "out", lambda _: None)

    store.assert_all_faults_fired()
    assert names(inner) == []


def test_a_store_that_keeps_other_than_was_written_is_found_out(files):
    class Forgetful(MemoryStore):
        def stat(self, path):
            self.publish(path, b"half")
            return super().stat(path)

    with pytest.raises(IntegrityError, match="kept 4 of the 25600 bytes"):
        export_file(files, "d/big", Forgetful(), "out", lambda _: None)


def test_a_directory_is_all_files_below_it_and_no_links(files):
    files.names.make_link("d/link", "big")

    assert sorted(copies_of(files, "d", "t"), key=lambda copy: copy.source) == [
        Copy(source="d/big", target="t/big", size_bytes=len(BIG)),
        Copy(source="d/e/small", target="t/e/small", size_bytes=5),
        Copy(source="d/empty", target="t/empty", size_bytes=0),
    ]


def test_a_link_that_is_named_itself_is_refused_with_what_it_points_to(files):
    files.names.make_link("link", "d/big")

    with pytest.raises(StateError, match="'link' is a link to 'd/big'; export that"):
        list(copies_of(files, "link", "t"))


def test_targets_that_are_there_are_refused_before_anything_is_copied(files):
    store = MemoryStore()
    store.publish("t/big", b"mine")
    copies = list(copies_of(files, "d", "t"))

    with pytest.raises(StateError, match=r"'t/big' already, and 0 more of the 3.*--force"):
        require_free(store, copies)

    require_free(MemoryStore(), copies)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("model.bin", (".", "model.bin")),
        ("/model.bin", ("/", "model.bin")),
        ("/usr/out/", ("/usr", "out")),
        ("/none-of-ours/a/out", ("/", "none-of-ours/a/out")),
        ("none-of-ours/a/out", (".", "none-of-ours/a/out")),
        ("hdfs://nn:9000/a/b", ("hdfs://nn:9000/a", "b")),
        ("s3://bucket/key", ("s3://bucket", "key")),
    ],
)
def test_a_target_is_a_store_and_a_name_in_it(target, parts):
    assert parted(target) == parts


def test_folders_that_are_not_there_are_made_with_the_copy(tmp_path):
    target = f"{tmp_path}/new/deep/model.bin"
    with some_files() as files:
        files.write_file("f", BIG)
        folder, name = parted(target)

        export_file(files, "f", LocalStore(folder), name, lambda _: None)

    assert (folder, name) == (str(tmp_path), "new/deep/model.bin")
    assert (tmp_path / "new/deep/model.bin").read_bytes() == BIG
    assert [path.name for path in (tmp_path / "new/deep").iterdir()] == ["model.bin"]


def test_a_file_where_a_folder_has_to_be_is_named(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(StateError, match=r"leads through '.*file', which is no folder"):
        parted(f"{tmp_path}/file/deep/model.bin")


@pytest.mark.parametrize("target", ["/", "", "hdfs://nn:9000", "s3://bucket/"])
def test_a_target_without_a_name_is_refused(target):
    with pytest.raises(StateError, match="ends with no name"):
        parted(target)


def test_the_store_behind_a_mount_is_read_from_the_mount(tmp_path):
    (tmp_path / ".omnifs").mkdir()
    (tmp_path / ".omnifs/stats.json").write_text('{"store": "hdfs://nn/jobs"}')

    assert place_on_mount(tmp_path / "a/b") == ("hdfs://nn/jobs", "a/b")
    assert place_on_mount(tmp_path) == ("hdfs://nn/jobs", "")
    with pytest.raises(StateError, match="on no mount of ours; give --store"):
        place_on_mount(tmp_path.parent / "elsewhere")


def test_a_pipe_in_the_place_of_a_mounts_numbers_is_not_waited_for(tmp_path):
    (tmp_path / ".omnifs").mkdir()
    os.mkfifo(tmp_path / ".omnifs/stats.json")

    with pytest.raises(StateError, match="on no mount of ours"):
        place_on_mount(tmp_path / "a")


def run(*arguments):
    return CliRunner().invoke(command, ["export", *map(str, arguments)])


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    with some_files(LocalStore(tmp_path / "store")) as files:
        files.write_file("d/big", BIG)
        files.write_file("d/e/small", b"small")
    return tmp_path / "store"


def test_the_command_copies_a_file_and_says_what_it_holds(store, tmp_path):
    done = run("d/big", tmp_path / "big", "--store", store)

    assert done.exit_code == 0
    assert xxhash.xxh3_128_hexdigest(BIG) in done.output
    assert (tmp_path / "big").read_bytes() == BIG


def test_the_command_copies_a_directory_and_prints_json(store, tmp_path):
    done = run("d", tmp_path / "out", "--store", store, "--json")

    assert [json.loads(line)["target"] for line in done.output.splitlines()] == [
        "out/big",
        "out/e/small",
    ]
    assert (tmp_path / "out/big").read_bytes() == BIG
    assert (tmp_path / "out/e/small").read_bytes() == b"small"


def test_the_command_overwrites_by_force_only(store, tmp_path):
    (tmp_path / "big").write_bytes(b"mine")

    refused = run("d/big", tmp_path / "big", "--store", store)
    assert isinstance(refused.exception, StateError)
    assert (tmp_path / "big").read_bytes() == b"mine"

    assert run("d/big", tmp_path / "big", "--store", store, "--force").exit_code == 0
    assert (tmp_path / "big").read_bytes() == BIG


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_the_command_replaces_nothing_but_files(store, tmp_path, make):
    make(tmp_path / "place")
    before = (tmp_path / "place").lstat()

    done = run("d/big", tmp_path / "place", "--store", store, "--force")

    assert isinstance(done.exception, StateError)
    assert (tmp_path / "place").lstat() == before


@pytest.mark.parametrize("name", ["n" * 300, "a//b", "none/../b"])
def test_a_target_that_no_store_takes_is_a_fault_of_its_own(store, tmp_path, name):
    done = run("d/big", f"{tmp_path}/new/{name}", "--store", store, "--force")

    assert isinstance(done.exception, StateError)
    assert "target" in str(done.exception)


def test_a_file_that_is_not_there_is_named(store, tmp_path):
    done = run("d/none", tmp_path / "x", "--store", store)

    assert isinstance(done.exception, StateError)
    assert "'d/none' is not in" in str(done.exception)
