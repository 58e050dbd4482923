"""A Ray that this process was connected to before a plane is opened or joined."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray import finding, tokens
from omniload.actors.ray.given import attached, namespaces
from omniload.base.errors import StateError


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
def looks_in(monkeypatch):
    # As in a process that is no role: one looks in its plane for as long as it lives.
    monkeypatch.setattr(namespaces, "_USERS", 0)
    with ExitStack() as stack:

        def look_in(namespace):
            ends = namespaces.look_in(namespace)
            stack.callback(ends)
            return ends

        yield look_in


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_the_ray_of_this_process_is_used_where_it_is_the_one_that_is_named(monkeypatch, address):
    connected(monkeypatch, attached)

    attached.require_same(address)


@pytest.mark.parametrize("address", ["10.0.0.2:6379", "10.0.0.1:6380", "no host of that name:6379"])
def test_another_is_refused_with_both(monkeypatch, address):
    connected(monkeypatch, attached)
    monkeypatch.setattr(attached.socket, "gethostbyname", lambda host: host)
    monkeypatch.setattr(attached, "answers", lambda address, within_s: False)

    with pytest.raises(StateError, match=rf"Ray at 10.0.0.1:6379, .* names that at {address}"):
        attached.require_same(address)


@pytest.mark.parametrize(("there", "is_same"), [("number", True), ("another", False)])
def test_another_address_of_the_same_head_is_told_by_the_number_of_its_ray(
    monkeypatch, there, is_same
):
    connected(monkeypatch, attached)
    monkeypatch.setattr(attached.socket, "gethostbyname", lambda host: host)
    monkeypatch.setattr(attached, "answers", lambda address, within_s: True)
    modules = {
        "ray._private.worker": SimpleNamespace(
            global_worker=SimpleNamespace(gcs_client=SimpleNamespace(cluster_id="number"))
        ),
        "ray._raylet": SimpleNamespace(GcsClient=lambda address: SimpleNamespace(cluster_id=there)),
    }
    monkeypatch.setattr(attached, "import_module", modules.get)

    with nullcontext() if is_same else pytest.raises(StateError, match="names that at head:6379"):
        attached.require_same("head:6379")


def test_actors_of_the_plane_are_looked_for_in_its_namespace_and_not_in_that_of_the_process(
    monkeypatch, looks_in
):
    named = [
        {"namespace": "omniload-a", "name": "planner+1"},
        {"namespace": "omniload-b", "name": "planner+2"},
    ]
    connected(monkeypatch, namespaces, finding, named=named)
    looks_in("omniload-a")

    assert finding.newest_actor("planner") == (
        "planner+1",
        ("planner+1", {"namespace": "omniload-a"}),
    )


def test_they_are_looked_for_in_that_of_the_process_where_it_is_the_same(monkeypatch, looks_in):
    named = [{"namespace": "omniload-a", "name": "planner"}]
    connected(monkeypatch, namespaces, finding, namespace="omniload-a", named=named)
    looks_in("omniload-a")

    assert finding.newest_actor("planner") == ("planner", ("planner", {}))


def test_a_process_that_is_connected_asks_with_what_it_was_connected_with(monkeypatch):
    connected(monkeypatch, tokens)

    assert tokens.use_given_token() == "as this process is connected already"


def test_a_process_looks_for_actors_of_one_plane_at_a_time_until_all_who_do_have_ended(
    monkeypatch, looks_in
):
    connected(monkeypatch, namespaces)
    first, again = looks_in("omniload-a"), looks_in("omniload-a")

    for ends in (first, first):  # the second call ends nobody else's look
        ends()
        with pytest.raises(
            StateError, match=r"at 10\.0\.0\.1:6379 \(omniload-a\), .* runtime.kind local"
        ):
            looks_in("omniload-b")
        assert namespaces.of_plane() == {"namespace": "omniload-a"}
    again()
    assert namespaces.of_plane() == {}
    looks_in("omniload-b")
    assert namespaces.of_plane() == {"namespace": "omniload-b"}
