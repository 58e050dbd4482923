"""The present holder of a role: the answers of Ray's head, and a rank's actions while it waits for it."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray import finding
from omniload.actors.ray.finding import Search, actor_named, await_newest, newest_of
from omniload.actors.ray.given import namespaces
from omniload.base.errors import UnavailableError

OWN = "omniload-a"
"""Namespace of this process."""


@pytest.fixture(autouse=True)
def _connected(monkeypatch):
    context = SimpleNamespace(namespace=OWN)
    monkeypatch.setattr(namespaces, "ray", SimpleNamespace(get_runtime_context=lambda: context))


@pytest.mark.parametrize("error", [ValueError("no such name"), AssertionError("no class of it")])
def test_an_actor_that_ray_cannot_find_or_cannot_load_is_unavailable(monkeypatch, error):
    def lost(*_, **__):
        raise error

    monkeypatch.setattr(finding.ray, "get_actor", lost)

    with pytest.raises(UnavailableError, match="has no planner any more"):
        actor_named("planner", OWN)


def test_the_newest_of_a_role_is_told_by_its_number_and_not_by_its_letters(monkeypatch):
    names = ["planner+9", "constructor-1", "planner", "planner+10", "constructor-10"]
    monkeypatch.setattr(finding.ray.util, "list_named_actors", lambda: names)

    assert [newest_of(role, OWN) for role in ("planner", "constructor-1", "loader-0")] == [
        "planner+10",
        "constructor-1",
        None,
    ]


def test_a_head_is_asked_once_until_it_answers_and_anew_after_that(monkeypatch):
    asked = []
    monkeypatch.setattr(finding, "ask_head", lambda _: asked.append(Future()) or asked[-1])
    search = Search("planner", OWN)

    assert search.found() is None
    assert search.ask() is search.ask()
    assert search.found() is None
    asked[0].set_exception(UnavailableError("it has just ended"))
    assert search.found() is None
    search.ask().set_result(("planner+1", "its actor"))

    assert search.found() == ("planner+1", "its actor")
    assert len(asked) == 2


def test_whoever_waits_for_a_member_looks_at_the_plane_before_each_pause(monkeypatch):
    done = []

    def ask_head(_):
        answer = Future()
        if len(done) < 4:
            answer.set_exception(UnavailableError("it has just ended"))
        else:
            answer.set_result(("planner+1", "its actor"))
        return answer

    monkeypatch.setattr(finding, "ask_head", ask_head)

    found = await_newest("planner", OWN, lambda: done.append("look"), lambda: done.append("pause"))

    assert found == ("planner+1", "its actor")
    assert done == ["look", "pause"] * 2


def test_whoever_waits_for_a_member_sees_that_the_plane_ends_while_the_head_does_not_answer(
    monkeypatch,
):
    def look():
        raise UnavailableError("the head takes no connection")

    monkeypatch.setattr(finding, "_LOOK_S", 0.0)
    monkeypatch.setattr(finding, "ask_head", lambda _: Future())

    with pytest.raises(UnavailableError, match="takes no connection"):
        await_newest("planner", OWN, look, lambda: None)


def test_whoever_waits_for_a_member_for_a_minute_is_told_so(monkeypatch):
    monkeypatch.setattr(finding, "_LOOK_S", 0.0)
    monkeypatch.setattr(finding, "_FOUND_S", 0.0)
    monkeypatch.setattr(finding, "ask_head", lambda _: Future())

    with pytest.raises(
        UnavailableError, match="no constructor-0 any more, and none took its place"
    ):
        await_newest("constructor-0", OWN, lambda: None, lambda: None)
