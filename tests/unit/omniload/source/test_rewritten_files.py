"""A local file with the same size and times of writing is checked again if its time of change differs."""

import errno
import gc
import os
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.source.files import reading
from omniload.source.formats import content
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.patterns import find_files


class Clock:
    """Advances by hand."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


class Builder:
    """Identifies files by their whole contents and those of their companions, and counts how often.

    A look takes 2 s.
    """

    def __init__(self, clock):
        self.built, self._clock = 0, clock

    def __call__(self, file):
        self.built += 1
        self._clock.now_s += 2.0
        contents = []
        for each in (file, *file.beside):
            with reading(each), each.open() as opened:
                contents.append(opened.read())
        if contents[0].startswith(b"!"):
            raise IntegrityError(f"{file.path}: is damaged")
        one = np.ones(1, np.int64)
        return FileUnits(rows=one, starts=one - 1, stops=one, content=b"|".join(contents).hex())


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(content, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def builder(clock):
    return Builder(clock)


@pytest.fixture
def file(tmp_path, builder):
    for name in ("a.x", "a.idx"):
        (tmp_path / name).write_bytes(b"text")
    shard, beside = find_files(["a.x", "a.idx"], tmp_path, source="web")
    shard = replace(shard, beside=(beside,))
    index_of([shard], builder, kind="k", cache=IndexCache(folder=tmp_path / "kept", source="web"))
    assert builder.built == 1
    return shard


def write(path, content, *, as_another=False):
    """Write to a file, or replace it, and give it the old times."""
    status = path.stat()
    new = path.with_name("new") if as_another else path
    new.write_bytes(content)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("as_another", [False, True])
@pytest.mark.parametrize("name", ["a.x", "a.idx"])
def test_other_content_of_the_size_and_the_time_of_before_is_refused(
    file, tmp_path, name, as_another
):
    with reading(file):
        write(tmp_path / name, b"TEXT", as_another=as_another)
        said = (
            rf"{name}: changed since the source was opened: its size of 4 bytes and its modification time are "
            "the same, but "
        )
        with pytest.raises(
            IntegrityError,
            match=rf"{said}its content differs since 2\d.* UTC; .*restore the old file",
        ):
            file.require_unchanged()
        write(tmp_path / name, b"text")  # the old contents are restored, in whatever way


def test_what_is_of_a_kept_index_is_refused_too(file, builder, tmp_path):
    cache = IndexCache(folder=tmp_path / "kept", source="web")
    again = replace(find_files(["a.x"], tmp_path, source="web")[0], beside=file.beside)
    index_of([again], builder, kind="k", cache=cache)
    assert builder.built == 1

    write(tmp_path / "a.x", b"TEXT")

    with pytest.raises(IntegrityError, match=r"a\.x: changed since"), reading(again):
        pytest.fail("it was not looked at first")


def test_another_mode_link_name_or_copy_is_looked_at_once_and_read_on(file, builder, tmp_path):
    path = tmp_path / "a.x"
    path.chmod(0o400)
    (tmp_path / "link").hardlink_to(path)
    path.rename(tmp_path / "away")
    write(tmp_path / "link", b"text", as_another=True)
    (tmp_path / "link").rename(path)

    for _ in range(3):
        with reading(file), file.open() as opened:
            assert opened.read() == b"text"

    assert builder.built == 2


def test_what_is_damaged_by_now_is_told_as_changed(file, tmp_path):
    write(tmp_path / "a.x", b"!ext")

    with pytest.raises(
        IntegrityError, match=r"a\.x: changed since the source was opened: its size of 4"
    ):
        file.require_unchanged()


def test_an_outage_while_it_is_looked_at_is_one_and_the_next_look_tells(
    file, builder, tmp_path, monkeypatch
):
    write(tmp_path / "a.x", b"TEXT")

    def refuses(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(type(file), "open", refuses)
        with pytest.raises(UnavailableError, match=r"a\.x: cannot be read: .*Input/output error"):
            file.require_unchanged()

    with pytest.raises(IntegrityError, match=r"a\.x: changed since"):
        file.require_unchanged()


def test_a_look_that_has_no_memory_says_nothing_of_the_file(tmp_path):
    (tmp_path / "a.x").write_bytes(b"text")
    (found,) = find_files(["a.x"], tmp_path, source="web")
    one, memory = np.ones(1, np.int64), [True]

    def build(_):
        if not memory.pop():
            raise ConfigError("reader has no memory left") from MemoryError()
        return FileUnits(rows=one, starts=one - 1, stops=one, content="text")

    index_of([found], build, kind="k", cache=None)
    memory += [True, False]
    (tmp_path / "a.x").chmod(0o400)

    with pytest.raises(ConfigError, match="no memory left"):
        found.require_unchanged()
    found.require_unchanged()
    assert not memory, "it was looked at again"


def test_where_the_time_of_change_says_nothing_looks_are_ever_fewer(file, builder, clock):
    stands = "0/1"

    def marks():
        """Return marks as of a file system that makes up a time of change whenever it is asked."""
        marks.count += 1
        return [stands, f"0/{marks.count}"]

    marks.count = 1
    looks = []
    for at_s in (
        10.0,
        12.1,
        14.2,
        16.3,
        18.4,
        20.4,
        100.0,
        223.0,
        5_000.0,
        20_300.0,
        60_000.0,
        64_000.0,
        100_000.0,
        108_000.0,
    ):
        clock.now_s = at_s
        before = builder.built
        file.known.require_same(file, marks())
        looks.append(builder.built > before)

    # Looks of 2 s each: four nearly at once, then one after 2 s, 200 s, 20,000 s and twice a day.
    assert looks == [True] * 4 + [False, True] * 5


def test_behind_changes_of_mode_in_each_of_many_nights_what_is_written_shows_within_half_a_day(
    file, builder, clock, tmp_path
):
    path, day_s = tmp_path / "a.x", 86_400.0
    for night in range(21):
        clock.now_s = night * day_s
        path.chmod(0o400 if night % 2 else 0o600)
        file.require_unchanged()
    assert builder.built == 1 + 21  # looked at in each of them

    write(path, b"TEXT", as_another=True)
    file.require_unchanged()  # not yet
    clock.now_s += day_s / 2 + 2.0

    with pytest.raises(IntegrityError, match=r"a\.x: changed since"):
        file.require_unchanged()


def test_what_is_written_soon_behind_other_changes_is_refused(file, builder, clock, tmp_path):
    path = tmp_path / "a.x"
    for change in (lambda: path.chmod(0o400), lambda: (tmp_path / "link").hardlink_to(path)):
        change()
        file.require_unchanged()
        clock.now_s += 0.1
    write(path, b"TEXT", as_another=True)

    with pytest.raises(IntegrityError, match=r"a\.x: changed since"):
        file.require_unchanged()
    assert builder.built == 4


def test_another_inode_alone_says_nothing(file, builder):
    file.known.require_same(
        file, [f"0/{each.mark.rpartition('/')[2]}" for each in (*file.beside, file)]
    )

    assert builder.built == 1


def test_a_file_whose_units_are_not_found_yet_is_told_by_size_and_time_alone(tmp_path):
    (tmp_path / "a.x").write_bytes(b"text")
    (found,) = find_files(["a.x"], tmp_path, source="web")
    write(tmp_path / "a.x", b"TEXT")

    found.require_unchanged()


class Format:
    """Finds the units of its files by a method, as formats do, and holds the files."""

    def __init__(self, files, build):
        self.files, self._build = files, build
        index_of(files, self._index, kind="k", cache=None)

    def _index(self, file):
        return self._build(file)


def test_a_format_that_is_let_go_of_is_gone_before_garbage_is_looked_for(tmp_path, builder):
    (tmp_path / "a.x").write_bytes(b"text")
    made = Format(find_files(["a.x"], tmp_path, source="web"), builder)
    (file,), is_there = made.files, weakref.ref(made)
    (tmp_path / "a.x").chmod(0o400)
    file.require_unchanged()
    assert builder.built == 2, "while it is there, it is asked"
    (tmp_path / "a.x").chmod(0o600)

    gc.disable()  # as trainers do
    try:
        del made
        assert is_there() is None
    finally:
        gc.enable()
    file.require_unchanged()
    assert builder.built == 2
