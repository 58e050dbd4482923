"""Thread pools for waits on a store or a disk: work that they refuse is never done later."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from typing_extensions import override

from omniload.base.errors import StateError

__all__ = ["CallPool", "StorePool"]

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class CallPool(ThreadPoolExecutor):
    """A thread pool that reports a refusal only if the call will not run."""

    @override
    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            # The system refuses another thread. The call is already queued, and the existing threads will run it. An
            # error here would make the caller do something else while the call runs all the same.
            if self._threads:
                return
            self._work_queue.get_nowait()
            raise


class StorePool(CallPool):
    """A thread pool that refuses work which it could never do: that of a process forked off later.

    A forked process has no threads of its parent, and the clients of most stores do not
    survive a fork either, so a wait for them would never end.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        super().__init__(max_workers, name)
        # A child has this object and its queue, but none of its threads, and neither shows that.
        self._process = os.getpid()

    def check_process(self) -> None:
        """Check that this is the process that made the pool.

        Raises:
            StateError: This process was forked off since.
        """
        if self._process != (here := os.getpid()):
            raise StateError(
                f"the store was opened by process {self._process}, and {here} was forked off it since, "
                "without its threads; open it in each process, or start them by spawn or forkserver"
            )

    @override
    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        self.check_process()
        return super().submit(fn, *args, **kwargs)
