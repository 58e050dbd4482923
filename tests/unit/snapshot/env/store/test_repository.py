"""Where snapshots lie on a store, and in which order they appear there."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.manifest import Head, Manifest, Place
from snapshot.env.format.packs import inflate
from snapshot.env.store.access import opened
from snapshot.env.store.repository import MANIFESTS, ROOT, Found, Repository, Verdict, judged

KEY, OTHER = "ab" * 32, "ac" * 32


def a_manifest(key=KEY, **changes):
    fields = {"document": {}, "targets": (), "created_ns": 1, "packs": ()}
    return Manifest(head=Head(**{"key": key, **fields, **changes}), entries=())


@pytest.fixture
def repository():
    return Repository(MemoryStore())


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as found:
        yield found


def a_snapshot(repository, pool, contents, key=KEY):
    """Publish a snapshot of one pack of contents, given as bytes by digest."""
    name, frames, _ = repository.write_pack(iter(contents.values()), pool)
    places, at = {}, 0
    for digest, data in contents.items():
        places[digest] = Place(0, at, len(data))
        at += len(data)
    made = Manifest(
        head=a_manifest(key, packs=(name,)).head, entries=(), contents=places, frames=(frames,)
    )
    assert repository.publish(made)
    return made


def test_an_empty_store_has_no_snapshots(repository):
    assert repository.all_keys() == []
    assert repository.manifest(KEY) is None
    assert repository.known_contents([b"x" * 32]) == {}


def test_a_published_manifest_is_found_by_its_key(repository):
    assert repository.publish(a_manifest())

    assert repository.all_keys() == [KEY]
    assert repository.manifest(KEY) == a_manifest()


def test_the_first_manifest_of_a_key_stays(repository):
    repository.publish(a_manifest(created_ns=1))

    assert not repository.publish(a_manifest(created_ns=2))
    assert repository.manifest(KEY).head.created_ns == 1


def test_a_key_may_be_shortened_while_it_is_the_only_one(repository):
    repository.publish(a_manifest(KEY))
    repository.publish(a_manifest(OTHER))

    assert repository.full_key("abab") == KEY
    assert repository.full_key(OTHER) == OTHER
    with pytest.raises(StateError, match="'a' begins 2 keys"):
        repository.full_key("a")
    with pytest.raises(StateError, match="'f' begins 0 keys"):
        repository.full_key("f")


@pytest.mark.parametrize("key", ["../" + "a" * 61, "A" * 64, "a" * 63, "", "a" * 63 + "/"])
def test_what_is_no_key_never_becomes_a_path(repository, key):
    with pytest.raises(StateError, match="is no key"):
        repository.manifest(key)


def test_a_manifest_that_is_another_keys_is_refused(repository):
    repository.publish(a_manifest(KEY))
    data = repository.manifest_bytes(KEY)
    repository.store.publish(f"{ROOT}/manifests/{OTHER}", data)

    with pytest.raises(IntegrityError, match="says that its key"):
        repository.manifest(OTHER)


@pytest.mark.parametrize("begins", [b"", None])
def test_a_manifest_of_absurd_size_is_refused_before_it_is_held(tmp_path, begins):
    repository = Repository(LocalStore(tmp_path))
    repository.publish(a_manifest(KEY))
    path = tmp_path / MANIFESTS / KEY
    if begins is not None:
        path.write_bytes(begins)
    os.truncate(path, 3 << 40)  # more than any machine has memory for

    with pytest.raises(IntegrityError, match=r"is no manifest|has 3298534883328 bytes"):
        repository.manifest(KEY)


def test_a_pack_holds_what_was_written_in_order(repository, pool):
    name, frames, stored = repository.write_pack(iter([b"first", b"third"]), pool)

    assert stored == repository.store.stat(f"{ROOT}/packs/{name}").size_bytes
    (frame,) = frames
    raw = inflate(repository.read_frames(name, *frame[:2]), frame.raw_bytes, name=name)
    assert raw == b"firstthird"
    assert repository.bytes_read == frame.stored_bytes


def test_a_pack_of_many_frames_reads_back_whole(repository, pool, monkeypatch):
    monkeypatch.setattr("snapshot.env.store.repository.FRAME_BYTES", 100)
    data = bytes(range(256)) * 20

    name, frames, _ = repository.write_pack(iter([data]), pool)

    assert len(frames) == 52
    raw = b"".join(
        inflate(repository.read_frames(name, f.offset, f.stored_bytes), f.raw_bytes, name=name)
        for f in frames
    )
    assert raw == data


def test_what_a_snapshot_has_is_found_with_its_place(repository, pool):
    made = a_snapshot(repository, pool, {b"a" * 32: b"xx", b"b" * 32: b"yyy", b"c" * 32: b""})

    found = repository.known_contents([b"b" * 32, b"c" * 32, b"z" * 32])

    assert found == {b"b" * 32: Found(made.head.packs[0], made.frames[0], 2, 3)}


@pytest.mark.parametrize("left", [0, 16, -1])
def test_a_pack_that_was_cut_short_or_is_gone_is_not_relied_on(repository, pool, left):
    made = a_snapshot(repository, pool, {b"a" * 32: b"xx"})
    path = f"{ROOT}/packs/{made.head.packs[0]}"
    data = repository.store.read(path, 0, repository.store.stat(path).size_bytes)
    repository.store.remove(path)
    if left:
        repository.store.publish(path, data[:left])

    assert repository.known_contents([b"a" * 32]) == {}
    assert repository.publish(made), "saved again, it takes the place of the one that lost its pack"


def test_a_manifest_that_cannot_be_read_is_not_relied_on(repository, pool):
    a_snapshot(repository, pool, {b"a" * 32: b"xx"})
    repository.store.publish(f"{ROOT}/manifests/{OTHER}", b"no manifest")

    assert set(repository.known_contents([b"a" * 32])) == {b"a" * 32}


def test_a_pack_whose_source_fails_leaves_none(repository, pool):
    def pieces():
        yield b"some"
        raise StateError("it changed")

    with pytest.raises(StateError, match="it changed"):
        repository.write_pack(pieces(), pool)

    assert repository.store.listing(f"{ROOT}/packs") == []


def test_a_store_is_opened_by_its_url_and_closed(tmp_path):
    with opened(str(tmp_path)) as repository:
        assert repository.publish(a_manifest())

    with opened(tmp_path.as_uri()) as repository:
        assert repository.all_keys() == [KEY]
        assert repository.store.location == tmp_path.as_uri()


NOW, GRACE = 1000, 100


def verdict(packs, marks=None, named=()):
    return judged(packs, marks or {}, set(named), now_ns=NOW, grace_ns=GRACE)


def test_a_pack_that_is_named_is_left_alone():
    assert verdict({"p": 0}, named=["p"]) == Verdict((), (), ())


def test_an_old_pack_that_nothing_names_is_condemned_first():
    assert verdict({"p": 0}) == Verdict((), ("p",), ())


def test_a_pack_that_was_just_written_may_be_of_a_save_under_way():
    assert verdict({"p": NOW - GRACE + 1}) == Verdict((), (), ())
    assert verdict({"p": NOW - GRACE}) == Verdict((), ("p",), ())


def test_a_condemned_pack_is_removed_a_grace_later():
    assert verdict({"p": 0}, {"p": NOW - GRACE + 1}) == Verdict((), (), ())
    assert verdict({"p": 0}, {"p": NOW - GRACE}) == Verdict(("p",), (), ())


def test_a_condemned_pack_that_is_named_again_is_pardoned():
    assert verdict({"p": 0}, {"p": 0}, named=["p"]) == Verdict((), (), ("p",))


def test_a_mark_whose_pack_is_gone_goes_too():
    assert verdict({}, {"p": NOW}) == Verdict((), (), ("p",))


NAMES = st.sampled_from("abcdef")
TIMES = st.dictionaries(NAMES, st.integers(0, NOW))


@given(TIMES, TIMES, st.sets(NAMES))
def test_nothing_that_is_named_or_new_is_ever_touched(packs, marks, named):
    removed, condemned, pardoned = verdict(packs, marks, named)

    assert not named & {*removed, *condemned}
    assert {*removed, *condemned} <= packs.keys()
    assert all(marks[pack] <= NOW - GRACE for pack in removed)
    assert all(packs[pack] <= NOW - GRACE for pack in condemned)
    assert not {*removed} & {*condemned} | {*pardoned} & {*removed, *condemned}
    assert {*pardoned} == {pack for pack in marks if pack in named or pack not in packs}


@given(TIMES, st.sets(NAMES))
def test_two_runs_a_grace_apart_leave_only_what_is_named(packs, named):
    first = judged(packs, {}, named, now_ns=2 * NOW, grace_ns=GRACE)
    marks = dict.fromkeys(first.condemned, 2 * NOW)
    second = judged(packs, marks, named, now_ns=2 * NOW + GRACE, grace_ns=GRACE)

    assert packs.keys() - {*second.removed} == packs.keys() & named
