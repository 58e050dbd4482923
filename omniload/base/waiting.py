"""Calls that may never return, given a limit: those of stores, whose clients have waits of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TypeVar

from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger

__all__ = ["within"]

Answer = TypeVar("Answer")

_TOLD_EVERY_S = 10.0
_LOG = get_logger(__name__)


def within(limit_s: float, call: Callable[[], Answer], *, what: str) -> Answer:
    """Return what ``call`` returns, if it does so within the limit.

    The call runs in a thread of its own, which is left behind where the limit passes: no
    client of a store can be made to end a call. A line is logged every ten seconds.

    Args:
        limit_s: Most seconds to wait.
        call: What may not return.
        what: Whom the call asks for what, for messages.

    Raises:
        UnavailableError: The limit passed.
        BaseException: What ``call`` raises.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            found = call()
        except BaseException as error:  # noqa: BLE001 -- raised again by whoever waits
            with suppress(InvalidStateError):
                answer.set_exception(error)
        else:
            with suppress(InvalidStateError):
                answer.set_result(found)

    threading.Thread(target=run, name=f"omniload-within-{what[:40]}", daemon=True).start()
    waited_s = 0.0
    while True:
        patience_s = min(_TOLD_EVERY_S, limit_s - waited_s)
        try:
            return answer.result(timeout=patience_s)
        except FutureTimeoutError:
            if answer.done():  # the call itself raised one
                raise
        waited_s += patience_s
        if waited_s >= limit_s:
            raise UnavailableError(
                f"{what}: no answer within {limit_s:g} s; see whether the store can be reached from here"
            )
        _LOG.info("%s: no answer for %.0f s, given up after %g s", what, waited_s, limit_s)
