"""Where snapshots lie on a store, and in which order they appear there."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fusefs.stores.memory import MemoryStore
from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.manifest import Head, Manifest
from snapshot.env.format.packs import FOOTER_BYTES, HEADER, inflate
from snapshot.env.store.access import opened
from snapshot.env.store.repository import ROOT, Repository

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


def a_pack(repository, pool, contents):
    """Write a pack of contents, given as bytes by digest."""
    sizes = [(digest, len(data)) for digest, data in contents.items()]
    return repository.write_pack(sizes, lambda d: iter([contents[d]]), level=1, pool=pool)


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


def test_a_pack_holds_what_was_written_in_order(repository, pool):
    contents = {b"a" * 32: b"first", b"b" * 32: b"", b"c" * 32: b"third"}

    name, index, stored = a_pack(repository, pool, contents)

    assert stored == repository.store.stat(f"{ROOT}/packs/{name}").size_bytes
    assert repository.index(name) == index
    assert [(c.offset, c.size_bytes) for c in index.contents] == [(0, 5), (5, 0), (5, 5)]
    frame = index.frames[0]
    raw = inflate(repository.read_frames(name, *frame[:2]), frame.raw_bytes, name=name)
    assert raw == b"firstthird"
    assert repository.bytes_read == frame.stored_bytes


def test_a_pack_of_many_frames_reads_back_whole(repository, pool, monkeypatch):
    monkeypatch.setattr("snapshot.env.store.repository.FRAME_BYTES", 100)
    data = bytes(range(256)) * 20

    name, index, _ = a_pack(repository, pool, {b"a" * 32: data})

    assert len(index.frames) == 52
    raw = b"".join(
        inflate(repository.read_frames(name, f.offset, f.stored_bytes), f.raw_bytes, name=name)
        for f in index.frames
    )
    assert raw == data


def test_an_index_larger_than_the_first_read_is_read_on(repository, pool, monkeypatch):
    monkeypatch.setattr("snapshot.env.store.repository._TAIL_BYTES", FOOTER_BYTES + 10)
    contents = {bytes([n]) * 32: bytes([n]) for n in range(50)}

    name, index, _ = a_pack(repository, pool, contents)

    assert repository.index(name) == index


def test_what_the_store_has_is_found_with_its_place(repository, pool):
    name, index, _ = a_pack(repository, pool, {b"a" * 32: b"xx", b"b" * 32: b"yyy"})

    found = repository.known_contents([b"b" * 32, b"z" * 32])

    assert found == {b"b" * 32: (name, index.contents[1])}


@pytest.mark.parametrize("data", [b"", HEADER, HEADER + b"half a frame and no end" * 9])
def test_half_a_pack_is_no_pack(repository, data):
    repository.store.publish(f"{ROOT}/packs/{'e' * 32}", data)

    with pytest.raises(IntegrityError):
        repository.index("e" * 32)
    assert repository.known_contents([b"a" * 32]) == {}


def test_a_footer_that_points_elsewhere_is_refused(repository, pool):
    name, _, _ = a_pack(repository, pool, {b"a" * 32: b"xx"})
    path = f"{ROOT}/packs/{name}"
    data = repository.store.read(path, 0, repository.store.stat(path).size_bytes)
    repository.store.publish(path, data[:20] + b"!" + data[20:])

    with pytest.raises(IntegrityError, match="does not end where the footer begins"):
        repository.index(name)


def test_a_pack_whose_source_fails_leaves_none(repository, pool):
    def pieces(_):
        yield b"some"
        raise StateError("it changed")

    with pytest.raises(StateError, match="it changed"):
        repository.write_pack([(b"a" * 32, 8)], pieces, level=1, pool=pool)

    assert repository.store.listing(f"{ROOT}/packs") == []


def test_a_store_is_opened_by_its_url_and_closed(tmp_path):
    with opened(str(tmp_path)) as repository:
        assert repository.publish(a_manifest())

    with opened(tmp_path.as_uri()) as repository:
        assert repository.all_keys() == [KEY]
        assert repository.store.location == tmp_path.as_uri()
