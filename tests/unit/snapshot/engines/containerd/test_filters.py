"""Filters of lists: what containerd writes, what it means, and what is refused."""

import pytest

from snapshot.engines.containerd.filters import parse_filters
from snapshot.engines.containerd.records import InvalidSnapshotError, Snapshot

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
