"""What is remembered of manifests: one version of each path, within bounds, and only what is settled."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.stores.protocol import Entry
from fusefs.tree.manifests import SETTLED_NS, ManifestCache, is_settled

S = 10**9


def entry(size=10, mtime_ns=5 * S, version=None):
    return Entry("f", False, size, mtime_ns, version=version)


@pytest.fixture
def known():
    return ManifestCache(most_headers=3, most_bytes=30)


@pytest.mark.parametrize("other", [entry(size=11), entry(mtime_ns=6 * S), entry(version="etag")])
def test_another_size_time_or_name_is_another_version(known, other):
    known.put_header("f", entry(), "header")
    known.put_body("f", entry(), b"0123456789")

    assert (known.header("f", entry()), known.whole("f", entry())) == ("header", b"0123456789")
    assert (known.header("f", other), known.whole("f", other)) == (None, None)


def test_a_new_version_takes_the_place_of_the_old(known):
    for second, data in ((1, b"0123456789"), (2, b"01234")):
        known.put_header("f", entry(mtime_ns=second * S), second)
        known.put_body("f", entry(mtime_ns=second * S), data)

    assert known.used_bytes == 5
    assert known.whole("f", entry(mtime_ns=1 * S)) is None
    assert known.header("f", entry(mtime_ns=1 * S)) is None
    assert known.header("f", entry(mtime_ns=2 * S)) == 2


def test_the_least_recently_used_go_first(known):
    for path in "abc":
        known.put_header(path, entry(), path)
        known.put_body(path, entry(), bytes(10))
    known.header("a", entry())
    known.whole("b", entry())
    known.put_header("d", entry(), "d")
    known.put_body("d", entry(), bytes(5))

    assert [path for path in "abcd" if known.header(path, entry())] == ["a", "c", "d"]
    assert [path for path in "abcd" if known.whole(path, entry())] == ["b", "c", "d"]


def test_what_is_longer_than_all_room_is_not_kept(known):
    known.put_body("f", entry(), bytes(31))

    assert (known.whole("f", entry()), known.used_bytes) == (None, 0)


def test_a_path_or_all_below_it_is_forgotten(known):
    for path in ("d", "d/f", "dd"):
        known.put_header(path, entry(), path)
        known.put_body(path, entry(), b"1")

    known.drop_below("d")
    assert [p for p in ("d", "d/f", "dd") if known.header(p, entry())] == ["d", "dd"]
    known.forget("d")
    assert [p for p in ("d", "d/f", "dd") if known.whole(p, entry())] == ["dd"]
    known.drop_below("")
    assert (known.header("dd", entry()), known.used_bytes) == (None, 0)


def test_nothing_settles_before_its_time_and_nothing_without_a_time(known):
    assert not is_settled(entry(mtime_ns=5 * S), 5 * S + SETTLED_NS)
    assert is_settled(entry(mtime_ns=5 * S), 5 * S + SETTLED_NS + 1)
    assert not is_settled(entry(mtime_ns=5 * S), 0)
    assert not is_settled(entry(mtime_ns=0), 10**18)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 12), st.booleans())
    )
)
def test_bytes_are_counted_whatever_comes_and_goes(steps):
    known, newest = ManifestCache(most_headers=9, most_bytes=20), {}
    for path, second, size, forgets in steps:
        if forgets:
            known.forget(path)
            newest.pop(path, None)
        else:
            known.put_body(path, entry(size, second), bytes(size))
            newest[path] = (second, size)
        held = [p for p, (at, n) in newest.items() if known.whole(p, entry(n, at)) is not None]

        assert known.used_bytes == sum(newest[p][1] for p in held) <= 20


def test_threads_may_use_it_at_once(known):
    def work(path):
        for number in range(300):
            known.put_body(path, entry(mtime_ns=number), bytes(number % 15))
            known.whole(path, entry(mtime_ns=number))
            known.drop_below("")

    threads = [threading.Thread(target=work, args=(path,)) for path in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert known.used_bytes == 0
