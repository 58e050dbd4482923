"""Calls that may never return."""

import threading

import pytest

from omniload.base import waiting
from omniload.base.errors import UnavailableError
from omniload.base.waiting import within


def test_an_answer_is_returned():
    assert within(60, lambda: 3, what="a store") == 3


@pytest.mark.parametrize("error", [ValueError("wrong"), TimeoutError("slow"), KeyboardInterrupt()])
def test_what_the_call_raises_is_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        within(60, fail, what="a store")

    assert caught.value is error


def test_a_call_that_does_not_return_is_left_behind_and_named(monkeypatch, caplog):
    release = threading.Event()
    told = []
    monkeypatch.setattr(waiting, "_TOLD_EVERY_S", 0.02)
    monkeypatch.setattr(waiting._LOG, "info", lambda text, *given: told.append(text % given))

    with pytest.raises(UnavailableError, match=r"s3://b: no answer within 0\.05 s"):
        within(0.05, release.wait, what="s3://b")

    release.set()
    assert told
    assert all(line.startswith("s3://b: no answer for") for line in told)
