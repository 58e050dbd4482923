"""The verdict on every error of Ray: some mean the end of an actor, and some only a lost answer."""

import inspect

import pytest

pytest.importorskip("ray")

from ray import exceptions
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectFetchTimedOutError,
    ObjectFreedError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    OutOfMemoryError,
    OwnerDiedError,
    PendingCallsLimitExceeded,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from omniload.actors.ray.answers import is_lost, may_live, plain_error
from omniload.actors.ray.errors.verdict import VERDICTS, Verdict, verdict_of
from omniload.base.errors import DefectError, UnavailableError

OF_RAY = {
    name: kind
    for name, kind in vars(exceptions).items()
    if inspect.isclass(kind) and issubclass(kind, RayError) and not issubclass(kind, RayTaskError)
}
LOST = "0" * 56, None, ""
"""An object, its owner, and the place of the request."""


def raised_in_actor(cause):
    return RayTaskError("take", "Traceback: constructor.py:9", cause, "ray::Role", 1, "127.0.0.2")


def test_every_error_of_this_ray_has_a_verdict_of_its_own():
    """A new release of Ray may have others: add what each means for the actor that was called."""
    assert sorted(OF_RAY.keys() - VERDICTS.keys()) == []


def test_each_error_that_ray_has_a_list_of_is_one_of_those_that_were_looked_at():
    listed = {kind.__name__ for kind in exceptions.RAY_EXCEPTION_TYPES} - {"RayTaskError"}

    assert listed <= OF_RAY.keys()
    assert len(OF_RAY) >= len(listed) > 20


@pytest.mark.parametrize(
    ("error", "lost", "lives"),
    [
        (ActorDiedError(), True, False),
        (WorkerCrashedError(), True, False),
        (NodeDiedError("its host is gone"), True, False),
        (LocalRayletDiedError(), True, False),
        (OutOfMemoryError("Ray ended it"), True, False),
        (ActorUnschedulableError("its node is gone"), True, False),
        (ActorUnavailableError("the connection was reset", None), True, True),
        (ObjectLostError(*LOST), True, True),
        (ObjectFetchTimedOutError(*LOST), True, True),
        (ObjectReconstructionFailedError("0" * 56), True, True),
        (OwnerDiedError(*LOST), True, True),
        (TaskCancelledError(), True, True),
        (GetTimeoutError("late"), False, False),
        (ObjectFreedError(*LOST), False, False),
        (RayActorError(actor_init_failed=True), False, False),
        (KeyError("step"), False, False),
        (UnavailableError("the store is away"), False, False),
    ],
)
def test_who_is_lost_and_who_may_live(error, lost, lives):
    for told in (error, raised_in_actor(error), raised_in_actor(raised_in_actor(error))):
        assert (is_lost(told), may_live(told)) == (lost, lives)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (NodeDiedError("its host is gone"), UnavailableError, "has died (NodeDiedError)"),
        (ActorUnavailableError("reset", None), UnavailableError, "cannot be reached"),
        (OwnerDiedError(*LOST), UnavailableError, "answer of a source loader was lost"),
        (GetTimeoutError("late"), UnavailableError, "gave no answer: GetTimeoutError: late"),
        (PendingCallsLimitExceeded("9"), DefectError, "a fault of omniload itself"),
        (RayActorError(actor_init_failed=True), DefectError, "a fault of omniload itself"),
    ],
)
def test_what_a_user_is_told(error, kind, says):
    told = plain_error(error, "a source loader")

    assert type(told) is kind
    assert says in str(told)


def test_an_error_of_a_release_to_come_counts_as_the_one_that_it_is_made_from():
    class HostPreemptedError(NodeDiedError):
        pass

    class SomethingElseError(RayError):
        pass

    assert verdict_of(HostPreemptedError("for another job")) is Verdict.ENDED
    assert verdict_of(SomethingElseError()) is Verdict.REFUSED


def test_every_error_is_told_as_one_of_the_project_and_no_verdict_is_idle():
    """An actor's error is represented by its class alone here: Ray's errors need arguments that only Ray has."""
    told = {name: verdict_of(kind.__new__(kind)) for name, kind in OF_RAY.items()}

    assert {name: VERDICTS[name] for name in OF_RAY} == told
    assert set(told.values()) == set(Verdict)
