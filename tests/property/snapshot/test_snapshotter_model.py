"""Any sequence of requests: the machine and its kept state agree with a model that is too simple to be wrong."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omniload.base.errors import OmniloadError
from snapshot.engines.containerd.chain import chain_ids, mounts_of, split_chain
from snapshot.engines.containerd.records import (
    InvalidSnapshotError,
    Snapshot,
    SnapshotExistsError,
    SnapshotInUseError,
    SnapshotMissingError,
    Snapshots,
    parse_filters,
)
from snapshot.engines.containerd.store import SnapshotStore
from tests.support.snapshot.snapshotter_builders import a_digest, a_kept_image

KEYS = st.sampled_from(["", *"abcdef"])
LABELS = st.dictionaries(st.sampled_from(["x", "y/z"]), st.sampled_from(["", "1", "2"]))
IMAGE = a_kept_image()


class SnapshotsAgreeWithTheModel(RuleBasedStateMachine):
    """The model: names to (kind, parent, labels, lazy layers), and rules read off containerd's documents."""

    def __init__(self):
        super().__init__()
        self.machine = Snapshots()
        self.store = SnapshotStore(Path(":memory:"))
        self.model = {}
        self.numbers = set()

    def teardown(self):
        self.store.close()

    def expect(self, change, error, modelled):
        """Make a change; the model gives the error that it must raise, or the resulting state."""
        before = dict(self.machine.by_key)
        if error is not None:
            with pytest.raises(error):
                change()
            assert self.machine.by_key == before
            return None
        found = change()
        modelled()
        return found

    def expect_new(self, change, error, modelled, image=None):
        found = self.expect(change, error, modelled)
        if found is not None:
            assert found.number not in self.numbers
            self.numbers.add(found.number)
            self.store.keep(found, image)

    def expect_kept(self, change, error, modelled):
        found = self.expect(change, error, modelled)
        if found is not None:
            self.store.keep(found)

    def error_of_new(self, key, parent):
        if not key:
            return InvalidSnapshotError
        if key in self.model:
            return SnapshotExistsError
        if parent and parent not in self.model:
            return SnapshotMissingError
        if parent and self.model[parent][0] != "committed":
            return InvalidSnapshotError
        return None

    @rule(key=KEYS, parent=KEYS, labels=LABELS, kind=st.sampled_from(["active", "view"]))
    def prepare(self, key, parent, labels, kind):
        self.expect_new(
            lambda: self.machine.add(key, parent, labels, kind=kind, now_ns=1),
            self.error_of_new(key, parent),
            lambda: self.model.update({key: (kind, parent, labels, 0)}),
        )

    @rule(key=KEYS, parent=KEYS, layers=st.integers(1, 3))
    def find_layer(self, key, parent, layers):
        error = self.error_of_new(key, parent)
        if error is None and layers != (self.model[parent][3] if parent else 0) + 1:
            error = InvalidSnapshotError
        found = {"kind": "committed", "image": IMAGE.digest, "layers": layers}
        self.expect_new(
            lambda: self.machine.add(key, parent, {}, now_ns=2, **found),
            error,
            lambda: self.model.update({key: ("committed", parent, {}, layers)}),
            IMAGE,
        )

    @rule(name=KEYS, key=KEYS, labels=LABELS)
    def commit(self, name, key, labels):
        if key not in self.model:
            error = SnapshotMissingError
        elif self.model[key][0] != "active":
            error = SnapshotInUseError
        else:
            error = self.error_of_new(name, "")
        self.expect_kept(
            lambda: self.machine.commit(key, name, labels, (1, 1), 3),
            error,
            lambda: self.model.update(self.committed(name, key, labels)),
        )

    def committed(self, name, key, labels):
        _, parent, _, _ = self.model.pop(key)
        return {name: ("committed", parent, labels, 0)}

    @rule(key=KEYS)
    def remove(self, key):
        error = None
        if key not in self.model:
            error = SnapshotMissingError
        elif any(parent == key for _, parent, _, _ in self.model.values()):
            error = SnapshotInUseError
        gone = self.expect(lambda: self.machine.remove(key), error, lambda: self.model.pop(key))
        if gone is not None:
            self.store.forget(gone)

    @rule(key=KEYS, labels=LABELS, path=st.sampled_from(["", "labels", "labels.x", "name"]))
    def relabel(self, key, labels, path):
        error = None
        if key not in self.model:
            error = SnapshotMissingError
        elif path == "name":
            error = InvalidSnapshotError
        self.expect_kept(
            lambda: self.machine.relabel(key, labels, [path] if path else [], 4),
            error,
            lambda: self.relabelled(key, labels, path),
        )

    def relabelled(self, key, labels, path):
        kind, parent, old, layers = self.model[key]
        changed = {**old, "x": labels.get("x", "")} if path == "labels.x" else labels
        changed = {name: value for name, value in changed.items() if value}
        self.model[key] = (kind, parent, changed, layers)

    @precondition(lambda self: self.model)
    @rule()
    def start_again(self):
        """Restart as after a crash: only the kept state counts."""
        self.machine = Snapshots.of(self.store.snapshots())
        self.numbers = {snapshot.number for snapshot in self.machine.by_key.values()}

    @invariant()
    def both_tell_the_same(self):
        told = {
            key: (found.kind, found.parent, dict(found.labels), found.layers)
            for key, found in self.machine.by_key.items()
        }
        assert told == self.model

    @invariant()
    def what_is_kept_is_what_is_so(self):
        kept = {snapshot.key: snapshot for snapshot in self.store.snapshots()}
        assert kept == self.machine.by_key

    @invariant()
    def an_image_is_kept_as_long_as_a_layer_names_it(self):
        named = any(layers for _, _, _, layers in self.model.values())
        try:
            self.store.image(IMAGE.digest)
            kept = True
        except OmniloadError:
            kept = False
        assert kept == named

    @invariant()
    def nothing_lazy_lies_on_a_folder(self):
        for snapshot in self.machine.by_key.values():
            folders, lazy = split_chain(self.machine.parents(snapshot))
            chain = [*folders, *([lazy] if lazy else [])]
            assert chain == list(self.machine.parents(snapshot))[: len(chain)]


