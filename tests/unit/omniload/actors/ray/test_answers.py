"""Errors of Ray's answers: errors that an actor raised, the fate of an actor, and defects of the project."""

import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

from omniload.base.clock import Deadline, FakeClock
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import (
    ConfigError,
    DefectError,
    IntegrityError,
    StateError,
    UnavailableError,
)

pytest.importorskip("ray")
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from omniload.actors.ray import answers
from omniload.actors.ray.answers import has_ended, log_failure, plain_error, why_ended


def raised_in_actor(cause):
    return RayTaskError("take", "Traceback: planner.py:135", cause, "ray::Planner", 1, "127.0.0.2")


def test_an_error_of_the_project_comes_back_as_it_is():
    cause = IntegrityError("bad record")

    assert plain_error(raised_in_actor(cause), "the planner") is cause
    assert plain_error(raised_in_actor(raised_in_actor(cause)), "the planner") is cause


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("of the host, as Ray saw")])
def test_a_dead_actor_is_unavailable(error):
    told = plain_error(error, "the planner")

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


NO_MODULE = """\x1b[36mray::loader-0:LoaderActor.__init__()\x1b[39m (pid=1, ip=127.0.0.1)
  At least one of the input arguments for this task could not be computed:
ray.exceptions.RaySystemError: System error: No module named 'omniload'
traceback: Traceback (most recent call last):
ModuleNotFoundError: No module named 'omniload'
"""
OTHER_RELEASE = """\x1b[36mray::loader-0:LoaderActor.__init__()\x1b[39m (pid=1, ip=127.0.0.1)
RuntimeError: The actor with name LoaderActor failed to import on the worker.
AttributeError: Can't get attribute 'LoaderShell.a' on <module 'omniload.actors.roles.loader'>
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NO_MODULE, "ModuleNotFoundError: No module named 'omniload'"),
        (OTHER_RELEASE, "AttributeError: Can't get attribute 'LoaderShell.a'"),
    ],
)
def test_workers_of_a_given_ray_without_this_release_are_for_the_user_to_mend(text, why):
    died = RayActorError(error_msg=text, actor_init_failed=True)
    called = raised_in_actor(RaySystemError("System error", text))

    for told in (plain_error(died, "loader-0"), plain_error(called, "loader-0")):
        assert type(told) is ConfigError
        assert str(told).startswith(f"loader-0 cannot run in the workers of this Ray ({why}")
        assert "report" not in str(told)


def test_an_actor_whose_constructor_fails_otherwise_is_a_defect():
    died = RayActorError(
        error_msg="ray::Role.__init__()\nAttributeError: 'Role' object has no attribute 'a'",
        actor_init_failed=True,
    )

    assert type(plain_error(died, "loader-0")) is DefectError


def test_a_future_that_raises_a_bug_of_this_side_is_a_defect():
    assert type(plain_error(KeyError("x"), "a source loader")) is DefectError
    assert type(plain_error(StateError("released"), "a source loader")) is StateError


@pytest.mark.parametrize(
    ("there", "answer", "ended"),
    [
        (True, ActorDiedError(), True),
        (True, OutOfMemoryError("Ray ended it"), True),
        (True, raised_in_actor(OutOfMemoryError("Ray ended it")), True),
        (True, GetTimeoutError("late"), False),
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

    monkeypatch.setattr(answers, "wait_for_ref", lambda *_: there)
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


@pytest.fixture
def stopped(monkeypatch):
    """A clock, and waits of its first turn in which this process was stopped for an hour; nothing ever comes."""
    clock, stops = FakeClock(), [3600.0]

    def late(turn_s):
        clock.sleep(turn_s + (stops.pop() if stops else 0.0))

    def ray_wait(refs, timeout):
        late(timeout)
        return [], refs

    monkeypatch.setattr(answers, "Deadline", partial(Deadline, now_s=clock.now_s))
    monkeypatch.setattr(answers.ray, "wait", ray_wait)
    monkeypatch.setattr(answers, "wait", lambda _, timeout: late(timeout))
    return clock


def test_time_in_which_a_process_is_stopped_does_not_count_as_it_waits_for_an_answer(stopped):
    with pytest.raises(UnavailableError, match="constructor-0 gave no answer within 60 s"):
        answers.answer_to("a batch", "constructor-0")

    assert stopped.now_s() == pytest.approx(3660.0)


def test_time_in_which_a_process_is_stopped_does_not_count_as_it_waits_for_a_future(stopped):
    assert not answers.wait_for_future(Future(), 60.0, lambda: None)

    assert stopped.now_s() == pytest.approx(3660.0)


@pytest.mark.parametrize("waits", ["wait_for_ref", "wait_for_future"])
def test_no_time_is_one_look(stopped, waits):
    looks = []

    assert not getattr(answers, waits)(Future(), 0.0, lambda: looks.append("looked"))

    assert looks == ["looked"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ActorDiedError(), ["loader-0 did not release samples: it was lost meanwhile"]),
        (
            RayTaskError("release", "", StateError("it holds none")),
            ["loader-0 did not release samples: it holds none"],
        ),
        (None, []),
    ],
)
def test_of_a_call_that_nobody_waits_for_the_error_is_logged_without_advice_where_others_follow(
    error, told, caplog
):
    answer = Future()
    log_failure(SimpleNamespace(future=lambda: answer), "loader-0", "release samples")

    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)

    assert caplog.messages == told


def test_what_the_head_was_asked_is_waited_for_before_ray_is_left():
    told = threading.Event()
    asked = answers.ask_head(told.wait)

    assert not answers.wait_for_head(0.0)
    told.set()
    assert asked.result(60.0)
    assert answers.wait_for_head(10.0)


@pytest.fixture
def calls():
    pool = DaemonPool(1, "calls")
    yield pool
    assert pool.close(10.0)


@pytest.mark.parametrize("error", [None, ActorDiedError()])
def test_an_actor_that_a_thread_calls_is_waited_for_by_its_answer(calls, error):
    told, thread = Future(), Future()

    def call():
        thread.set_result(threading.current_thread())
        return told.result(60.0)

    answer = answers.call_in_thread(call, calls)
    assert thread.result(60.0) is not threading.current_thread()
    assert not answers.wait_for_future(answer, 0.0, lambda: None)
    if error is None:
        told.set_result("batches")
    else:
        told.set_exception(error)

    assert answers.wait_for_future(answer, 10.0, lambda: None)
    assert answers.error_of(answer) is error
    if error is None:
        assert answer.result() == "batches"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (OSError("Broken pipe"), "Ray has ended on this host"),
        (UnavailableError("the data plane was closed"), "the data plane was closed"),
    ],
)
def test_what_keeps_a_thread_from_calling_an_actor_is_the_answer(calls, raised, told):
    def call():
        raise raised

    with pytest.raises(UnavailableError, match=told):
        answers.call_in_thread(call, calls).result(60.0)


def test_a_call_that_was_not_made_before_its_plane_was_closed_is_answered_with_that():
    pool = DaemonPool(1, "calls")
    pool.close(10.0)

    answer = answers.call_in_thread(Future, pool)

    assert answer.done()
    assert isinstance(error := answers.error_of(answer), UnavailableError)
    assert "was closed" in str(error)


def test_whoever_waits_for_an_answer_looks_again_until_it_is_told_to_leave():
    looks = []

    def check():
        looks.append(1)
        if len(looks) == 3:
            raise UnavailableError("the plane is gone")

    with pytest.raises(UnavailableError, match="is gone"):
        answers.wait_for_future(Future(), 60.0, check)


def test_an_answer_that_is_there_is_given_though_its_plane_is_gone():
    def gone():
        raise UnavailableError("the plane is gone")

    answer = Future()
    answer.set_result("batches")

    assert answers.wait_for_future(answer, 1.0, gone)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ActorDiedError(), "has ended (ActorDiedError)"),
        (ActorUnavailableError("reset", b"1" * 16), "cannot be reached (ActorUnavailableError)"),
    ],
)
def test_a_process_that_is_cut_off_is_not_said_to_have_ended(error, said):
    assert why_ended(error) == f"its process {said}"
