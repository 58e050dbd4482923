"""The kept index of a source."""

import errno
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from omniload.base.errors import ConfigError
from omniload.source import index
from omniload.source.access.index_folders import index_folder
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.kept_findings import keep_findings
from omniload.source.patterns import find_files


class Builder:
    """Gives every file one unit per byte, and records its calls."""

    def __init__(self):
        self.built = []

    def __call__(self, file):
        self.built.append(file.path.rpartition("/")[2])
        n = np.arange(file.size_bytes)
        return FileUnits(rows=n + 1, starts=n, stops=n + 1, content=str(file.size_bytes))


@pytest.fixture
def folder(tmp_path):
    for name, size in {"a": 2, "b": 0, "c": 3}.items():
        (tmp_path / f"{name}.x").write_bytes(bytes(size))
    return tmp_path


@pytest.fixture
def indexed(folder):
    def index(kind="k", cache=True):
        builder = Builder()
        files = find_files(["*.x"], folder, source="web")
        where = IndexCache(folder=folder / "cache", source="web") if cache else None
        return index_of(files, builder, kind=kind, cache=where), sorted(builder.built)

    return index


def test_units_of_all_files_follow_each_other(indexed):
    table, _ = indexed(cache=False)

    assert table.rows_U.tolist() == [1, 2, 1, 2, 3]
    assert table.shards_U.tolist() == [0, 0, 2, 2, 2]
    assert table.starts_U.tolist() == [0, 1, 0, 1, 2]
    assert table.stops_U.tolist() == [1, 2, 1, 2, 3]
    assert len(table) == 5


def test_one_file_is_looked_at_without_another_thread(folder):
    looked = set()

    def builds(file):
        looked.add(threading.get_ident())
        return Builder()(file)

    table = index_of(find_files(["a.x"], folder, source="web"), builds, kind="k", cache=None)

    assert table.rows_U.tolist() == [1, 2]
    assert looked == {threading.get_ident()}


def test_a_count_that_no_file_holds_is_refused_before_memory_is_taken_for_it(folder):
    def claims(file):
        return FileUnits(
            rows=np.array([3, 2**62]), starts=np.array([0, 1]), stops=np.array([1, 2]), content="x"
        )

    with pytest.raises(
        ConfigError, match=r"a\.x: unit 1 claims 4,611,.* at most 134,217,728; write"
    ):
        index_of(find_files(["a.x"], folder, source="web"), claims, kind="k", cache=None)


def test_without_a_cache_nothing_is_kept(indexed, folder):
    assert indexed(cache=False)[1] == indexed(cache=False)[1] == ["a.x", "b.x", "c.x"]
    assert not (folder / "cache").exists()


def test_what_is_kept_is_not_built_again(indexed):
    first, built = indexed()
    second, again = indexed()

    assert (built, again) == (["a.x", "b.x", "c.x"], [])
    assert np.array_equal(first.rows_U, second.rows_U)
    assert np.array_equal(first.shards_U, second.shards_U)


def test_only_files_that_changed_or_came_are_built(indexed, folder):
    indexed()
    (folder / "a.x").write_bytes(bytes(7))
    (folder / "d.x").write_bytes(bytes(1))

    table, built = indexed()

    assert built == ["a.x", "d.x"]
    assert table.shards_U.tolist() == [0] * 7 + [2] * 3 + [3]
    assert indexed()[1] == []


def test_units_cut_in_another_way_are_kept_apart(indexed):
    indexed("k")

    assert indexed("other")[1] == ["a.x", "b.x", "c.x"]
    assert indexed("k")[1] == indexed("other")[1] == []


@pytest.mark.parametrize("damage", [b"", b"not a zip", b"ARROW1\0\0 cut short"])
def test_a_damaged_index_is_built_anew(indexed, folder, damage, caplog):
    indexed()
    (kept,) = (folder / "cache").iterdir()
    kept.write_bytes(damage)

    with caplog.at_level(logging.WARNING):
        table, built = indexed()

    assert built == ["a.x", "b.x", "c.x"]
    assert len(table) == 5
    assert indexed()[1] == []


def stored_in(path):
    with pa.ipc.open_file(path.read_bytes()) as stored:
        return stored.read_all()


def store(path, table):
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)