TestSnapshotsAgreeWithTheModel = SnapshotsAgreeWithTheModel.TestCase


def a_snapshot(number, kind, layers):
    return Snapshot(
        key=str(number),
        number=number,
        parent="",
        kind=kind,
        labels={},
        created_ns=0,
        updated_ns=0,
        layers=layers,
    )


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["active", "view"]))
def test_a_mount_covers_every_folder_once_and_the_lazy_layers_by_one(folders, layers, kind):
    chain = [a_snapshot(20 + n, "committed", 0) for n in range(folders)]
    chain += [a_snapshot(10 + n, "committed", n) for n in range(layers, 0, -1)]

    (entry,) = mounts_of(a_snapshot(9, kind, 0), chain, lambda n: f"s{n}", lambda n: f"v{n}")

    lower = [f"s{20 + n}/fs" for n in range(folders)] + ([f"v{10 + layers}"] if layers else [])
    if entry.type == "bind":
        assert [entry.source] == (lower or ["s9/fs"])
        assert len(lower) == (0 if kind == "active" else min(len(lower), 1))
    else:
        assert entry.options[-1] == "lowerdir=" + ":".join(lower)
    writes = any(option.startswith("upperdir=s9") for option in entry.options)
    assert (writes or "rw" in entry.options) == (kind == "active")


@given(st.lists(st.text("ab", max_size=3), max_size=6))
def test_a_chain_id_depends_on_all_layers_below_and_none_above(names):
    digests = [a_digest(name) for name in names]

    ids = chain_ids(digests)

    assert len(ids) == len(digests)
    assert all(chain_ids(digests[: n + 1]) == ids[: n + 1] for n in range(len(ids)))
    assert len(set(ids)) == len(ids)


@given(st.text(max_size=40))
def test_a_filter_is_understood_or_refused_whatever_it_is(text):
    try:
        told = parse_filters([text])(a_snapshot(1, "active", 0))
    except InvalidSnapshotError as error:
        told = str(error)

    assert told in {True, False} or "filter" in told


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_a_quoted_value_is_compared_as_it_is(label, value):
    def quoted(text):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    holds = parse_filters([f"labels.{quoted(label)}=={quoted(value)}"])
    found = a_snapshot(1, "active", 0)

    assert holds(Snapshot(**{**_fields(found), "labels": {label: value}}))
    assert not holds(Snapshot(**{**_fields(found), "labels": {label: value + "x"}}))


def _fields(snapshot):
    return {name: getattr(snapshot, name) for name in snapshot.__slots__}
