"""Places at which compressed shards can be entered, and the file that keeps them."""

import os
import re
import time

import numpy as np
import orjson
import pytest
import xxhash

from omniload.base import extras
from omniload.base.errors import ConfigError
from omniload.source.access import points
from omniload.source.access.points import AccessPoints, KeptPoints, Point, require_near
from omniload.source.files import local_file
from omniload.source.index import FileUnits, IndexCache

UNITS = FileUnits(
    rows=np.array([1, 1, 1], np.int64),
    starts=np.array([0, 100, 250], np.int64),
    stops=np.array([100, 250, 300], np.int64),
    content="",
)
POINTS = [Point(40, 90), Point(55, 200, 3, b"what lies before" * 9)]
FOUND = AccessPoints.of(POINTS, UNITS, [1, 1 << 63, 3])


@pytest.fixture
def shard(tmp_path):
    def written(name="a.jsonl.gz", size=100):
        path = tmp_path / name
        if not path.exists() or path.stat().st_size != size:
            path.write_bytes(bytes(size))
        return local_file(str(tmp_path / name))

    return written


@pytest.fixture
def kept(tmp_path):
    return KeptPoints(IndexCache(folder=tmp_path / "cache", source="web"), "lines/4")


def files_in(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.access"), key=lambda path: path.is_file())[1:]


def age(paths, days):
    written_s = time.time() - days * 24 * 3600
    for path in paths:
        os.utime(path, (written_s, written_s))


def test_the_last_place_before_a_byte_is_found_with_what_it_needs():
    assert FOUND.before(89) is None
    assert FOUND.before(90) == POINTS[0]
    assert FOUND.before(199) == POINTS[0]
    assert FOUND.before(1 << 40) == POINTS[1]
    assert AccessPoints.of([], UNITS, [1, 2, 3]).before(1 << 40) is None


def test_the_farthest_unit_is_that_with_most_between_it_and_the_place_before():
    assert FOUND.farthest_bytes == 50
    assert AccessPoints.of([], UNITS, [1, 2, 3]).farthest_bytes == 250
    assert AccessPoints.of(POINTS[:1], UNITS, [1, 2, 3]).farthest_bytes == 160


def test_what_is_kept_is_found_by_whoever_opens_the_source(tmp_path, kept, shard):
    kept.keep(shard(), FOUND)

    again = KeptPoints(IndexCache(folder=tmp_path / "cache", source="web"), "lines/4")
    found = again.of(shard())

    assert again.farthest(shard()) == 50
    for name in ("raws_P", "places_P", "bits_P", "digests_U"):
        assert np.array_equal(getattr(found, name), getattr(FOUND, name))
        assert getattr(found, name).dtype == getattr(FOUND, name).dtype
    assert found.before(260) == POINTS[1]
    other = KeptPoints(IndexCache(folder=tmp_path / "cache", source="web"), "lines/8")
    assert (other.of(shard()), other.farthest(shard())) == (None, None)


def test_a_shard_that_was_written_anew_has_no_places(kept, shard):
    kept.keep(shard(), FOUND)

    changed = shard(size=101)

    assert (kept.of(changed), kept.farthest(changed)) == (None, None)


@pytest.fixture
def rewritten(tmp_path, kept, shard):
    """Rewrite the kept entry points of a shard, and look for them."""
    file = shard()
    kept.keep(file, FOUND)
    (path,) = files_in(tmp_path)
    whole = path.read_bytes()

    def look(change):
        path.write_bytes(change(whole))
        return kept.of(file)

    return look


def test_a_file_with_any_byte_altered_or_missing_is_as_none(rewritten, caplog):
    assert rewritten(lambda whole: whole) is not None
    size = []
    rewritten(lambda whole: size.append(len(whole)) or whole)

    for at in range(size[0]):
        flipped = rewritten(
            lambda whole, at=at: whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :]
        )
        # A number of units or of a distance describes no place.
        assert flipped is None or (
            np.array_equal(flipped.raws_P, FOUND.raws_P)
            and np.array_equal(flipped.digests_U, FOUND.digests_U)
        )
        assert rewritten(lambda whole, at=at: whole[:at]) is None
    assert "the shard is read from its start" in caplog.text


def with_check(change):
    """Alter the kept entry points, and give them a checksum that fits."""

    def changed(whole):
        line, _, body = whole.partition(b"\n")
        head, body = change(orjson.loads(line), body)
        return orjson.dumps({**head, "check": xxhash.xxh3_128_hexdigest(body)}) + b"\n" + body

    return changed