def test_an_index_of_another_version_is_built_anew(indexed, folder):
    indexed()
    (kept,) = (folder / "cache").iterdir()
    store(kept, stored_in(kept).replace_schema_metadata({"omniload.index": "99"}))

    assert indexed()[1] == ["a.x", "b.x", "c.x"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("rows", [[-1, 2], [], [1, 2, 3]]),
        ("rows", [[1, 2], [3], [1, 2]]),
        ("rows", [[1, 2], None, [1, 2, 3]]),
        ("starts", [[-1, 1], [], [0, 1, 2]]),
        ("starts", [[99, 1], [], [0, 1, 2]]),
        ("stops", [[-9, 2], [], [1, 2, 3]]),
        ("stops", [[1], [2], [1, 2, 3]]),
        ("content", ["2", None, "3"]),
    ],
)
def test_an_index_of_values_that_no_file_has_is_built_anew(indexed, folder, column, value, caplog):
    indexed()
    (kept,) = (folder / "cache").iterdir()
    table = stored_in(kept)
    place = table.schema.get_field_index(column)
    store(kept, table.set_column(place, column, pa.array(value, table.schema.field(place).type)))

    table, built = indexed()

    assert "building it anew" in caplog.text
    assert built == ["a.x", "b.x", "c.x"]
    assert len(table) == 5


def test_an_index_whose_offsets_lead_elsewhere_is_built_anew(indexed, folder, caplog):
    indexed()
    (kept,) = (folder / "cache").iterdir()
    offsets = np.array([0, 2, 2, 5], np.int32).tobytes()
    data = kept.read_bytes()
    assert data.count(offsets) >= 3
    kept.write_bytes(data.replace(offsets, np.array([0, 2, 2, 1 << 30], np.int32).tobytes()))

    assert indexed()[1] == ["a.x", "b.x", "c.x"]
    assert "building it anew" in caplog.text


def test_a_file_whose_name_is_no_text_is_kept_too(folder, indexed):
    (folder / os.fsdecode(b"\xff.x")).write_bytes(b"y")
    indexed()

    assert indexed()[1] == []


def test_a_file_that_was_replaced_is_built_again_whatever_time_it_is_given(indexed, folder):
    indexed()
    times = (folder / "a.x").stat()
    (folder / "new").write_bytes(b"yz")
    os.utime(folder / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "new").replace(folder / "a.x")

    assert indexed()[1] == ["a.x"]


def test_a_file_that_was_written_in_place_is_built_again_whatever_time_it_is_given(indexed, folder):
    indexed()
    times = (folder / "c.x").stat()
    (folder / "c.x").write_bytes(b"xyz")
    os.utime(folder / "c.x", ns=(times.st_atime_ns, times.st_mtime_ns))

    assert indexed()[1] == ["c.x"]


def test_files_tell_what_they_hold(indexed):
    assert indexed()[0].contents_F == indexed()[0].contents_F == ("2", "", "3")


def test_beside_a_folder_that_a_user_names_nobody_elses_index_is_read(folder):
    built = []
    for name in ("one", "two"):
        builder, kept = Builder(), IndexCache(folder=folder / "shared" / name, source="web")
        index_of(find_files(["*.x"], folder, source="web"), builder, kind="k", cache=kept)
        built.append(len(builder.built))

    assert built == [3, 3]


def test_a_folder_that_cannot_be_written_costs_only_time(indexed, folder):
    (folder / "cache").write_text("a file in the way")

    assert len(indexed()[0]) == 5
    assert indexed()[1] == ["a.x", "b.x", "c.x"]


