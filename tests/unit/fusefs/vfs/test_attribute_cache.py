"""What is known of a path: for a second, until it changes here, and never of a moment before a change."""

import pytest

from fusefs.stores.protocol import Entry
from fusefs.tree.catalog import FileInfo
from fusefs.vfs.attribute_cache import TTL_S, AttributeCache


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def no_time_passes():
    """It passes here, as these tests say."""


def described(name, mtime_ns=1):
    return FileInfo(
        name=name,
        kind="file",
        size_bytes=1,
        mtime_ns=mtime_ns,
        mode=0o644,
        stored="plain",
        entry=Entry(name, False, 1, mtime_ns),
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache(clock):
    made = AttributeCache(clock)
    for path in ("a", "a/b", "a/b/c", "ab"):
        made.remember(path, described(path))
    return made


def known(cache):
    return [path for path in ("a", "a/b", "a/b/c", "ab") if cache.known(path) is not None]


def test_attributes_are_known_for_a_second(cache, clock):
    clock.now_s += TTL_S - 0.001
    assert known(cache) == ["a", "a/b", "a/b/c", "ab"]

    clock.now_s += 0.001
    assert known(cache) == []


def test_a_change_is_forgotten_and_counted(cache):
    before = cache.num_changes
    cache.forget("a/b")

    assert known(cache) == ["a", "a/b/c", "ab"]
    assert cache.num_changes == before + 1


def test_a_directory_is_forgotten_with_all_below_it_and_nothing_beside_it(cache):
    cache.forget_below("a/b", "elsewhere")

    assert known(cache) == ["a", "ab"]


def test_all_is_forgotten_at_once(cache):
    cache.forget_all()

    assert known(cache) == []


def test_attributes_of_another_version_are_dropped_without_counting_a_change(cache):
    before = cache.num_changes
    cache.drop_unlike("a", described("a"))
    cache.drop_unlike("ab", described("ab", mtime_ns=2))
    cache.drop_unlike("a/b", None)
    cache.drop_unlike("never/asked", None)

    assert known(cache) == ["a", "a/b/c"]
    assert cache.num_changes == before


def test_the_time_of_a_directory_moves_with_its_names_and_lasts_no_longer_for_it(cache, clock):
    clock.now_s += TTL_S / 2
    cache.names_changed("a")
    moved = cache.known("a")

    assert moved.mtime_ns == moved.entry.mtime_ns > 1
    clock.now_s += TTL_S / 2
    assert cache.known("a") is None


def test_a_look_up_in_vain_lets_one_file_be_made_unasked_and_only_at_once(cache, clock):
    cache.miss("new")
    assert cache.was_just_missed("new")
    assert not cache.was_just_missed("new")

    cache.miss("new")
    clock.now_s += 0.1
    assert not cache.was_just_missed("new")


@pytest.mark.parametrize("change", ["forget", "forget_below"])
def test_a_change_of_a_path_takes_back_that_nothing_is_there(cache, change):
    cache.miss("new")
    getattr(cache, change)("new")

    assert not cache.was_just_missed("new")
