"""A Ray that this process was connected to before a plane is opened or joined."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray import finding, tokens
from omniload.actors.ray.given import attached, namespaces, running
from omniload.base.errors import StateError, UnavailableError

LIMIT_S = 60.0


def connected(monkeypatch, *modules, namespace="of the trainer", named=()):
    context = SimpleNamespace(namespace=namespace, gcs_address="10.0.0.1:6379")
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: context,
        get_actor=lambda name, **where: (name, where),
        util=SimpleNamespace(
            list_named_actors=lambda **where: list(named) if where else [e["name"] for e in named]
        ),
    )
    for module in modules:
        monkeypatch.setattr(module, "ray", ray)


@pytest.fixture
def uses(monkeypatch):
    """Return the record of planes over the connection of a process that has no plane yet."""
    none_yet = SimpleNamespace(users=0, made=False, owned=False)
    monkeypatch.setattr(namespaces, "_CONNECTION", none_yet)
    return namespaces.use_connection


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_the_ray_of_this_process_is_used_where_it_is_the_one_that_is_named(monkeypatch, address):
    connected(monkeypatch, running)

    running.require_same(address)


@pytest.mark.parametrize("address", ["10.0.0.2:6379", "10.0.0.1:6380", "no host of that name:6379"])
def test_another_is_refused_with_both(monkeypatch, address):
    connected(monkeypatch, running)
    monkeypatch.setattr(running.socket, "gethostbyname", lambda host: host)
    monkeypatch.setattr(running, "answers", lambda address, within_s: False)

    with pytest.raises(StateError, match=rf"Ray at 10.0.0.1:6379, .* names the Ray at {address}"):
        running.require_same(address)


@pytest.mark.parametrize(("there", "is_same"), [("number", True), ("another", False)])
def test_another_address_of_the_same_head_is_told_by_the_number_of_its_ray(
    monkeypatch, there, is_same
):
    connected(monkeypatch, running)
    monkeypatch.setattr(running.socket, "gethostbyname", lambda host: host)
    monkeypatch.setattr(running, "answers", lambda address, within_s: True)
    modules = {
        "ray._private.worker": SimpleNamespace(
            global_worker=SimpleNamespace(gcs_client=SimpleNamespace(cluster_id="number"))
        ),
        "ray._raylet": SimpleNamespace(GcsClient=lambda address: SimpleNamespace(cluster_id=there)),
    }
    monkeypatch.setattr(running, "import_module", modules.get)

    with (
        nullcontext() if is_same else pytest.raises(StateError, match="names the Ray at head:6379")
    ):
        running.require_same("head:6379")


def test_actors_of_a_plane_are_looked_for_in_its_namespace_whatever_else_the_process_is_part_of(
    monkeypatch,
):
    named = [
        {"namespace": "omniload-a", "name": "planner+1"},
        {"namespace": "omniload-b", "name": "planner+2"},
    ]
    connected(monkeypatch, namespaces, finding, named=named)

    for namespace, name in (("omniload-a", "planner+1"), ("omniload-b", "planner+2")):
        found = finding.newest_actor("planner", namespace)
        assert found == (name, (name, {"namespace": namespace}))


def test_they_are_looked_for_in_that_of_the_process_where_it_is_the_same(monkeypatch):
    named = [{"namespace": "omniload-a", "name": "planner"}]
    connected(monkeypatch, namespaces, finding, namespace="omniload-a", named=named)

    assert finding.newest_actor("planner", "omniload-a") == ("planner", ("planner", {}))


def test_a_process_that_is_connected_asks_with_what_it_was_connected_with(monkeypatch):
    connected(monkeypatch, tokens)

    assert tokens.use_given_token() == "as this process is connected already"


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("made", [True, False])
def test_the_last_plane_leaves_a_connection_that_the_first_one_made_and_no_other(uses, made, order):
    planes = [uses(made=made and not number) for number in range(3)]

    left = [planes[number]() for number in order]

    assert left == [False, False, made]
    assert [plane() for plane in planes] == [False] * 3  # each ends once
    assert uses(made=False)() is False


def test_a_plane_in_the_ray_that_another_has_started_for_itself_is_refused_until_that_one_ends(
    monkeypatch,
):
    connected(monkeypatch, attached, namespaces, namespace="omniload-a")
    ends = namespaces.own_the_ray()

    with pytest.raises(
        StateError, match=r"at 10\.0\.0\.1:6379 \(omniload-a\), .* runtime.kind to local"
    ):
        attached.SharedCluster("auto")
    ends()

    namespaces.require_not_owned()


@pytest.fixture
def at_work():
    """Let another thread of this process use its connection."""
    begun, ends = threading.Event(), threading.Event()

    @namespaces.in_turn("connects to the Ray at head:6379")
    def work():
        begun.set()
        ends.wait(LIMIT_S)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(work)
        assert begun.wait(LIMIT_S)
        yield ends
        ends.set()


def test_a_thread_waits_while_another_connects_or_leaves_and_says_for_whom(
    at_work, monkeypatch, caplog
):
    monkeypatch.setattr(namespaces, "_TOLD_AFTER_S", 1e-3)
    caplog.handler.addFilter(lambda _: at_work.set() or True)  # the other ends when that is logged

    with namespaces.in_turn("leaves its Ray"), namespaces.in_turn("ends what it has left"):
        pass

    (said,) = caplog.messages
    assert said == (
        "a thread that leaves its Ray waits up to 330 s for another thread of this process, which connects to the Ray "
        "at head:6379"
    )


def test_a_wait_for_another_thread_that_connects_has_an_end(at_work, monkeypatch):
    monkeypatch.setattr(namespaces, "_TOLD_AFTER_S", 1e-3)
    monkeypatch.setattr(namespaces, "_TURN_S", 2e-3)

    with (
        pytest.raises(
            UnavailableError, match=r"leaves its Ray .* which connects to the Ray at head:6379;"
        ),
        namespaces.in_turn("leaves its Ray"),
    ):
        pass
    at_work.set()


def test_what_fails_in_its_turn_ends_it(monkeypatch):
    monkeypatch.setattr(namespaces, "_TOLD_AFTER_S", 1e-3)
    monkeypatch.setattr(namespaces, "_TURN_S", 2e-3)
    with pytest.raises(StateError), namespaces.in_turn("starts a Ray"):
        raise StateError("it is another Ray")

    with ThreadPoolExecutor(1) as threads:
        threads.submit(namespaces.in_turn("leaves it")(lambda: None)).result(LIMIT_S)
