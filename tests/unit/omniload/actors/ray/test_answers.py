"""Errors that come back from Ray: what an actor raised, what became of it, and what is a fault of the project."""

import threading

import pytest

from omniload.base.errors import DefectError, IntegrityError, StateError, UnavailableError

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

from omniload.actors.ray import answers
from omniload.actors.ray.answers import actor_named, has_ended, plain_error


def raised_in_actor(cause):
    return RayTaskError("take", "Traceback: planner.py:135", cause, "ray::Planner", 1, "127.0.0.2")


@pytest.mark.parametrize("error", [ValueError("no such name"), AssertionError("no class of it")])
def test_an_actor_that_ray_cannot_find_or_cannot_load_is_unavailable(monkeypatch, error):
    def lost(_):
        raise error

    monkeypatch.setattr(answers.ray, "get_actor", lost)

    with pytest.raises(UnavailableError, match="has no planner any more"):
        actor_named("planner")


def test_an_error_of_the_project_comes_back_as_it_is():
    cause = IntegrityError("bad record")

    assert plain_error(raised_in_actor(cause), "the planner") is cause
    assert plain_error(raised_in_actor(raised_in_actor(cause)), "the planner") is cause


def test_a_dead_actor_is_unavailable():
    told = plain_error(ActorDiedError(), "the planner")

    assert type(told) is UnavailableError
    assert "the planner has died" in str(told)


@pytest.mark.parametrize("error", [OutOfMemoryError("worker killed"), GetTimeoutError("late")])
def test_what_ray_could_not_do_is_unavailable(error):
    assert type(plain_error(error, "the planner")) is UnavailableError
    assert type(plain_error(raised_in_actor(error), "the planner")) is UnavailableError


@pytest.mark.parametrize(
    "cause", [KeyError((0, 3)), AssertionError("step"), RayError("not pickled")]
)
def test_a_bug_in_a_role_is_never_told_as_unavailable(cause, caplog):
    told = plain_error(raised_in_actor(cause), "the planner")

    assert type(told) is DefectError
    assert "a fault of omniload itself in the planner" in str(told)
    assert "planner.py:135" in caplog.text


def test_a_future_that_raises_a_bug_of_this_side_is_a_defect():
    assert type(plain_error(KeyError("x"), "a source loader")) is DefectError
    assert type(plain_error(StateError("released"), "a source loader")) is StateError


@pytest.mark.parametrize(
    ("there", "answer", "ended"),
    [
        (True, ActorDiedError(), True),
        (True, raised_in_actor(UnavailableError("the store is away")), False),
        (True, "found", False),
        (False, ActorDiedError(), False),  # nothing is known yet
    ],
)
def test_only_an_actor_whose_process_has_ended_is_gone(monkeypatch, there, answer, ended):
    def get(ref):
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(answers, "there", lambda *_: there)
    monkeypatch.setattr(answers.ray, "get", get)

    assert has_ended(answer) is ended


@pytest.mark.parametrize("call", ["wait", "get"])
def test_where_the_ray_of_a_host_has_ended_a_rank_is_told_so(monkeypatch, call):
    def broken(*_, **__):
        raise OSError("Broken pipe")

    monkeypatch.setattr(answers.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(answers.ray, call, broken)

    with pytest.raises(UnavailableError, match="Ray has ended on this host"):
        answers.answer_to("a batch", "constructor-0")


def test_a_missing_file_of_a_role_is_no_end_of_ray(monkeypatch):
    class MissingInActorError(RayTaskError, FileNotFoundError):
        cause = FileNotFoundError("no such file")

        def __init__(self):
            pass

    def get(ref):
        raise MissingInActorError

    monkeypatch.setattr(answers.ray, "get", get)

    with pytest.raises(MissingInActorError):
        answers.value_of("a batch")


def test_what_the_head_was_asked_is_waited_for_before_ray_is_left():
    told = threading.Event()
    asked = answers.from_head(told.wait)

    assert not answers.head_is_left(0.0)
    told.set()
    assert asked.result(10.0)
    assert answers.head_is_left(10.0)
