"""Snapshots under anything hypothesis thinks of: round trips, hostile paths, damaged bytes."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.entries import (
    Entry,
    Kind,
    Limits,
    Target,
    check_entries,
    difference,
    parents_of,
)
from snapshot.env.format.manifest import Manifest, Place, decode_manifest, encode_manifest
from snapshot.env.format.packs import (
    HEADER,
    Frame,
    read_units,
)
from snapshot.env.key.keys import key_of
from snapshot.env.node.cache import NodeCache
from snapshot.env.node.extraction import provide
from snapshot.env.node.tree import listing_of
from snapshot.env.store.repository import ROOT
from snapshot.env.target.environment import scan
from snapshot.env.target.moves import plan_moves
from tests.support.snapshot.env_builders import (
    TARGETS,
    a_folder,
    a_repository,
    a_restorer,
    contents,
    saved,
)
from tests.unit.snapshot.env.format.test_manifest import FRAMES, HEAD

WILD = st.text(
    st.sampled_from(["a", "b", "A", ".", "/", "\0", "~", "é", "\udcff", " ", "-"]), max_size=12
)
"""Paths and links as an attacker might write them."""
NAMES = st.sampled_from(["a", "b", "c", "dd", "e.py"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@st.composite
def trees(draw):
    """Files and links by path, as a dictionary; directories follow from them."""
    found = {}
    for path in draw(st.lists(PATHS, max_size=8, unique=True)):
        if any(above in found for above in parents_of(path)) or any(
            other.startswith(f"{path}/") for other in found
        ):
            continue
        found[path] = draw(st.one_of(st.binary(max_size=30), st.none()))
    return found


def write_tree(folder, tree):
    """Make a directory equal to a tree; ``None`` is an empty directory."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    for path, data in tree.items():
        whole = Path(folder) / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            whole.mkdir()
        else:
            whole.write_bytes(data)


@st.composite
def entries(draw):
    """Valid entries in order, as a save could have written them."""
    found = {(0, ""): a_folder(""), (1, ""): a_folder("", 1)}
    for target in (0, 1):
        for path in draw(st.lists(PATHS, max_size=6, unique=True)):
            above = [found.get((target, p)) for p in parents_of(path)]
            if any(e is not None and e.kind is not Kind.DIRECTORY for e in above) or (
                target, path) in found:  # fmt: skip
                continue
            for parent in parents_of(path)[:-1]:
                found.setdefault((target, parent), a_folder(parent, target))
            found[target, path] = draw(_entry(target, path))
    return tuple(found[place] for place in sorted(found))


def _entry(target, path):
    digest = hashlib.sha256(b"abc").digest()
    return st.one_of(
        st.builds(
            lambda mode, time: Entry(target, path, Kind.FILE, mode, time, 3, digest),
            st.integers(0, 0o777),
            st.integers(-(1 << 62), 1 << 62),
        ),
        st.just(Entry(target, path, Kind.DELETED)),
        st.just(a_folder(path, target)),
        st.just(Entry(target, path, Kind.LINK, 0, 1, link="a")),
    )


CONTENTS = {hashlib.sha256(b"abc").digest(): Place(0, 0, 3)}


@given(entries())
def test_a_manifest_reads_back_as_it_was(listed):
    manifest = Manifest(head=HEAD, entries=listed, contents=CONTENTS, frames=FRAMES)

    assert decode_manifest(encode_manifest(manifest), name="m") == manifest


@given(entries())
def test_what_a_save_could_have_written_is_accepted(listed):
    check_entries(listed, TARGETS, Limits(case_pairs=True))


@given(entries(), st.data())
def test_one_damaged_byte_is_noticed(listed, data):
    manifest = Manifest(head=HEAD, entries=listed, contents=CONTENTS, frames=FRAMES)
    whole = bytearray(encode_manifest(manifest))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))

    try:
        read = decode_manifest(bytes(whole), name="m")
    except (IntegrityError, StateError):
        return
    assert read == manifest  # a byte that means nothing


@given(st.binary(max_size=300))
def test_bytes_of_anything_are_no_manifest(data):
    with pytest.raises((IntegrityError, StateError)):
        decode_manifest(b"OMNIENV\0\x01\0\0\0" + data, name="m")


@given(st.lists(st.tuples(WILD, WILD, st.sampled_from(list(Kind))), max_size=12))
def test_whatever_passes_the_check_stays_inside_when_it_is_written(wild):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "env" / "bin"
        (Path(folder) / "env" / "lib").mkdir(parents=True)
        targets = (Target("bin", str(root)), Target("lib", f"{folder}/env/lib"))
        outside = Path(folder) / "secret"
        outside.write_text("untouched")
        listed = [a_folder(""), a_folder("", 1)]
        for path, link, kind in wild:
            mode = 0o700 if kind is Kind.DIRECTORY else 0
            digest = b"d" * 32 if kind is Kind.FILE else b""
            more = sorted([*listed, Entry(0, path, kind, mode, 1, 0, digest, link)])
            try:
                check_entries(more, targets)
            except IntegrityError:
                continue
            listed = more
        event(f"{len(listed) - 2} entries passed")
        _write(listed, targets)

        assert outside.read_text() == "untouched"
        assert {p.name for p in Path(folder).iterdir()} == {"env", "secret"}
        assert {p.name for p in Path(folder, "env").iterdir()} == {"bin", "lib"}
        for path in Path(folder).rglob("*"):
            if path.is_symlink():
                led = os.path.realpath(path)
                assert led.startswith((str(root), f"{folder}/env/lib"))


