"""A store that others can write to: names lead nowhere, and one bad file does not affect others."""

import json
import os

import orjson
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.bridge.api.errno_answers import errno_of
from fusefs.format.manifest import Manifest, decode_manifest, encode_manifest
from fusefs.format.manifest_header import (
    HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    RESIDUE,
    TAIL,
    decode_header,
)
from fusefs.stores.memory import MemoryStore
from fusefs.stores.protocol import Entry, checked_path, parent_of
from fusefs.stores.remote.client import ReplacingBackend
from fusefs.stores.remote.object_store import ObjectStore
from fusefs.stores.remote.rename_intents import INTENTS, decode_intent, encode_intent, intent_path
from fusefs.stores.remote.rename_intents import Intent as Promise
from fusefs.stores.remote.rename_store import RenamingStore, ReplacingStore
from fusefs.tools.fsck import verify
from fusefs.tree.directory_attributes import attributes_path, mark
from omniload.base.errors import IntegrityError, StateError
from tests.property.fusefs.format.test_manifest import a_segment
from tests.support.examples import few
from tests.support.fusefs.builders import some_files
from trainer_integration.checkpoint.file_digests import sealed_json
from trainer_integration.checkpoint.striped.index import Index

PARTS = st.sampled_from(
    ["..", ".", "", "a", "other", "victim", ".omnifs", "new", "objects", "\0", "a\0b", "n" * 256]
)
NAMES = st.one_of(
    st.lists(PARTS, max_size=5).map("/".join),
    st.text(max_size=12),
    st.sampled_from(["/etc/passwd", "../other/victim", "a/../../b", "a//b", "a/", "/", "", "."]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


class Asked(ReplacingBackend):
    """A client that fails the test if it is asked for anything but plain paths.

    Args:
        files: Content by path.
        more: Further names in its listings.
    """

    location = "asked://"

    def __init__(self, files, more=()):
        self.files, self.more = dict(files), list(more)

    def _plain(self, path):
        assert path == checked_path(path), f"the client was asked for {path!r}"
        return path

    def find(self, path):
        if self._plain(path) in self.files:
            return Entry(path.rpartition("/")[2], False, len(self.files[path]), 0)
        below = f"{path}/" if path else ""
        is_there = not path or any(name.startswith(below) for name in self.files)
        return Entry(path.rpartition("/")[2], True, 0, 0) if is_there else None

    def listing(self, path):
        self._plain(path)
        found = [n for n in self.files if parent_of(n) == path]
        return [Entry(n.rpartition("/")[2], False, 1, 0) for n in found] + [
            Entry(name, kind, 1, 0) for name in self.more for kind in (False, True)
        ]

    def read(self, path, offset, size_bytes):
        return self.files[self._plain(path)][offset : offset + size_bytes]

    def move(self, source, target):
        self.files[self._plain(target)] = self.files.pop(self._plain(source))

    replace = move

    def open_new(self, path):
        self._plain(path)
        raise AssertionError("nothing is written")

    def remove(self, path):
        del self.files[self._plain(path)]

    def make_directory(self, path):
        self._plain(path)

    def remove_directory(self, path):
        self._plain(path)


@pytest.mark.parametrize("kind", [RenamingStore, ReplacingStore])
@given(source=NAMES, target=NAMES)
@example(source="../other/victim", target="f")
@example(source=".omnifs/objects/ab/victim", target="f")
def test_an_intent_moves_what_lies_in_the_store_or_nothing(kind, source, target):
    record = orjson.dumps({"version": 1, "source": source, "target": target})
    backend = Asked({intent_path("f"): record, "a": b"mine"})
    backend.files.setdefault(source, b"of another")

    try:
        found = kind(backend).stat("f")
    except FileNotFoundError:
        assert target != "f" or source != "a"
    else:
        # An object that nothing promises stays where it is, whatever its name.
        assert (target, found.size_bytes) == ("f", len(backend.files["f"]))
        assert source == checked_path(source)
        assert not source.startswith(".omnifs/objects")


@given(st.one_of(st.binary(max_size=40), JSON.map(lambda value: json.dumps(value).encode())))
def test_a_forged_intent_is_removed_by_repair_and_by_nothing_else(data):
    with some_files() as files:
        files.store.publish(f"{INTENTS}/0", data)
        files.write_file("f", b"content")

        (fault,) = verify(files, grace_s=-1).faults
        assert (fault.kind, fault.path) == ("left over", f"{INTENTS}/0")
        assert verify(files, repair=True, grace_s=-1).repaired == [f"{INTENTS}/0"]
        assert verify(files, grace_s=-1).faults == []


@given(NAMES, NAMES)
def test_an_intent_is_read_as_written_or_refused(source, target):
    try:
        read = decode_intent(encode_intent(Promise(source, target)), path=intent_path(target))
    except IntegrityError:
        return
    assert read == Promise(source, target)
    assert [checked_path(source), checked_path(target)] == [source, target]


@given(st.lists(NAMES, max_size=4))
@example([".."])
def test_what_has_no_name_of_its_own_is_not_listed_and_keeps_its_directory(names):
    store = ObjectStore(Asked({"d/f": b"1"}, names))

    for entry in store.listing("d"):
        assert store.stat(f"d/{entry.name}" if entry.name == "f" else "d") is not None
        assert checked_path(entry.name) == entry.name
        assert "/" not in entry.name
    with pytest.raises(OSError, match="not empty"):
        store.remove_directory("d")
    with some_files(store) as files:
        assert "f" in [info.name for info in files.listing("d")]


def test_a_directory_that_holds_what_has_no_name_is_not_renamed_away_over_it():
    backend = Asked({"d/f": b"1"}, [".."])

    with pytest.raises(IntegrityError, match=r"has the component '\.\.'"):
        ObjectStore(backend).rename("d", "e")

    assert list(backend.files) == ["d/f"]


# Manifests with valid checksums and any contents


def header_of(data):
    return orjson.loads(data[: HEADER_BYTES - 18])


def with_header(data, text):
    """Return a manifest with another header, and a checksum that fits."""
    text = text.ljust(HEADER_BYTES - 18)[: HEADER_BYTES - 18]
    return text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + data[HEADER_BYTES:]


SOUND = {
    "striped": Manifest(mtime_ns=7, segments=(a_segment(5, 9000), a_segment(6, 50))),
    "ranges": Manifest(mtime_ns=7, segments=(a_segment(5, 90_000).part(5000, 60_000),)),
    "inline": Manifest(mtime_ns=7, inline=b"bytes", xattrs={"user.a": b"b"}),
    "symlink": Manifest(kind="symlink", mtime_ns=7, target="there"),
    "directory": Manifest(kind="directory", mtime_ns=7, mode=0o755),
}
VALUES = st.one_of(
    JSON,
    st.sampled_from(
        [-1, 2**63, 2**64, 10**30, 1e999, "", "../x", "a\0b", "zz", {}, {"a": "x"}, []]
    ),
)


def hostile(manifest):
    """Return strategies for manifests like ``manifest`` with a change and checksums that fit."""
    data = encode_manifest(manifest)
    fields = header_of(data)
    keys = st.sampled_from([*fields, "more"])
    changed = st.dictionaries(keys, VALUES, min_size=1, max_size=3).map(
        lambda changes: json.dumps({**fields, **changes}, separators=(",", ":")).encode()
    )
    bodies = st.binary(min_size=0, max_size=200).map(lambda body: other_body(data, fields, body))
    texts = st.sampled_from(
        [b'{"omnifs":', b'{"omnifs":1', b'{"omnifs":NaN}', b'{"omnifs":' + b"[" * 3000, b"[]", b"1"]
    )
    return st.one_of(st.one_of(changed, texts).map(lambda text: with_header(data, text)), bodies)


def other_body(data, fields, body):
    size = min(len(body), len(data) - HEADER_BYTES - len(TAIL))
    used = 32 * fields["segments"] + 8 * fields["units"] + fields["inline"]
    whole = bytearray(data)
    whole[HEADER_BYTES : HEADER_BYTES + size] = body[:size]
    digest = xxhash.xxh3_64_hexdigest(bytes(whole[HEADER_BYTES : HEADER_BYTES + used]))
    return with_header(bytes(whole), orjson.dumps({**fields, "body_xxh3": digest}))


@few(120, soak=4000)
@given(st.sampled_from(list(SOUND)).flatmap(lambda name: hostile(SOUND[name])))
def test_a_manifest_whose_checksums_fit_is_sound_or_refused(data):
    try:
        manifest = decode_manifest(data, name="m")
    except (IntegrityError, StateError):
        return
    assert encode_manifest(manifest)
    assert manifest.size_bytes == decode_header(data, name="m").size
    assert all(checked_path(path) == path for path in manifest.object_paths()[:100])
    assert manifest.target is None or ("\0" not in manifest.target and manifest.kind == "symlink")


@few(30, soak=600)
@given(st.sampled_from(list(SOUND)).flatmap(lambda name: hostile(SOUND[name])), st.booleans())
def test_one_bad_file_is_a_fault_of_its_own(data, of_a_directory):
    with some_files() as files:
        files.write_file("d/good", bytes(9000))
        where = attributes_path("d") if of_a_directory else "d/bad"
        files.store.publish(where, data)
        mark(files.store, "d")

        assert "good" in [info.name for info in files.listing("d")]
        report = verify(files)
        try:
            kept = decode_manifest(data, name="m")
        except (IntegrityError, StateError) as wrong:
            assert (where, "unreadable") in [(f.path, f.kind) for f in report.faults]
            if not of_a_directory:
                with pytest.raises(type(wrong)) as refused:
                    files.open("d/bad")
                assert os.strerror(errno_of(refused.value)) == "Input/output error"
        else:
            is_due = of_a_directory == (kept.kind == "directory")
            assert is_due == (where not in [fault.path for fault in report.harmful])


class Sparse(MemoryStore):
    """Shows a small file as one of many bytes, and records the reads of it."""

    def __init__(self, size_bytes):
        super().__init__()
        self.size_bytes, self.read_bytes = size_bytes, 0

    def stat(self, path):
        entry = super().stat(path)
        if path != "giant":
            return entry
        return Entry(entry.name, False, self.size_bytes, entry.mtime_ns)

    def read(self, path, offset, size_bytes):
        if path != "giant":
            return super().read(path, offset, size_bytes)
        self.read_bytes += size_bytes
        assert size_bytes <= 4 << 20, "a giant is read by pieces"
        return (
            super()
            .read(path, 0, HEADER_BYTES)[offset : offset + size_bytes]
            .ljust(size_bytes, b"\0")
        )


@pytest.mark.parametrize("said", ["little", "all"])
@pytest.mark.parametrize("size_bytes", [3 << 30, MAX_MANIFEST_BYTES])
def test_a_giant_with_a_sound_header_is_refused_before_it_is_held(size_bytes, said):
    size_bytes += RESIDUE - size_bytes % 4096
    data = encode_manifest(Manifest(mtime_ns=7, inline=b"x"))
    inline = 1 if said == "little" else size_bytes - HEADER_BYTES - len(TAIL)
    fields = {**header_of(data), "inline": inline, "size": inline}
    store = Sparse(size_bytes)
    store.publish("giant", with_header(data, orjson.dumps(fields)))
    with some_files(store) as files:
        with pytest.raises(IntegrityError, match="giant"):
            files.open("giant")
        assert [info.name for info in files.listing("")] == ["giant"]
        (fault,) = verify(files).harmful

    assert fault.path == "giant"
    assert store.read_bytes <= 10 * HEADER_BYTES + 10 * len(TAIL)


def test_a_long_manifest_is_read_by_pieces_and_whole():
    long = Manifest(mtime_ns=7, inline=bytes(range(256)) * (36 << 10))
    store = MemoryStore()
    store.publish("long", encode_manifest(long))
    longest = []
    read = store.read
    store.read = lambda path, at, size: longest.append(size) or read(path, at, size)
    with some_files(store) as files:
        assert files.manifest("long") == long

    assert max(longest) == 4 << 20


def test_what_would_need_too_long_a_manifest_is_not_written():
    with pytest.raises(OSError, match="larger units") as refused:
        encode_manifest(Manifest(mtime_ns=7, inline=bytes(MAX_MANIFEST_BYTES)))
    assert os.strerror(refused.value.errno) == "File too large"


# The index of a striped checkpoint

CHUNK = {"offsets": [0], "sizes": [4], "file": "shard-00001-of-00001.safetensors", "at": 0}


@given(st.dictionaries(st.sampled_from(list(CHUNK)), st.one_of(VALUES, NAMES), max_size=2))
@example({"file": "../../victim"})
@example({"offsets": [-4]})
@example({"offsets": [1 << 40]})
def test_an_index_names_shards_and_boxes_within_its_tensors_alone(changes):
    value = {
        "version": 1,
        "files": {CHUNK["file"]: {"size_bytes": 16}},
        "tensors": {"w": {"dtype": "F32", "sizes": [4], "chunks": [{**CHUNK, **changes}]}},
        "about": {},
    }
    try:
        sealed = sealed_json(value)
    except TypeError:
        return  # values that are no JSON, such as 10**30
    try:
        index = Index.decoded(sealed, name="index.json")
    except (IntegrityError, StateError):
        return
    (chunk,) = index.tensors["w"].chunks
    assert (chunk.file, chunk.offsets, chunk.sizes) == (CHUNK["file"], (0,), (4,))


NAMES_OF_BYTES = st.binary(min_size=1, max_size=12).filter(
    lambda name: not {0, ord("/")} & set(name) and name not in {b".", b"..", b".omnifs"}
)


@given(
    st.lists(NAMES_OF_BYTES, min_size=1, max_size=3),
    st.lists(NAMES_OF_BYTES, min_size=1, max_size=3),
)
def test_an_intent_holds_names_of_any_bytes(source, target):
    intent = Promise(*("/".join(map(os.fsdecode, names)) for names in (source, target)))

    assert decode_intent(encode_intent(intent), path=intent_path(intent.target)) == intent


def test_an_intent_of_bytes_that_are_none_is_refused():
    text = '{"version": 2, "source": "\u0100", "target": "f"}'.encode()

    with pytest.raises(IntegrityError, match=r"holds .*, no byte; repair removes it"):
        decode_intent(text, path=intent_path("f"))