IMPOSSIBLE = {
    "a version that is to come": lambda head, body: ({**head, "omniload.access": 3}, body),
    "no number": lambda head, body: ({**head, "places": "2"}, body),
    "a place behind the end of the file": lambda head, body: (head, b"\xff" + body[1:]),
    "a place before the file": lambda head, body: (head, bytes(7) + b"\x80" + body[8:]),
    "places that fall": lambda head, body: (head, body[:17] + b"\x09" + body[18:]),
    "no list": lambda head, body: ([], body),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_places_that_none_can_have_are_as_none(rewritten, change):
    if change is IMPOSSIBLE["no list"]:
        assert rewritten(lambda _: b"[]\n") is None
    else:
        assert rewritten(with_check(change)) is None


def test_what_is_of_other_shards_is_removed_once_something_is_kept(tmp_path, kept, shard):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        kept.keep(shard(name), FOUND)
    age(files_in(tmp_path), days=8)
    kept.keep_only([shard("a.jsonl.gz")])
    assert len(files_in(tmp_path)) == 1

    kept.keep_only([])

    assert kept.of(shard("a.jsonl.gz")) is not None


@pytest.mark.parametrize("look", [KeptPoints.of, KeptPoints.farthest])
def test_an_edited_file_takes_no_places_from_a_run_that_reads_them(tmp_path, kept, shard, look):
    kept.keep(shard("a.jsonl.gz"), FOUND)
    age(files_in(tmp_path), days=8)
    assert look(kept, shard("a.jsonl.gz")) is not None
    edited = KeptPoints(IndexCache(folder=tmp_path / "cache", source="web"), "lines/4")

    edited.keep(shard("b.jsonl.gz"), FOUND)
    edited.keep_only([shard("b.jsonl.gz")])

    assert kept.of(shard("a.jsonl.gz")) is not None


def test_a_draft_of_another_process_stays_and_one_that_was_left_goes(tmp_path, kept, shard):
    kept.keep(shard(), FOUND)
    (folder,) = (path for path in (tmp_path / "cache").rglob("*.access") if path.is_dir())
    young, left, foreign = (folder / name for name in (".b.access.1", ".b.access.2", "notes.txt"))
    for path in (young, left, foreign):
        path.write_bytes(b"in part")
    age([left, foreign], days=8)

    kept.keep_only([shard()])

    assert {path.name for path in folder.iterdir()} == {
        *(young.name, foreign.name),
        *(path.name for path in files_in(tmp_path)),
    }


def test_without_a_folder_places_are_held_in_memory_up_to_a_limit(shard, monkeypatch):
    kept = KeptPoints(None, "lines/4")
    kept.keep(shard(), FOUND)
    assert (kept.of(shard()), kept.farthest(shard())) == (FOUND, 50)

    monkeypatch.setattr(points, "_HELD_BYTES", FOUND.size_bytes - 1)
    kept = KeptPoints(None, "lines/4")
    kept.keep(shard(), FOUND)

    assert (kept.of(shard()), kept.farthest(shard())) == (None, None)


def test_a_folder_that_cannot_be_written_leaves_places_in_memory(tmp_path, shard):
    (tmp_path / "cache").write_text("no folder")
    kept = KeptPoints(IndexCache(folder=tmp_path / "cache", source="web"), "lines/4")

    kept.keep(shard(), FOUND)

    assert (kept.of(shard()), kept.farthest(shard())) == (FOUND, 50)


def test_shards_that_are_entered_far_from_what_is_wanted_are_refused_with_what_mends_it(
    kept, shard, monkeypatch
):
    zst, gz, unknown = map(shard, ("a.jsonl.zst", "a.jsonl.gz", "b.jsonl.gz"))
    for file in (zst, gz):
        kept.keep(file, FOUND)
    require_near([zst, gz], kept)

    def refused(file, said):
        with pytest.raises(ConfigError, match=re.escape(said)) as told:
            require_near([file], kept)
        assert str(told.value).startswith(f"{file.path}: shuffle.method: units")
        assert str(told.value).endswith("or write method: block")

    refused(unknown, "its entry points are saved nowhere")
    monkeypatch.setattr(points, "NEAR_BYTES", 49)
    refused(gz, "it has places up to 50 B apart; write it in smaller shards")
    refused(zst, f"zstd -dc {zst.path} | pzstd > NEW.zst")
    monkeypatch.setattr(points, "find_spec", lambda _: None)
    refused(gz, extras.install_line("gzip"))
    refused(unknown, extras.install_line("gzip"))
