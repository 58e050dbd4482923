"""torch's iterators, which note the batches they hand out. Workers, queues, pinning and errors are torch's."""

import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.utils.data import IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)
from typing_extensions import override

from omniload.base.errors import UnavailableError
from omniload.base.linux.parent_watch import end_with
from trainer_integration.loader.hung_workers import StackPipes, show_stack_on_signal
from trainer_integration.loader.resuming.progress import Progress
from trainer_integration.loader.samples import Carried, CarryingCollate
from trainer_integration.loader.transport.room import Room
from trainer_integration.loader.transport.sealing import DirectContext, SealingCollate

if TYPE_CHECKING:
    from trainer_integration.loader.data_loader import DataLoader

__all__ = [
    "CLOSED",
    "ManyProcesses",
    "Noting",
    "OneProcess",
    "Prefetching",
    "Settings",
    "WorkerStart",
    "WorkerTimeoutError",
    "sealing",
]

_log = logging.getLogger(__name__)

CLOSED = "the loader was closed: iterate it again"


class WorkerTimeoutError(UnavailableError, RuntimeError):
    """A worker did not give its batch within ``timeout=``."""


class Settings:
    """A loader's settings for torch's iterators, some of them replaced."""

    def __init__(self, loader: Any, replaced: dict[str, Any]) -> None:
        self._loader = loader
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def sealing(dataset: Any, collate: Any, workers: int) -> Any:
    """Return the ``collate_fn`` of the workers, which uses shared memory if this machine has it."""
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        return collate
    try:
        return SealingCollate(collate, Room(workers))
    except OSError as error:
        _log.warning("batches come torch's way, for there is no memory to share: %s", error)
        return collate


class WorkerStart:
    """A worker's ``worker_init_fn``: our own start first, then the user's."""

    def __init__(self, user: Any, progress: Progress, pipes: StackPipes | None) -> None:
        self._user, self._samples, self._own = user, progress.samples, progress.own
        self._parent = os.getpid()
        self._writers = None if pipes is None else pipes.writers

    def __call__(self, worker: int) -> None:
        """Begin in a worker."""
        # torch looks up the parent after this, and by then would find the process that adopted the worker.
        end_with(self._parent)
        if self._samples is not None:
            # get_worker_info() shows the user's dataset, not its wrapper. torch's class forbids this assignment, but
            # its fields belong to that one worker's process.
            object.__setattr__(get_worker_info(), "dataset", self._samples.dataset)
        if self._writers is not None:
            show_stack_on_signal(self._writers[worker])
        if self._user is not None:
            self._user(worker)
        if self._own is not None:
            self._own.begin(worker)


class Noting:
    """Behaviour that all iterators add to torch's."""

    _progress: Progress
    _moved: "DataLoader[Any] | None" = None
    """A loader that was given a state after this iterator was made."""

    def _replaced(self, loader: Any) -> dict[str, Any]:
        """Begin, and return the settings that replace the loader's own in torch's iterator."""
        self._progress = progress = loader._begin()
        replaced: dict[str, Any] = {"_index_sampler": progress.order}
        if progress.samples is not None:
            replaced["dataset"] = progress.samples
        if progress.seed is not None:
            # The base seed was drawn in the run that saved the state, so no generator of the user is touched.
            replaced["generator"] = torch.Generator()
        return replaced

    @property
    def _base_seed(self) -> int:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._seed = drawn if self._progress.seed is None else self._progress.seed
        self._progress.began(self._seed)

    def __next__(self) -> Any:
        if self._moved is not None:
            self._here()
        try:
            batch = self._torchs_next()
        except StopIteration:
            self._progress.finished()
            raise
        self._gave()
        return batch

    def _torchs_next(self: Any) -> Any:
        """Return torch's next batch; no profiler's mark is set unless one runs, because it costs more than the rest."""
        # For an iterable dataset, torch warns there if it is longer than announced.
        if self._dataset_kind == _DatasetKind.Iterable or _profiler_enabled():
            return super().__next__()  # type: ignore[misc]
        if self._sampler_iter is None:
            self._reset(None)
        batch = self._next_data()
        self._num_yielded += 1
        return batch

    def _here(self) -> None:
        """Go to the place of a state that the loader was given meanwhile."""
        loader, self._moved = self._moved, None
        if loader is not None and loader._pending is not None:
            self._stop_making()
            # In place, because the trainer's loop holds this very iterator.
            self.__init__(loader)  # type: ignore[misc]

    def _gave(self) -> None:
        """Note that the trainer has one more batch."""
        raise NotImplementedError

    def _stop_making(self) -> None:
        """End everything that makes batches ahead; the base class has nothing to end."""


