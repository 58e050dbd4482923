"""What becomes of snapshots: the machine's answers, and what it refuses."""

import pytest

from snapshot.engines.containerd.records import (
    InvalidSnapshotError,
    Snapshot,
    SnapshotExistsError,
    SnapshotInUseError,
    SnapshotMissingError,
    Snapshots,
    parse_filters,
)


def prepare(machine, key, parent="", kind="active", **labels):
    return machine.add(key, parent, labels, kind=kind, now_ns=1)


def commit(machine, name, key, **labels):
    return machine.commit(key, name, labels, (7, 2), 3)


def layer(machine, name, parent="", layers=1):
    return machine.add(
        name, parent, {}, kind="committed", now_ns=2, image="sha256:i", layers=layers
    )


@pytest.fixture
def found():
    """Two lazy layers, one committed folder on them, and a container on that."""
    machine = Snapshots()
    layer(machine, "one")
    layer(machine, "two", "one", 2)
    prepare(machine, "three-new", "two")
    commit(machine, "three", "three-new")
    prepare(machine, "box", "three", job="a")
    return machine


def test_a_new_place_has_the_next_number():
    machine = Snapshots()

    first = prepare(machine, "a", shown="yes")
    second = prepare(machine, "b", kind="view")

    assert (first.number, first.kind) == (1, "active")
    assert (second.number, second.kind) == (2, "view")
    assert machine.get("a").labels == {"shown": "yes"}


def test_a_commit_keeps_the_number_under_a_new_name_and_with_new_labels():
    machine = Snapshots()
    prepare(machine, "a", old="1")

    made = commit(machine, "layer", "a", new="2")

    assert (made.key, made.number, made.kind) == ("layer", 1, "committed")
    assert (made.labels, made.size_bytes, made.inodes) == ({"new": "2"}, 7, 2)
    assert (made.created_ns, made.updated_ns) == (1, 3)
    assert machine.by_key == {"layer": made}


def test_a_chain_is_told_from_above_to_below(found):
    chain = found.parents(found.get("box"))

    assert [parent.key for parent in chain] == ["three", "two", "one"]
    assert [parent.is_lazy for parent in chain] == [False, True, True]


def test_a_snapshot_is_removed_only_when_nothing_lies_on_it(found):
    with pytest.raises(SnapshotInUseError, match="'two' has 1 on it"):
        found.remove("two")

    gone = [found.remove(key).key for key in ("box", "three", "two", "one")]

    assert gone == ["box", "three", "two", "one"]
    assert found.by_key == {}


def test_numbers_are_not_used_again_while_the_machine_lives(found):
    found.remove("box")

    assert prepare(found, "box", "three").number == 5


def test_a_kept_state_goes_on_where_it_was(found):
    again = Snapshots.of(list(found.by_key.values()))

    assert again.by_key == found.by_key
    assert again.next_number == found.next_number
    with pytest.raises(SnapshotInUseError):
        again.remove("three")
    again.remove("box")
    again.remove("three")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: prepare(m, "box"), SnapshotExistsError, "'box' is here already"),
        (lambda m: prepare(m, ""), InvalidSnapshotError, "without a name"),
        (lambda m: prepare(m, "new", "none"), SnapshotMissingError, "'none' is not here"),
        (lambda m: prepare(m, "new", "box"), InvalidSnapshotError, "parent 'box' is active"),
        (lambda m: commit(m, "new", "none"), SnapshotMissingError, "'none'"),
        (lambda m: commit(m, "three", "box"), SnapshotExistsError, "'three'"),
        (lambda m: commit(m, "new", "three"), SnapshotInUseError, "'three' is committed"),
        (lambda m: m.remove("none"), SnapshotMissingError, "'none'"),
        (lambda m: layer(m, "one"), SnapshotExistsError, "'one'"),
        (lambda m: layer(m, "new", "three", 3), InvalidSnapshotError, "shows 0 lazy layers"),
        (lambda m: layer(m, "new", "two", 2), InvalidSnapshotError, "shows 2 lazy layers"),
        (lambda m: layer(m, "new", "", 2), InvalidSnapshotError, "shows 0 lazy layers"),
        (
            lambda m: m.relabel("box", {}, ["parent"], 1),
            InvalidSnapshotError,
            "'parent' of snapshot 'box' never changes",
        ),
        (lambda m: m.relabel("none", {}, [], 1), SnapshotMissingError, "'none'"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(found, change, error, message):
    before = (dict(found.by_key), found.next_number)

    with pytest.raises(error, match=message):
        change(found)

    assert (found.by_key, found.next_number) == before


@pytest.mark.parametrize(
    ("paths", "labels", "after"),
    [
        ((), {"x": "1"}, {"x": "1"}),
        (("labels",), {"x": "1"}, {"x": "1"}),
        (("labels.x",), {"x": "1", "y": "2"}, {"job": "a", "x": "1"}),
        (("labels.job",), {}, {}),
        (("labels.a.b/c",), {"a.b/c": "1"}, {"job": "a", "a.b/c": "1"}),
    ],
)
def test_labels_change_as_a_whole_or_one_by_one(found, paths, labels, after):
    made = found.relabel("box", labels, paths, 9)

    assert made.labels == after
    assert made.updated_ns == 9
    assert found.get("box") == made


LAYER = Snapshot(
    key="default/4/box",
    number=1,
    parent="sha256:below",
    kind="committed",
    labels={"containerd.io/snapshot.ref": "sha256:aa", "plain": 'a "word"', "a.b": "dotted"},
    created_ns=0,
    updated_ns=0,
)
BOTTOM = Snapshot(
    key="bottom", number=2, parent="", kind="active", labels={}, created_ns=0, updated_ns=0
)


def holds(*filters, of=LAYER):
    return parse_filters(filters)(of)


@pytest.mark.parametrize(
    "text",
    [
        "name==default/4/box",
        'name=="default/4/box"',
        "kind==committed",
        "parent==sha256:below",
        'labels."containerd.io/snapshot.ref"==sha256:aa',
        'labels."containerd.io/snapshot.ref"==sha256:aa,parent=="sha256:below"',
        r'labels.plain=="a \"word\""',
        "labels.a.b==dotted",
        " name == default/4/box , kind == committed ",
    ],
)
def test_a_filter_that_fits_holds(text):
    assert holds(text)
    assert not holds(text + ",name==another")


@pytest.mark.parametrize(
    "text",
    [
        "name==default",
        "kind==view",
        "labels.none==x",
        "name.deep==x",
        "unknown==x",
    ],
)
def test_a_filter_that_does_not_fit_does_not_hold(text):
    assert not holds(text)


def test_no_filter_asks_for_everything_and_of_several_one_is_enough():
    assert holds()
    assert holds("name==x", "kind==committed")
    assert not holds("name==x", "name==y")


def test_what_lies_at_the_bottom_has_an_empty_parent():
    """As containerd asks when it looks for a lazy layer that lies on nothing."""
    assert holds('parent==""', of=BOTTOM)
    assert not holds('parent==""')


@pytest.mark.parametrize(
    "text",
    [
        "==x",
        "name==",
        "name=x",
        "name==a b",
        'labels."open==x',
        "name~=box",
        "name!=x",
        "name",
        ",",
    ],
)
def test_what_is_no_filter_is_refused(text):
    with pytest.raises(InvalidSnapshotError):
        parse_filters([text])


def test_a_filter_without_end_is_refused():
    with pytest.raises(InvalidSnapshotError, match="70000 characters"):
        parse_filters(["a" * 70_000])
