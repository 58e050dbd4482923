"""Compressed shards of lines that are read at any place."""

import errno
import gzip
import os
import random
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.mix.sources import JsonlSource, ShuffleConfig
from omniload.source.access import points, streams
from omniload.source.access.points import KeptPoints
from omniload.source.formats import jsonl
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.index import IndexCache
from omniload.source.parsing import compressed
from omniload.source.parsing.beginnings import codec_of
from omniload.source.patterns import find_files

RANDOM = random.Random(5)
LINES = [
    b'{"text": "%d %s"}\n' % (i, RANDOM.randbytes(RANDOM.randint(1, 400)).hex().encode())
    for i in range(4_000)
]
DATA = b"".join(LINES)


def in_parts(pack, size):
    return b"".join(pack(DATA[at : at + size]) for at in range(0, len(DATA), size))


PACKED = {
    "frames.jsonl.zst": in_parts(zstandard.compress, 70_001),
    "one_frame.jsonl.zst": zstandard.compress(DATA),
    "one.jsonl.gz": gzip.compress(DATA),
    "members.jsonl.gz": in_parts(gzip.compress, 65_280),
}
ENTERED = [name for name in PACKED if name != "one_frame.jsonl.zst"]


@pytest.fixture(autouse=True)
def near(monkeypatch):
    """Make places lie near one another, and be looked for at once."""
    monkeypatch.setattr(streams, "_GROUP_BYTES", 1)
    monkeypatch.setattr(streams, "_GZIP_BYTES", 100_000)
    monkeypatch.setattr(jsonl, "SMALL_BYTES", 1)
    monkeypatch.setattr(compressed, "_NEAR_BYTES", 1)


@pytest.fixture
def opened(tmp_path):
    def opens(name, method="block", packed=None, cache=True):
        is_local = "://" not in name
        if is_local and (packed is not None or not (tmp_path / name).exists()):
            (tmp_path / name).write_bytes(PACKED[name] if packed is None else packed)
        files = find_files([name], tmp_path, source="web")
        config = JsonlSource(
            type="jsonl", path=name, unit=50_000, shuffle=ShuffleConfig(method=method)
        )
        return JsonlFormat(
            files, config, IndexCache(folder=tmp_path / "cache", source="web") if cache else None
        )

    return opens


@pytest.fixture
def begun(monkeypatch):
    """Count the shards that were decompressed from their first byte."""
    begun = []
    stream_of = compressed.stream_of
    monkeypatch.setattr(compressed, "stream_of", lambda file: begun.append(1) or stream_of(file))
    return begun


def texts(reader, unit):
    column = reader.read_unit(unit).column
    return [column[i].tobytes() for i in range(len(column))]


def expected(reader, unit):
    place = reader.units()[unit]
    return [line[10:-2] for line in DATA[place.start : place.stop].splitlines()]


@pytest.mark.parametrize("cache", [True, False], ids=["kept", "in memory"])
@pytest.mark.parametrize("name", PACKED)
def test_units_are_read_in_any_order_as_they_lie(opened, name, cache):
    reader = opened(name, cache=cache)
    last = len(reader.units()) - 1
    assert last > 20

    @given(st.lists(st.tuples(st.integers(0, last), st.booleans()), max_size=8))
    def read_as_they_lie(units):
        for unit, is_reached in units:
            if is_reached:
                reader.reach(unit)
            assert texts(reader, unit) == expected(reader, unit)

    read_as_they_lie()


