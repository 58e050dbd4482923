"""Local files are checked while their decoded records are drawn, and not more often than is cheap."""

import errno
import os

import fsspec
import numpy as np
import pytest

from omniload.base.errors import IntegrityError
from omniload.source.formats.format import UnitTable
from omniload.source.formats.held_files import HeldFiles
from omniload.source.patterns import find_files

ALL = (0, 1, 2, 3)
"""Two units of each of two files, or of four files each."""


class Clock:
    """Advances by hand, and by ``takes_s`` with each reading."""

    def __init__(self):
        self.now_s, self.takes_s = 0.0, 0.0

    def __call__(self):
        self.now_s += self.takes_s
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def held(tmp_path, clock):
    def of(count=2, where="*.txt", **table):
        for i in range(count):
            (tmp_path / f"{i}.txt").write_text("text")
        shards = np.repeat(np.arange(2), 2)
        columns = {"rows_U": np.ones(4, int), "shards_U": shards, "starts_U": shards}
        units = UnitTable(**(columns | {"stops_U": shards} | table))
        return HeldFiles(units, find_files([where], tmp_path, source="web"), clock)

    return of


@pytest.fixture
def replace(tmp_path):
    def put(number):
        """Replace a file by another of the same size, as mv does."""
        (tmp_path / "new").write_text("TEXT")
        os.utime(tmp_path / "new", ns=(0, 1))
        (tmp_path / "new").rename(tmp_path / f"{number}.txt")

    return put


def test_a_file_that_was_replaced_is_noticed_once_its_time_has_come(held, clock, replace):
    files = held()
    files.require_unchanged(ALL)
    replace(1)

    clock.now_s = 4.9
    files.require_unchanged(ALL)

    clock.now_s = 5.0
    with pytest.raises(IntegrityError, match=r"1\.txt: changed since the source was opened: 4 "):
        files.require_unchanged(ALL)


def test_each_file_has_a_time_of_its_own_so_that_no_pass_over_the_source_leaves_one_out(
    held, replace
):
    files = held()
    files.require_unchanged((0, 1))
    replace(1)

    with pytest.raises(IntegrityError, match=r"1\.txt: changed"):
        files.require_unchanged((2, 3))


def test_of_units_of_several_files_each_is_looked_at_and_of_other_units_none(held, replace):
    places = {"shards_U": np.arange(4), "starts_U": np.arange(0, 8, 2)}
    files = held(8, stops_U=np.arange(2, 9, 2), are_whole_files=True, **places)
    replace(5)

    files.require_unchanged((0, 1, 3))

    with pytest.raises(IntegrityError, match=r"5\.txt: changed"):
        files.require_unchanged((1, 2))


def test_a_folder_that_is_away_takes_nothing_of_what_is_at_hand(held, clock, replace, tmp_path):
    files = held()
    away = tmp_path.rename(tmp_path.with_name("away"))

    files.require_unchanged(ALL)

    away.rename(tmp_path)
    replace(0)
    clock.now_s = 5.0
    with pytest.raises(IntegrityError, match=r"0\.txt: changed"):
        files.require_unchanged(ALL)


def test_other_rights_another_link_and_a_copy_with_its_time_are_no_change(held, clock, tmp_path):
    files = held()
    path, status = tmp_path / "0.txt", (tmp_path / "0.txt").stat()
    path.chmod(0o400)
    (tmp_path / "link").hardlink_to(path)
    (tmp_path / "copy").write_text("text")
    os.utime(tmp_path / "copy", ns=(0, status.st_mtime_ns))
    (tmp_path / "copy").rename(tmp_path / "0.txt")

    for clock.now_s in (0.0, 10.0):
        files.require_unchanged(ALL)


def test_a_file_system_that_is_slow_is_asked_for_a_hundredth_of_the_time_at_most(
    held, clock, replace
):
    files = held()
    clock.takes_s = 2.0
    files.require_unchanged(ALL)  # from 2.0 to 4.0
    clock.takes_s = 0.0
    replace(0)

    clock.now_s = 203.9
    files.require_unchanged(ALL)

    clock.now_s = 204.0
    with pytest.raises(IntegrityError, match=r"0\.txt: changed"):
        files.require_unchanged(ALL)


def test_an_outage_takes_nothing_of_what_is_at_hand(held, clock, replace, monkeypatch):
    def stat(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = held()
    replace(0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        files.require_unchanged(ALL)

    clock.now_s = 5.0
    with pytest.raises(IntegrityError, match=r"0\.txt: changed"):
        files.require_unchanged(ALL)


def test_a_store_is_not_asked_for_what_is_at_hand(held):
    memory = fsspec.filesystem("memory")
    for i in range(2):
        memory.pipe(f"/held/{i}.txt", b"text")
    files = held(where="memory://held/*.txt")
    memory.rm("/held", recursive=True)

    files.require_unchanged(ALL)
