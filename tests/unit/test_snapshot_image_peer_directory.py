"""The directory of nodes: who is told of whom, and for how long."""

import threading
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError
from snapshot.image import peer_directory, peer_joining
from snapshot.image.peer_directory import NodeJoined, NodeLeft, PeerDirectory, Ticked, group_of
from snapshot.image.peer_joining import check_ray
from snapshot.image.peer_ray import DirectoryActor, run

ONE, TWO, THREE = "node1:7070", "node2:7070", "[::1]:7070"
OURS, THEIRS = group_of("ours"), group_of("theirs")
A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def joined(name=ONE, group=OURS, blobs=(A,), now_s=0.0):
    return NodeJoined(name, group, frozenset(blobs), now_s)


@pytest.fixture
def directory():
    return PeerDirectory(silent_s=30.0)


def test_who_joined_is_named_in_an_order_that_is_the_same_for_all(directory):
    for name in (TWO, THREE, ONE):
        assert directory.handle(joined(name)) == ()

    assert directory.who(OURS, [A]) == tuple(sorted([ONE, TWO, THREE]))


def test_only_nodes_that_show_one_of_the_layers_are_named(directory):
    directory.handle(joined(ONE, blobs=(A, B)))
    directory.handle(joined(TWO, blobs=(B,)))

    assert directory.who(OURS, [A]) == (ONE,)
    assert directory.who(OURS, [A, B]) == (ONE, TWO)
    assert directory.who(OURS, []) == ()


def test_nodes_of_another_token_are_not_told_of_each_other(directory):
    directory.handle(joined(ONE))
    directory.handle(joined(TWO, THEIRS))
    directory.handle(joined(ONE, THEIRS))

    assert directory.who(OURS, [A]) == (ONE,)
    assert directory.who(THEIRS, [A]) == (ONE, TWO)


def test_who_leaves_is_gone_and_says_so_once(directory):
    directory.handle(joined(ONE))
    directory.handle(joined(ONE, THEIRS))

    assert directory.handle(NodeLeft(ONE, OURS)) == (ONE,)
    assert directory.handle(NodeLeft(ONE, OURS)) == ()
    assert directory.who(THEIRS, [A]) == (ONE,)


def test_who_is_silent_for_too_long_is_gone(directory):
    directory.handle(joined(ONE, now_s=0.0))
    directory.handle(joined(TWO, now_s=10.0))

    assert directory.handle(Ticked(30.0)) == ()
    assert directory.handle(Ticked(31.0)) == (ONE,)
    assert directory.who(OURS, [A]) == (TWO,)
    directory.handle(joined(TWO, now_s=31.0))
    assert directory.handle(Ticked(60.0)) == ()


def test_who_joins_again_shows_what_it_shows_now(directory):
    directory.handle(joined(ONE, blobs=(A,)))
    directory.handle(joined(ONE, blobs=(B,)))

    assert directory.who(OURS, [A]) == ()
    assert directory.who(OURS, [B]) == (ONE,)


@pytest.mark.parametrize(
    "event",
    [
        joined("n o d e:1"),
        joined(""),
        joined("x" * 400),
        joined("node:1\n"),
        joined(group="ours"),
        joined(blobs=map(str, range(600))),
    ],
)
def test_what_is_no_node_is_refused(directory, event):
    with pytest.raises(ValueError, match="layers"):
        directory.handle(event)

    assert directory.who(OURS, [A]) == ()


def test_the_number_of_nodes_is_bounded(directory, monkeypatch):
    monkeypatch.setattr(peer_directory, "MAX_NODES", 2)
    directory.handle(joined(ONE))
    directory.handle(joined(TWO))

    with pytest.raises(ValueError, match="2 nodes have joined"):
        directory.handle(joined(THREE))
    directory.handle(joined(ONE, now_s=1.0))

    assert directory.who(OURS, [A]) == (ONE, TWO)


def test_the_name_of_a_group_does_not_tell_its_token():
    assert group_of("secret") != group_of("secret2")
    assert "secret" not in group_of("secret")


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from([ONE, TWO, THREE]), st.sampled_from([A, B])),
        st.tuples(st.just("leave"), st.sampled_from([ONE, TWO, THREE]), st.none()),
        st.tuples(st.just("wait"), st.floats(0, 40), st.none()),
    ),
    max_size=30,
)


@given(EVENTS)
def test_the_directory_agrees_with_a_plain_list(events):
    directory, plain, now_s = PeerDirectory(silent_s=30.0), {}, 0.0
    for kind, what, blob in events:
        if kind == "join":
            directory.handle(joined(what, blobs=(blob,), now_s=now_s))
            plain[what] = (blob, now_s)
        elif kind == "leave":
            directory.handle(NodeLeft(what, OURS))
            plain.pop(what, None)
        else:
            now_s += what
            directory.handle(Ticked(now_s))
            plain = {n: (b, seen) for n, (b, seen) in plain.items() if now_s - seen <= 30.0}

    for wanted in (A, B):
        assert list(directory.who(OURS, [wanted])) == sorted(
            name for name, (blob, _) in plain.items() if blob == wanted
        )


def test_the_actor_notes_who_serves_and_answers_who_does_not():
    clock = FakeClock()
    actor = DirectoryActor(clock)

    assert actor.join(ONE, OURS, [A]) == [ONE]
    assert actor.join("", OURS, [A]) == [ONE]
    clock.advance(31.0)
    assert actor.join(TWO, OURS, [A]) == [TWO]
    actor.leave(TWO, OURS)
    assert actor.join("", OURS, [A]) == []


def told(answers, **changes):
    """Return what is told where the directory answers so; an exception is raised."""
    waiting = iter(answers)

    def ask():
        found = next(waiting)
        if isinstance(found, Exception):
            raise found
        return found

    return list(run(ask, threading.Event(), repeat(0.0, len(answers))))


def test_only_what_changed_is_told():
    assert told([[ONE], [ONE], [ONE, TWO], [ONE, TWO]]) == [
        {"members": [ONE]},
        {"members": [ONE, TWO]},
    ]


@pytest.mark.parametrize("error", [RayActorError(), OSError("away"), RuntimeError("no cluster")])
def test_a_directory_in_trouble_is_told_once_and_again_when_it_is_back(error):
    first, second, third = told([[ONE], error, error, [ONE]])

    assert first == third == {"members": [ONE]}
    assert type(error).__name__ in second["problem"]


def test_asking_ends_when_it_is_told_to():
    ended = threading.Event()
    ended.set()

    assert list(run(lambda: [ONE], ended, repeat(0.0))) == [{"members": [ONE]}]


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(peer_joining.importlib.util, "find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=r"pip install 'omniload-data\[ray\]'"):
        check_ray()
