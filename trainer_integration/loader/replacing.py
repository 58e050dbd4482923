"""Workers of a map dataset that are replaced where they hang or die, and the batches they owed made again."""

import logging
import queue
import time
from collections import Counter
from typing import Any

from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.worker import _ResumeIteration, _worker_loop
from typing_extensions import override

from trainer_integration.loader.hung_workers import StackPipes
from trainer_integration.loader.iterators import (
    ManyProcesses,
    WorkerStart,
    WorkerTimeoutError,
    sealing,
)
from trainer_integration.loader.samples import Carried

__all__ = ["Replacing"]

_log = logging.getLogger(__name__)
_TIMES = 3
"""How often one batch may stop a worker: what always stops is no accident."""
_LOOK_S = 1.0
_END_S = 5.0


class Replacing(ManyProcesses):
    """torch's workers; one that gives nothing within ``timeout=``, or has died, is replaced.

    The batches are those that there would have been, but for numbers that the dataset draws from
    its worker's generators: the new worker starts with the seed of the old one, and with the state that the
    dataset had, where it has one.
    """

    def __init__(self, loader: Any) -> None:
        """Start the workers, and begin or go on as ``OneProcess`` does."""
        self._stops: Counter[int] = Counter()
        self._earlier: list[Any] = []
        super().__init__(loader)
        # torch raises for a dead worker wherever the trainer stands at that moment.
        signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
        self._worker_pids_set = False

    @override
    def _get_data(self) -> Any:
        until_s = time.monotonic() + self._timeout
        while True:
            left_s = until_s - time.monotonic()
            try:
                # Woken each second, so that a dead worker is seen long before ``timeout=`` is over.
                data = self._data_queue.get(timeout=min(_LOOK_S, max(left_s, 0.001)))
            except queue.Empty:
                if self._replaced_any(late=left_s <= 0):
                    # The new worker has all of the limit for the batch.
                    until_s = time.monotonic() + self._timeout
                continue
            if self._is_owed(data[0]):
                return data

    def _is_owed(self, task: Any) -> bool:
        """Whether a message is of a batch that has not come: one may come of the old worker and the new."""
        return isinstance(task, _ResumeIteration) or len(self._task_info.get(task, ())) == 1

    def _replaced_any(self, *, late: bool) -> bool:
        if self._pin_memory and not self._pin_memory_thread.is_alive():
            raise RuntimeError("Pin memory thread exited unexpectedly")
        dead = [n for n, worker in enumerate(self._workers) if not worker.is_alive()]
        for worker in dead:
            code = self._workers[worker].exitcode
            self._replace(worker, f"worker {worker} has died (exit code {code})")
        if late and not dead:
            if self._rcvd_idx not in self._task_info:
                raise WorkerTimeoutError(
                    f"DataLoader timed out after {self._timeout} seconds: a worker has not begun the next epoch"
                )
            said = f"DataLoader timed out after {self._timeout} seconds: {self._awaited()}"
            self._replace(self._task_info[self._rcvd_idx][0], said)
        return bool(dead) or late

    def _replace(self, worker: int, why: str) -> None:
        owed = [
            task
            for task, info in sorted(self._task_info.items())
            if info[0] == worker and len(info) == 1
        ]
        if owed:
            self._stops[owed[0]] += 1
            if self._stops[owed[0]] >= _TIMES:
                index = self._progress.order.epoch.index_of(owed[0])
                raise WorkerTimeoutError(
                    f"{why}\n{_TIMES} workers have stopped at the batch of indices {index!r:.400}; "
                    "look at these samples, or leave them out"
                )
        _log.warning("%s\nit is killed, and another goes on in its place", why)
        old = self._workers[worker]
        old.kill()
        old.join(_END_S)
        self._refuse_half_a_message(worker)
        # What the old worker has not read stays in its pipe; this process must not wait for that at its end.
        self._index_queues[worker].cancel_join_thread()
        self._index_queues[worker].close()
        self._start(worker)
        for task in owed:
            index = self._progress.order.epoch.index_of(task)
            self._index_queues[worker].put((task, index))

    def _refuse_half_a_message(self, worker: int) -> None:
        # A worker that is killed while it writes leaves this lock taken, and half a message before the next one's.
        lock: Any = self._worker_result_queue._wlock  # type: ignore[attr-defined]
        if not lock.acquire(timeout=_END_S):
            raise WorkerTimeoutError(
                f"worker {worker} ended while it was sending a batch, and no other can send any more; "
                "resume from the last state"
            )
        lock.release()

    def _state_ahead(self, worker: int) -> bytes | None:
        """Return the dataset's state after the last batch that has come of a worker and is not handed out yet."""
        come = [
            (task, info[1])
            for task, info in self._task_info.items()
            if info[0] == worker and len(info) > 1
        ]
        _, data = max(come, default=(-1, None), key=lambda each: each[0])
        return data.state if isinstance(data, Carried) else None

    def _start(self, worker: int) -> None:
        """Start a worker as torch has started the first one, with memory of its own."""
        context, pipes = self._context, StackPipes(self._context, self._num_workers)
        # Batches that came of the old worker lie in the memory that this holds.
        self._earlier.append(self._collate_fn)
        collate = self._carrying(sealing(self._dataset, self._user_collate, self._num_workers))
        self._progress.replaces(worker, self._state_ahead(worker))
        index_queue = context.Queue()
        index_queue.cancel_join_thread()
        made = context.Process(
            target=_worker_loop,
            args=(
                self._dataset_kind,
                self._dataset,
                index_queue,
                self._worker_result_queue,
                self._workers_done_event,
                self._auto_collation,
                collate,
                self._drop_last,
                self._base_seed,
                WorkerStart(self._user_start, self._progress, pipes),
                worker,
                self._num_workers,
                self._persistent_workers,
                self._shared_seed,
            ),
            daemon=True,
        )
        made.start()
        pipes.close_writers()
        self._collate_fn = collate
        self._pipes_of[worker] = pipes
        self._index_queues[worker], self._workers[worker] = index_queue, made