def _write(listed, targets):
    """Extract in the plainest way, which trusts every entry."""
    for entry in listed:
        path = (
            f"{targets[entry.target].path}/{entry.path}"
            if entry.path
            else targets[entry.target].path
        )
        if entry.kind is Kind.DIRECTORY:
            Path(path).mkdir(parents=True, exist_ok=True)
        elif entry.kind is Kind.LINK:
            Path(path).symlink_to(entry.link)
        elif entry.kind is Kind.FILE:
            Path(path).write_bytes(b"")


@given(trees(), trees())
def test_a_difference_applied_to_the_one_gives_the_other(before, after):
    with tempfile.TemporaryDirectory() as folder:
        target = Target("t", f"{folder}/t")
        write_tree(target.path, before)
        first = scan([target])
        write_tree(target.path, after)
        second = scan([target])

    delta = difference(first, second)
    applied = {place: each for place, each in first.items() if not _below(place, delta.deleted)}
    for place in delta.changed:
        if second[place].kind is not Kind.DIRECTORY:
            applied = {p: each for p, each in applied.items() if not _below(p, [place])}
        applied[place] = second[place]

    assert applied == dict(second)


def _below(place, tops):
    number, path = place
    return any((number, above) in tops for above in [path, *parents_of(path)])


@given(entries(), st.dictionaries(PATHS, st.sampled_from([Kind.FILE, Kind.DIRECTORY, Kind.LINK])))
def test_every_entry_is_put_in_place_by_exactly_one_move(listed, there):
    moves = plan_moves(listing_of(listed), lambda number, path: there.get(path))

    placed = {(m.target, m.path) for m in moves}
    assert len(placed) == len(moves)
    for entry in listed:
        above = [(entry.target, p) for p in parents_of(entry.path)]
        over = [place for place in above if place in placed]
        is_whole = (entry.target, entry.path) in placed
        assert len(over) + is_whole <= 1
        if entry.kind in (Kind.FILE, Kind.LINK):
            assert len(over) + is_whole == 1


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 100)), max_size=10),
    st.integers(1, 200),
)
def test_reads_bring_every_wanted_byte_once(sizes, wishes, unit_bytes):
    frames, at = [], len(HEADER)
    for size in sizes:
        frames.append(Frame(at, size, size))
        at += size
    total = sum(sizes)
    wanted = {offset: min(size, total - offset) for offset, size in wishes if offset < total}

    units = read_units(frames, wanted, unit_bytes=unit_bytes)

    read = [byte for unit in units for byte in range(unit.raw_offset, unit.raw_end)]
    assert len(read) == len(set(read))
    needed = {b for offset, size in wanted.items() for b in range(offset, offset + size)}
    assert needed <= set(read)
    assert all(unit.stored_bytes == unit.raw_end - unit.raw_offset for unit in units)


JSON = st.recursive(
    st.one_of(st.integers(-9, 9), st.text(max_size=3)),
    lambda below: st.dictionaries(st.sampled_from("abc"), below, max_size=3),
    max_leaves=6,
)


@given(JSON, JSON)
def test_keys_are_equal_exactly_where_documents_are(left, right):
    one, other = {"version": 1, "x": left}, {"version": 1, "x": right}

    assert (key_of(one) == key_of(other)) == (one == other)


@settings(max_examples=15)
@given(trees(), trees(), st.integers(0, 3))
def test_what_was_installed_is_what_is_restored(added, changed, empty):
    script = (
        "import os, sys\n"
        f"trees = {added!r}, {changed!r}\n"
        "for name, tree in zip(('lib/site-packages/n', 'lib/site-packages/shared/m'), trees):\n"
        "    for path, data in tree.items():\n"
        "        whole = f'{sys.argv[1]}/{name}/{path}'\n"
        "        os.makedirs(os.path.dirname(whole), exist_ok=True)\n"
        "        if data is None: os.mkdir(whole)\n"
        "        else: open(whole, 'wb').write(data)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment, manifest, held = saved(folder, script)

        restored = a_restorer(environment, folder).restore(manifest.head.key, "copy")

        assert restored.form == "copy"
        assert contents(environment) == held


@settings(max_examples=25)
@given(st.data())
def test_a_damaged_pack_never_becomes_a_file(damaged_store, data):
    folder, key, targets = damaged_store
    pack = next((Path(folder) / "store" / ROOT / "packs").iterdir())
    whole = pack.read_bytes()
    broken = bytearray(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken[at] ^= data.draw(st.integers(1, 255))
    pack.write_bytes(broken)
    cache = NodeCache(Path(folder) / "cache")
    try:
        with a_repository(Path(folder) / "store") as repository:
            tree = provide(cache, repository, key, targets)
    except IntegrityError:
        assert cache.tree(key) is None
    else:
        assert tree.changed_files(digests=True) == []  # the header, which a restore does not read
        cache.drop(key)
    finally:
        pack.write_bytes(whole)


@pytest.fixture(scope="module")
def damaged_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    environment, manifest, _ = saved(folder)
    return folder, manifest.head.key, environment.targets
