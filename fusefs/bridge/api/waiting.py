"""Futures: all that a handler may wait for, and how a binding waits for them.

A handler is a coroutine that yields a ``concurrent.futures.Future`` wherever it waits. So
a binding needs three lines to run a handler: send, wait for the future that it yields, send again.
A handler that yields no future is finished by the first ``send``, without a task or a loop.
"""

from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

__all__ = ["Handling", "all_done", "in_thread", "result_of", "run_blocking"]

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Handling = Coroutine[Future[Any], None, Result]
"""A handler under way: yields the futures that it waits for, returns its answer."""


class _Wait:
    """Awaits futures until all are done."""

    __slots__ = ("_futures",)

    def __init__(self, futures: Iterable[Future[Any]]) -> None:
        self._futures = futures

    def __await__(self) -> Generator[Future[Any], None, None]:
        for future in self._futures:
            # A finished future costs no turn of the loop: a handler without unfinished ones ends in its first step.
            if not future.done():
                yield future


async def result_of(future: "Future[Result]") -> Result:
    """Wait for a future and return its result, or raise its error."""
    await _Wait((future,))
    return future.result()


async def all_done(futures: Iterable[Future[Any]]) -> None:
    """Wait until every future is done; errors stay in the futures."""
    await _Wait(futures)


async def in_thread(
    pool: Executor,
    call: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> Result:
    """Run a blocking call in a pool and wait for its result."""
    return await result_of(pool.submit(call, *arguments, **named))


def run_blocking(handling: Handling[Result]) -> Result:
    """Run a handler to its end in this thread: for tests, and for work before the mount."""
    try:
        while True:
            future = handling.send(None)
            future.exception()  # waits; the handler itself looks at the result
    except StopIteration as stop:
        result: Result = stop.value
        return result
