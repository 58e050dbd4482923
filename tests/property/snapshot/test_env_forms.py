"""Forms that are made without their library equal those of the library, for any input."""

import hashlib
from collections import Counter

import orjson
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from snapshot.env.format.entries import Kind
from snapshot.env.key.interpreter import canonical_name
from snapshot.env.key.keys import VERSION, key_of
from snapshot.env.node.tree import listing_of
from snapshot.env.target.moves import plan_moves, staged
from tests.property.snapshot.test_env_properties import PATHS, entries
from tests.support.snapshot.env_builders import TARGETS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    TEXT | st.integers(0, 2**53) | st.booleans() | st.none(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(TEXT, below, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, JSON, max_size=5))
def test_a_key_is_the_digest_of_one_canonical_form_whatever_writes_it(document):
    document["version"] = VERSION

    written = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)

    assert key_of(document) == hashlib.sha256(written).hexdigest()


@given(st.text(st.sampled_from("aBz09._-é"), max_size=15))
def test_a_name_has_the_spelling_of_its_standard(name):
    assert canonical_name(name) == canonicalize_name(name)


KINDS = st.dictionaries(PATHS, st.sampled_from([Kind.FILE, Kind.DIRECTORY, Kind.LINK]))


@given(entries(), KINDS)
def test_every_file_is_staged_once_at_its_move_or_below_the_move_of_a_folder(listed, there):
    listing = listing_of(listed)
    moves = plan_moves(listing, lambda _, path: there.get(path))

    parts = list(staged(listing, moves, TARGETS))

    placed = Counter()
    for folder, into, names in parts:
        target = folder.own.target
        for name, staged_name in zip(folder.names, names or folder.names, strict=True):
            placed[target, folder.path_of(name)] += 1
            stage, _, rest = f"{into}/{staged_name}".partition("/stage/")
            number, _, inside = rest.partition("/")
            move = moves[int(number)]
            assert stage == f"{TARGETS[target].path}/.omniload-env"
            assert f"{move.path}/{inside}".rstrip("/") == folder.path_of(name)
    wanted = {(e.target, e.path) for e in listed if e.kind in (Kind.FILE, Kind.LINK)}
    assert placed == Counter(wanted)


@given(entries())
def test_a_listing_has_a_place_for_every_entry(listed):
    listing = listing_of(listed)

    held = sum(len(folder.names) for folder in listing.folders)
    assert held + len(listing.deleted) + len(listing.folders) == len(listed)
