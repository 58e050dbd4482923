"""What a role's answer comes to."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from omniload.actors.roles.links import Failed, Unread, outcome_of
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import IntegrityError, UnavailableError
from omniload.machine.messages import SamplesReported
from tests.support.plane.builders import a_table


def answered(error):
    future = Future()
    future.set_exception(error)
    return future


@pytest.mark.parametrize("source", [None, 3])
def test_an_error_is_a_failure_of_the_role(source):
    error = UnavailableError("a store did not answer")

    assert outcome_of(answered(error), "a role", source=source) == Failed(error, source)


def test_a_read_that_was_given_up_as_the_plane_closes_is_none(caplog):
    begun = threading.Event()

    def waiting():
        begun.set()
        while True:
            threading.Event().wait(0.01)

    pool = DaemonPool(1, "test", reads=True)
    read = pool.submit(waiting)
    assert begun.wait(60)
    assert pool.close(60)

    assert outcome_of(read, "a source loader", source=0) is None
    assert caplog.messages == []


def test_what_cannot_be_read_ends_the_planning_once_it_is_needed_and_not_read_by_another():
    bad, unread = IntegrityError("a.jsonl:3: is not JSON"), Unread()
    unread.note(Failed(bad, 1))
    unread.check(lambda source: source == 0)

    with pytest.raises(IntegrityError, match="is not JSON"):
        unread.check(lambda source: source == 1)

    unread.hear(SimpleNamespace(source=1))  # no report
    with pytest.raises(IntegrityError):
        unread.check(lambda _: True)
    unread.hear(SamplesReported(source=1, table=a_table([1])))
    unread.check(lambda _: True)