def test_a_full_disk_is_told_once_for_all_sources_with_what_to_do(folder, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(index.pa.ipc, "new_file", full)
    for source in ("web", "code", "web"):
        kept = IndexCache(folder=folder / "cache", source=source)
        index_of(find_files(["*.x"], folder, source=source), Builder(), kind="k", cache=kept)
    monkeypatch.setattr(index, "write_whole", full)
    keep_findings(folder / "cache", {})

    (told,) = caplog.messages
    assert told.startswith(
        f"{folder / 'cache'}: nothing can be saved there (No space left on device, "
    )
    assert "are free there), " in told
    assert "--cache-dir" in told
    assert list((folder / "cache").iterdir()) == []


def test_nothing_unfinished_stays_behind(indexed, folder):
    indexed()

    assert [path.suffix for path in (folder / "cache").iterdir()] == [".arrow"]


def test_a_fault_of_one_file_is_raised(folder):
    def build(file):
        raise ConfigError(f"{file.path}: wrong")

    with pytest.raises(ConfigError, match=r"a\.x: wrong"):
        index_of(find_files(["*.x"], folder, source="web"), build, kind="k", cache=None)


def test_what_was_found_beside_a_damaged_file_is_kept(folder):
    kept = IndexCache(folder=folder / "cache", source="web")
    files, builder = find_files(["*.x"], folder, source="web"), Builder()

    def build(file):
        if file.path.endswith("b.x"):
            raise ConfigError(f"{file.path}: wrong")
        return builder(file)

    with pytest.raises(ConfigError, match=r"b\.x: wrong"):
        index_of(files, build, kind="k", cache=kept)
    mended = Builder()
    table = index_of(files, mended, kind="k", cache=kept)

    assert sorted(builder.built) == ["a.x", "c.x"]
    assert mended.built == ["b.x"]
    assert table.shards_U.tolist() == [0, 0, 2, 2, 2]


def test_whoever_is_killed_on_the_way_finds_most_of_it_kept(folder, monkeypatch, caplog):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(index, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    kept = IndexCache(folder=folder / "cache", source="web")
    files, builder, begun, looked = find_files(["*.x"], folder, source="web"), Builder(), [], []

    def build(file):
        begun.append(file.path)
        if len(begun) == 2:
            # A while passes: the first is kept before the second has ended.
            clock.now_s += 61.0
            while not kept.path("k").exists():
                threading.Event().wait(0.001)
            looked.append(stored_in(kept.path("k"))["path"].to_pylist())
        return builder(file)

    with caplog.at_level(logging.INFO):
        index_of(files, build, kind="k", cache=kept)

    assert looked == [[begun[0].encode()]]
    assert "sources.web: found the units of 1 of 3 shards" in caplog.messages


@pytest.fixture
def indexed_for(folder, monkeypatch):
    """Index the files for a mix file, in the user's cache; return what was built, and the folder of indexes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))

    def indexed_for(mix, kind="k"):
        builder, cache = Builder(), index_folder(folder / mix)
        kept = IndexCache(folder=cache, source="web")
        index_of(find_files(["*.x"], folder, source="web"), builder, kind=kind, cache=kept)
        return sorted(builder.built), kept

    return indexed_for


def test_another_mix_file_of_the_same_files_builds_none_anew(indexed_for):
    first, kept = indexed_for("one.yaml")
    places = kept.access_folder("k")
    places.mkdir()
    (places / "a.access").write_bytes(b"where a.x can be entered")

    second, other = indexed_for("two.yaml")

    assert (first, second) == (["a.x", "b.x", "c.x"], [])
    assert (other.access_folder("k") / "a.access").read_bytes() == b"where a.x can be entered"
    assert stored_in(other.path("k")).equals(stored_in(kept.path("k")))


def test_of_another_mix_file_only_what_is_known_of_these_files_is_taken(indexed_for, folder):
    indexed_for("one.yaml")
    (folder / "a.x").write_bytes(bytes(7))
    (folder / "b.x").unlink()

    built, kept = indexed_for("two.yaml")

    assert built == ["a.x"]
    assert stored_in(kept.path("k")).num_rows == 2
    assert indexed_for("three.yaml", kind="other")[0] == ["a.x", "c.x"]


def test_indexes_lie_in_the_users_cache_a_folder_for_every_mix_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    one, other = (
        index_folder(tmp_path / "a" / "mix.yaml"),
        index_folder(tmp_path / "b" / "mix.yaml"),
    )

    assert one.parent == other.parent == tmp_path / "cache" / "omniload" / "index"
    assert one != other


def test_a_mix_file_in_a_folder_whose_name_is_no_utf8_has_an_index_too(tmp_path):
    one, other = (
        Path(os.fsdecode(b"/data/caf" + letter), "mix.yaml") for letter in (b"\xe9", b"\xea")
    )

    assert index_folder(one).name.startswith("mix.")
    assert index_folder(one) != index_folder(other)


def test_a_user_without_a_home_keeps_no_indexes_and_is_told_once(monkeypatch, caplog):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.expanduser", homeless)

    with caplog.at_level("WARNING"):
        folders = [index_folder(Path("/data", name)) for name in ("a.yaml", "b.yaml")]

    assert folders == [None, None]
    (said,) = caplog.messages
    assert "has no home" in said
    assert "set XDG_CACHE_HOME to a folder" in said


@pytest.mark.timeout(120)
def test_a_pipe_in_place_of_an_index_is_not_waited_for(indexed, folder):
    indexed()
    (kept,) = (folder / "cache").iterdir()
    kept.unlink()
    os.mkfifo(kept)

    assert indexed()[1] == ["a.x", "b.x", "c.x"]
    assert indexed()[1] == []
