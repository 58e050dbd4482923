"""The keywords of a loader beyond torch's: who makes the batches, and what happens to a worker that hangs."""

import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.worker import _ResumeIteration, _worker_loop
from torch.utils.data.dataloader import _DatasetKind
from typing_extensions import override

from omniload.base.errors import ConfigError
from trainer_integration.loader.hung_workers import StackPipes
from trainer_integration.loader.iterators import (
    ManyProcesses,
    Noting,
    WorkerStart,
    WorkerTimeoutError,
    sealing,
)
from trainer_integration.loader.samples import Carried
from trainer_integration.loader.shared.group import Share
from trainer_integration.loader.shared.iterator import Shared
from trainer_integration.loader.threads import ManyThreads

__all__ = ["Replacing", "Ways"]

_log = logging.getLogger(__name__)
_TIMES = 3
"""How often one batch may stop a worker; a batch that always stops it is no accident."""
_LOOK_S = 1.0
_END_S = 5.0


class Replacing(ManyProcesses):
    """torch's workers; a worker that gives nothing within ``timeout=``, or has died, is replaced.

    The batches are the same as without the replacement, except for numbers that the dataset draws from its worker's
    generators. The new worker starts with the seed of the old one, and with the last state of the dataset, if it has
    one.
    """

    def __init__(self, loader: Any) -> None:
        """Start the workers, and begin or continue as ``OneProcess`` does."""
        self._stops: Counter[int] = Counter()
        self._earlier: list[Any] = []
        super().__init__(loader)
        # torch raises an error for a dead worker wherever the trainer is at that moment.
        signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
        self._worker_pids_set = False

    @override
    def _get_data(self) -> Any:
        until_s = time.monotonic() + self._timeout
        while True:
            left_s = until_s - time.monotonic()
            try:
                # Woken each second, so that a dead worker is noticed long before ``timeout=`` is over.
                data = self._data_queue.get(timeout=min(_LOOK_S, max(left_s, 0.001)))
            except queue.Empty:
                if self._replaced_any(late=left_s <= 0):
                    # The new worker has the whole limit for the batch.
                    until_s = time.monotonic() + self._timeout
                continue
            if self._is_owed(data[0]):
                return data

    def _is_owed(self, task: Any) -> bool:
        """Whether a message is for a batch that has not arrived; both the old worker and the new may send it."""
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
            # The first batch it owes is the one that it stopped at, because a worker makes its batches in this order.
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
        # Unread requests of the old worker stay in its pipe, and this process must not wait for them at its end.
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
        """Return the dataset's state after the last batch that a worker has sent and that is not handed out yet."""
        come = [
            (task, info[1])
            for task, info in self._task_info.items()
            if info[0] == worker and len(info) > 1
        ]
        _, data = max(come, default=(-1, None), key=lambda each: each[0])
        return data.state if isinstance(data, Carried) else None

    def _start(self, worker: int) -> None:
        """Start a worker as torch started the first one, with memory of its own."""
        context, pipes = self._context, StackPipes(self._context, self._num_workers)
        # Keeps the memory in which batches of the old worker lie.
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


_CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": ("process", "thread"),
    "on_hang": ("raise", "replace"),
}
_MOST_RANKS = 64
"""Ranks of one machine that bring workers to a group, at most."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How a loader's batches are made."""

    workers: str = "process"
    on_hang: str = "raise"
    share: bool | str = False

    @classmethod
    def taken_from(cls, keywords: dict[str, Any]) -> Self:
        """Take the keywords out of ``keywords`` that torch does not know.

        Raises:
            ConfigError: A value is unknown, or a keyword is torchdata's.
        """
        if "snapshot_every_n_steps" in keywords:
            raise ConfigError(
                f"snapshot_every_n_steps={keywords['snapshot_every_n_steps']!r:.60} is of torchdata's loader; leave it "
                "out: a state of this one is of every batch"
            )
        taken = {name: keywords.pop(name) for name in _CHOICES if name in keywords}
        for name, value in taken.items():
            if value not in _CHOICES[name]:
                raise ConfigError(
                    f"{name}={value!r:.60} is not one of {list(_CHOICES[name])}; choose one"
                )
        share = keywords.pop("share", False)
        if not isinstance(share, bool | str) or share == "":
            raise ConfigError(
                f"share={share!r:.60} is no name, nor True or False; give each loader that shares a name of its own"
            )
        return cls(**taken, share=share)

    def check(self, loader: Any) -> None:
        """Refuse combinations that do not work together.

        Raises:
            ConfigError: Threads or replacement are asked for with a dataset or settings that do not support them.
        """
        if self == Ways():
            return
        given = {"workers": "process", "on_hang": "raise", "share": False}
        asked = ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if value != given[name]
        )
        piped = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
        if piped or loader._dataset_kind == _DatasetKind.Iterable:
            raise ConfigError(
                f"{asked} is for map datasets, found the {'pipe' if piped else 'iterable dataset'} "
                f"{type(loader.dataset).__name__}; leave it out"
            )
        if self.share:
            self._check_share(loader, asked)
        if self.on_hang != "replace":
            return
        if self.workers == "thread":
            raise ConfigError(
                "on_hang='replace' cannot kill a thread; use workers='process', or leave on_hang out"
            )
        if not (loader.num_workers and loader.timeout > 0 and loader.in_order):
            raise ConfigError(
                f"on_hang='replace' needs workers, a limit and order, found num_workers={loader.num_workers}, "
                f"timeout={loader.timeout} and in_order={loader.in_order}; set timeout= to what a batch may take"
            )

    def joining(self, environment: Mapping[str, str] = os.environ) -> Share | None:
        """Return the loader's part in the group of its machine, if it shares workers."""
        if not self.share:
            return None
        found = (
            environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_NTASKS_PER_NODE") or ""
        )
        ranks = int(found) if found.isascii() and found.isdigit() else 1
        return Share(self.share, max(1, min(ranks, _MOST_RANKS)))

    def _check_share(self, loader: Any, asked: str) -> None:
        if (self.workers, self.on_hang) != ("process", "raise"):
            raise ConfigError(
                f"{asked} do not go together: shared workers are processes, replaced where they end; give share= alone"
            )
        if not (loader.num_workers and loader.in_order):
            raise ConfigError(
                f"share={self.share!r} needs workers and order, found num_workers={loader.num_workers} and "
                f"in_order={loader.in_order}; set num_workers= to those that each rank brings"
            )

    @property
    def read_ahead(self) -> bool:
        """Whether several threads read ahead in one copy of the dataset, so that its state belongs to no batch."""
        return bool(self.share) or self.workers == "thread"

    @property
    def kind(self) -> Callable[[Any], Noting]:
        """The class of iterator for such a loader, if there are workers."""
        if self.share:
            return Shared
        if self.workers == "thread":
            return ManyThreads
        return Replacing if self.on_hang == "replace" else ManyProcesses