class Prefetching(Noting, _BaseDataLoaderIter):  # type: ignore[misc]
    """Batches that are made ahead elsewhere, in the order of their indices."""

    _end: "weakref.finalize[Any, Any]"
    """Stops the making of further batches; it is dead once it has been called."""

    def __init__(self, loader: Any) -> None:
        """Go to the begin of an epoch, or to the place in an epoch that a loaded state of ``loader`` names."""
        super().__init__(Settings(loader, self._replaced(loader)))  # type: ignore[arg-type]
        self._num_yielded = self._progress.batches_before
        self._ahead = loader.prefetch_factor * loader.num_workers
        self._asked: deque[Any] = deque()
        """Results of ``_submit`` for batches that the trainer does not have yet."""

    def _begin(self, loader: Any) -> None:  # noqa: ARG002 -- for the subclass that joins a group anew
        """Ask for the first batches of an epoch."""
        # Batches requested for the previous epoch are still made, and dropped.
        self._asked.clear()
        self._given = 0
        self._ask()

    @override
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._progress.next_epoch()
        loader._progress = self._progress
        super()._reset(loader, first_iter)
        self._begin(loader)

    def _ask(self) -> None:
        while len(self._asked) < self._ahead:
            try:
                index = self._next_index()  # type: ignore[no-untyped-call]
            except StopIteration:
                return
            self._asked.append(self._submit(index))

    def _submit(self, index: Any) -> Any:
        """Have the batch of ``index`` made."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Advance to the batch after the first requested one."""
        self._asked.popleft()
        self._given += 1
        self._ask()

    @override
    def _gave(self) -> None:
        self._progress.gave(self._given)

    @override
    def _stop_making(self) -> None:
        self._end()


class OneProcess(Noting, _SingleProcessDataLoaderIter):  # type: ignore[misc]
    """Batches made in this process."""

    def __init__(self, loader: Any) -> None:
        """Begin an epoch, or continue in the epoch of a state that ``loader`` was given."""
        replaced = self._replaced(loader)
        if self._progress.own is not None:
            # This comes before the base seed is drawn, because a dataset may set the generator that it comes from.
            self._progress.own.begin(0)
        super().__init__(Settings(loader, replaced))
        self._num_yielded = self._progress.batches_before

    @override
    def _gave(self) -> None:
        self._progress.gave(self._progress.order.epoch.tasks)


class ManyProcesses(Noting, _MultiProcessingDataLoaderIter):  # type: ignore[misc]
    """Batches made by torch's workers."""

    _shutdown = True
    """Until there are workers, there are none to end."""

    def __init__(self, loader: Any) -> None:
        """Start the workers, and begin or continue as ``OneProcess`` does."""
        replaced = self._replaced(loader)
        progress, pipes = self._progress, None
        self._user_collate, self._user_start = loader.collate_fn, loader.worker_init_fn
        self._context = loader.multiprocessing_context or torch.multiprocessing
        collate = sealing(loader.dataset, loader.collate_fn, loader.num_workers)
        replaced["collate_fn"] = self._carrying(collate)
        replaced["multiprocessing_context"] = DirectContext(self._context)
        if loader.timeout > 0:
            pipes = StackPipes(self._context, loader.num_workers)
        replaced["worker_init_fn"] = WorkerStart(loader.worker_init_fn, progress, pipes)
        super().__init__(Settings(loader, replaced))
        self._pipes_of = [pipes] * loader.num_workers
        if pipes is not None:
            # From here on, a pipe ends with its worker, because no other process can write into it.
            pipes.close_writers()

    def _carrying(self, collate: Any) -> Any:
        """Return the workers' ``collate_fn``, which adds the dataset's state if it has one."""
        stateful = self._progress.samples or self._progress.own
        return collate if stateful is None else CarryingCollate(collate, stateful)

    @property  # type: ignore[override, explicit-override]
    def _worker_queue_idx_cycle(self) -> Iterator[int]:
        return self._turns

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, turns: Iterator[int]) -> None:
        # torch begins an epoch at worker 0; a resumed epoch continues with the worker whose turn it is.
        self._turns = itertools.islice(turns, self._progress.take_first_worker(), None)

    @override
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._progress.next_epoch()
            loader._progress = self._progress
        super()._reset(loader, first_iter)
        self._num_yielded = self._progress.batches_before

    @override
    def _gave(self) -> None:
        # By number if in order; otherwise by the received batches, because a later one may be handed out first.
        if self._in_order:
            self._progress.gave(self._rcvd_idx)
        else:
            self._progress.gave_any(self._task_info)

    @override
    def _process_data(self, data: Any, worker_idx: int) -> Any:
        batch = super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]
        if isinstance(batch, Carried):
            self._progress.carried(worker_idx, batch.state)
            return batch.batch
        self._progress.carried(worker_idx, None)
        return batch

    @override
    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # Identified by its text, because torch raises one class for an exceeded limit and for a dead worker.
            if self._timeout > 0 and str(error).startswith("DataLoader timed out"):
                raise WorkerTimeoutError(f"{error}: {self._awaited()}") from None
            raise

    def _awaited(self) -> str:
        task = self._rcvd_idx
        worker = self._task_info[task][0]
        # An iterable dataset has no indices.
        index = (
            ""
            if self._progress.samples
            else f" of indices {self._progress.order.epoch.index_of(task)!r:.400}"
        )
        pid = self._workers[worker].pid
        pipes = self._pipes_of[worker]
        stacks = "" if pipes is None else pipes.stack_of(worker, pid)
        return f"worker {worker} (pid {pid}) has not given the batch{index}. Where it is:\n{stacks}"

    @override
    def _stop_making(self) -> None:
        self._shutdown_workers()

    @override
    def _shutdown_workers(self) -> None:
        if not self._shutdown and any(map(_has_fallen_silent, self._index_queues)):
            for worker in self._workers:
                worker.terminate()
        super()._shutdown_workers()


def _has_fallen_silent(queue: Any) -> bool:
    """Return whether nothing that is put into a queue reaches its worker any more.

    The threads of its queues end before an iterator that Python collects as part of a cycle, such as one that a trainer
    of Lightning holds. Its workers then never learn that they must end, and torch waits 5 s for each.
    """
    return queue._close is not None and not queue._close.still_active()
