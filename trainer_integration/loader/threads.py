"""Batches made by threads of this process: for datasets and transforms that release the interpreter's lock."""

import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind
from typing_extensions import override

from trainer_integration.loader.iterators import CLOSED, Prefetching, WorkerTimeoutError

__all__ = ["Lanes", "ManyThreads"]

_PATIENCE_S = 5.0
"""Time for a thread to end after its sample; torch waits as long for a worker."""
_Task = tuple[Future[Any], Any]


class Lanes:
    """Threads that call one function; each call returns a future."""

    def __init__(
        self, make: Callable[[Any], Any], threads: int, begin: Callable[[int], object] | None
    ) -> None:
        """Start ``threads`` threads; ``begin`` is called in each, with its number."""
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._over = threading.Event()
        self._at: dict[int, int] = {}
        """Identifier of the thread that runs a task, by the ``id`` of the task's future."""
        arguments = self._tasks, self._over, self._at, make, begin
        self._threads = [
            threading.Thread(
                target=_serve, args=(n, *arguments), name=f"omniload-loader-{n}", daemon=True
            )
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, argument: Any) -> Future[Any]:
        """Have a thread call the function."""
        future: Future[Any] = Future()
        self._tasks.put((future, argument))
        return future

    def stack_of(self, future: Future[Any]) -> str:
        """Return the stack of the thread that computes ``future``."""
        # The only way to another thread's stack. If the thread has advanced meanwhile, its new position is shown.
        frame = sys._current_frames().get(self._at.get(id(future), 0))
        # Without the frames of threading's own start.
        return "".join(traceback.format_stack(frame)[2:]) if frame else "no thread has begun it"

    def close(self) -> None:
        """End the threads, each after its present sample, and cancel the tasks that have not begun."""
        self._over.set()
        with suppress(Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task[0].cancel()
        # One end mark for each thread: a thread takes one and ends.
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            # A finalizer runs in whichever thread drops the last reference, which may be one of these.
            if thread is not threading.current_thread():
                thread.join(_PATIENCE_S)


def _serve(
    number: int,
    tasks: "SimpleQueue[_Task | None]",
    over: threading.Event,
    at: dict[int, int],
    make: Callable[[Any], Any],
    begin: Callable[[int], object] | None,
) -> None:
    why = _begun(number, begin)
    while (task := tasks.get()) is not None and not over.is_set():
        future, argument = task
        at[id(future)] = threading.get_ident()
        _answer(future, make, argument, why)
        at.pop(id(future), None)
        # A thread that waits for its next task must not hold the last batch.
        del task, future, argument
    if task is not None:
        task[0].cancel()  # taken while the lanes were being closed


def _begun(number: int, begin: Callable[[int], object] | None) -> list[BaseException]:
    try:
        if begin is not None:
            begin(number)
    except BaseException as error:  # noqa: BLE001 -- the first batch reports it
        return [RuntimeError(f"worker_init_fn failed in thread {number}: {error!r}"), error]
    return []


def _answer(
    future: Future[Any],
    make: Callable[[Any], Any],
    argument: Any,
    why: list[BaseException],
) -> None:
    if why:
        # An error holds the frames that it passed through, including the iterator's, so it is handed over only once.
        future.set_exception(why.pop() if len(why) > 1 else RuntimeError(*why[0].args))
        return
    try:
        future.set_result(make(argument))
    except BaseException as error:  # noqa: BLE001 -- raised where the batch is asked for
        future.set_exception(error)


class ManyThreads(Prefetching):
    """Batches made ahead by threads, in the order of their indices."""

    def __init__(self, loader: Any) -> None:
        """Begin an epoch, or continue in the epoch of a state that ``loader`` was given."""
        super().__init__(loader)
        fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
        )
        self._lanes = Lanes(
            _pinned(fetcher.fetch) if self._pin_memory else fetcher.fetch,
            loader.num_workers,
            loader.worker_init_fn,
        )
        # The threads hold no reference to the iterator: if it is dropped in mid-epoch, it is collected, and they end.
        self._end = weakref.finalize(self, self._lanes.close)
        self._begin(loader)

    @override
    def _submit(self, index: Any) -> Future[Any]:
        return self._lanes.submit(index)

    @override
    def _next_data(self) -> Any:
        if not self._asked:
            if not self._persistent_workers:
                self._end()
            raise StopIteration
        if not self._end.alive:
            raise RuntimeError(CLOSED)
        first: Future[Any] = self._asked[0]
        try:
            # torch's ``timeout=0`` waits without a limit.
            return first.result(self._timeout or None)
        except CancelledError:
            raise RuntimeError(CLOSED) from None
        except FutureTimeoutError:
            if first.done():  # the dataset's own error
                raise
            raise WorkerTimeoutError(self._awaited(first)) from None
        finally:
            # An abandoned wait leaves its batch in place, so that it can be asked for again.
            if first.done() and not first.cancelled():
                self._go_on()

    def _awaited(self, first: Future[Any]) -> str:
        index = self._progress.order.epoch.index_of(self._given)
        return (
            f"DataLoader timed out after {self._timeout} seconds: a thread has not given the batch of indices "
            f"{index!r:.400}. Where it is:\n{self._lanes.stack_of(first)}"
        )


def _pinned(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda index: pin_memory(make(index))  # type: ignore[no-untyped-call]