@pytest.mark.parametrize("name", ENTERED)
def test_a_shard_is_entered_near_what_is_wanted_and_read_on_from_there(opened, begun, name):
    reader = opened(name)
    last = len(reader.units()) - 1
    begun.clear()

    for unit in (last, 7, 8, 9, last // 2, last // 2 + 1, last - 3):
        assert texts(reader, unit) == expected(reader, unit)

    assert begun == []


def test_an_index_of_a_release_before_is_read_and_gains_places_where_they_are_asked_for(
    opened, begun, tmp_path, monkeypatch
):
    monkeypatch.setattr(jsonl, "NEAR_BYTES", 1)
    monkeypatch.setattr(points, "NEAR_BYTES", 200_000)
    reader = opened("one.jsonl.gz")
    last = len(reader.units()) - 1
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    for path in folder.iterdir():
        path.unlink()
    begun.clear()

    old = opened("one.jsonl.gz")
    assert texts(old, last) == expected(old, last)
    assert (list(folder.iterdir()), begun) == ([], [1])

    anew = opened("one.jsonl.gz", method="units")
    begun.clear()
    assert texts(anew, last) == expected(anew, last)
    assert (len(list(folder.iterdir())), begun) == (1, [])
    for column in ("rows_U", "starts_U", "stops_U", "contents_F"):
        assert np.array_equal(getattr(old.units(), column), getattr(anew.units(), column))


def test_units_of_all_shards_are_shuffled_where_those_can_be_entered_nearby(opened, monkeypatch):
    for module in (jsonl, points):
        monkeypatch.setattr(module, "NEAR_BYTES", 300_000)

    for name in ENTERED:
        reader = opened(name, method="units")
        assert texts(reader, 20) == expected(reader, 20)
    with pytest.raises(
        ConfigError, match=r"one_frame\.jsonl\.zst: shuffle\.method: units .* pzstd"
    ):
        opened("one_frame.jsonl.zst", method="units")

    # A frame that is not large is near to its end.
    for module in (jsonl, points):
        monkeypatch.setattr(module, "NEAR_BYTES", len(DATA))
    opened("one_frame.jsonl.zst", method="units")


FAULTS = [ConnectionError("dropped"), TimeoutError("no answer"), OSError(errno.EIO, "disk")]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_store_that_fails_while_places_are_looked_for_leaves_none_kept(
    opened, tmp_path, memory, monkeypatch, fault
):
    for module in (jsonl, points):
        monkeypatch.setattr(module, "NEAR_BYTES", 300_000)
    memory.pipe("/d/one.jsonl.gz", PACKED["one.jsonl.gz"])
    opens, fails = type(memory).open, [False, True]

    class Dropped(BytesIO):
        def read(self, size=-1):
            if self.tell() > 0:
                raise fault
            return super().read(min(size, 1_000))

    def open_one(store, path, *args, **kwargs):
        if fails and fails.pop(0):
            return Dropped(PACKED["one.jsonl.gz"])
        return opens(store, path, *args, **kwargs)

    monkeypatch.setattr(type(memory), "open", open_one)

    with pytest.raises(
        UnavailableError, match=r"one\.jsonl\.gz: lines: cannot be read: .*try again"
    ):
        opened("memory://d/one.jsonl.gz", method="units")
    assert fails == []

    reader = opened("memory://d/one.jsonl.gz", method="units")
    assert texts(reader, 20) == expected(reader, 20)


LIES = {
    "another frame": lambda found: {"raws_P": np.roll(found.raws_P, 3)},
    "another place": lambda found: {"places_P": found.places_P - 1_000},
    "the middle of nowhere": lambda found: {"raws_P": found.raws_P + 11},
    "the end": lambda found: {"raws_P": np.full_like(found.raws_P, 1 << 40)},
    "other bits": lambda found: {"bits_P": (found.bits_P + 3) % 8},
    "windows that are none": lambda found: {"windows_P": tuple(b"no" for _ in found.windows_P)},
    "no windows": lambda found: {"windows_P": tuple(b"" for _ in found.windows_P)},
    "windows of another place": lambda found: {
        "windows_P": (*found.windows_P[3:], *found.windows_P[:3])
    },
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("name", ENTERED)
def test_a_place_that_lies_is_not_believed(opened, monkeypatch, caplog, name, lie):
    reader = opened(name)
    kept_of = KeptPoints.of

    def told(kept, file):
        found = kept_of(kept, file)
        return replace(found, **lie(found))

    monkeypatch.setattr(KeptPoints, "of", told)
    last = len(reader.units()) - 1

    for unit in (last - 4, 12, last):
        if unit == 12:
            reader.reach(unit)
        assert texts(reader, unit) == expected(reader, unit)

    # No frame of zstd and no member of gzip needs a window, so without a wrong window nothing is reported.
    is_told = "cannot be entered where its index says" in caplog.text
    assert is_told == (
        name == "one.jsonl.gz" or lie not in (LIES["no windows"], LIES["windows of another place"])
    )


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_shard_changed_in_its_place_is_found_by_what_its_units_held(
    opened, tmp_path, monkeypatch, is_reached
):
    """This is for file systems without a time of change that would show it."""
    stat_of, name = os.stat, "stored.jsonl.gz"

    def stat(*arguments, **options):
        status = stat_of(*arguments, **options)
        named = {each: getattr(status, each) for each in dir(status) if each.startswith("st_")}
        return SimpleNamespace(**named | {"st_ctime_ns": status.st_mtime_ns})

    monkeypatch.setattr(os, "stat", stat)
    reader = opened(name, packed=gzip.compress(DATA, 0))
    last = len(reader.units()) - 1
    before = (tmp_path / name).stat()
    (tmp_path / name).write_bytes(gzip.compress(DATA.replace(b"a", b"b"), 0))
    os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns))

    if is_reached:
        reader.reach(last)
    with pytest.raises(
        IntegrityError, match=r"bytes \d+ to \d+ differ from those that were indexed"
    ):
        reader.read_unit(last)


@pytest.mark.parametrize(
    ("path", "codec"),
    [
        ("data/a.jsonl.gz", "gzip"),
        ("data/a.b.TGZ", "gzip"),
        ("s3://lake/a.zst", "zstd"),
        ("a.ZSTD", "zstd"),
        ("data.gz/a", None),
        ("data.gz/a.jsonl", None),
        ("data/.gz", None),
        ("gz", None),
        ("a.", None),
    ],
)
def test_the_end_of_a_name_tells_the_compression(path, codec):
    assert codec_of(SimpleNamespace(path=path)) == codec
