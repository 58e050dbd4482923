"""The result of a role's answer."""

import threading
from concurrent.futures import Future

from omniload.actors.roles.links import Failed, outcome_of
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import UnavailableError


def answered(error):
    future = Future()
    future.set_exception(error)
    return future


def test_an_error_is_a_failure_of_the_role():
    error = UnavailableError("a store did not answer")

    assert outcome_of(answered(error), "a role") == Failed(error)


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

    assert outcome_of(read, "a source loader") is None
    assert caplog.messages == []
