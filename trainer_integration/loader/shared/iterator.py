"""Batches of workers that the ranks of a machine share, in the order of this rank's sampler."""

import itertools
import pickle
import weakref
from collections import deque
from typing import Any

from torch import multiprocessing
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter
from typing_extensions import override

from omniload.base.errors import ConfigError
from trainer_integration.loader.iterators import Noting, Settings, WorkerTimeoutError
from trainer_integration.loader.shared.client import Client
from trainer_integration.loader.shared.group import address_of, connected
from trainer_integration.loader.shared.server import Setup
from trainer_integration.loader.shared.worker import EPOCH, Work

__all__ = ["Share", "Shared"]

_made = itertools.count()
"""Loaders of this process that share: ranks that make them in the same order need no names."""


class Share:
    """A loader's part in the group of its machine. The group is joined with the first batch asked for."""

    def __init__(self, name: str | bool, ranks: int) -> None:
        """Name the group.

        Args:
            name: ``True`` for the order in which loaders are made.
            ranks: Ranks of this machine; the group has workers for each.
        """
        self.address = address_of(name if isinstance(name, str) else f"loader {next(_made)}")
        self.epochs = itertools.count()
        self._ranks = ranks
        self._client: Client | None = None

    def joined(self, loader: Any, seed: int) -> Client:
        """Return this rank's place in the group."""
        if self._client is None or not self._client.is_open:
            setup = self._setup(loader, seed)
            context = loader.multiprocessing_context or multiprocessing.get_context()
            self._client = Client(
                lambda: connected(self.address, setup, context), setup.fingerprint
            )
        return self._client

    @property
    def server_pid(self) -> int | None:
        """The group's server; ``None`` outside of the group."""
        return None if self._client is None else self._client.server

    def _setup(self, loader: Any, seed: int) -> Setup:
        work = Work(
            dataset=loader.dataset,
            kind=loader._dataset_kind,
            auto_collation=loader._auto_collation,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            seed=seed,
            worker_init_fn=loader.worker_init_fn,
            workers=loader.num_workers * self._ranks,
            ahead=loader.prefetch_factor * loader.num_workers,
            ranks=self._ranks,
        )
        collate = loader.collate_fn
        fingerprint = {
            "dataset": type(loader.dataset).__qualname__,
            "samples": len(loader.dataset),
            "collate_fn": getattr(collate, "__qualname__", type(collate).__qualname__),
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
        }
        return Setup(work=work, fingerprint=fingerprint)

    def close(self) -> None:
        """Leave the group; its last rank ends it."""
        if self._client is not None:
            self._client.close()

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a loader with share=True belongs to its process and cannot be sent to another"
        )


class Shared(Noting, _BaseDataLoaderIter):  # type: ignore[misc]
    """Batches of the group's workers, asked for ahead."""

    def __init__(self, loader: Any) -> None:
        """Begin an epoch, or go on in the one that ``loader`` was given a state of."""
        super().__init__(Settings(loader, self._replaced(loader)))  # type: ignore[arg-type]
        self._num_yielded = self._progress.batches_before
        self._epoch = EPOCH.pack(next(loader._share.epochs))
        self._client = loader._share.joined(loader, self._base_seed)
        self._ahead = loader.prefetch_factor * loader.num_workers
        self._asked: deque[int] = deque()
        self._given = 0
        self._end = weakref.finalize(self, _drop, self._client, self._asked)
        self._end.atexit = False
        self._ask()

    def _ask(self) -> None:
        while len(self._asked) < self._ahead:
            try:
                index = self._next_index()  # type: ignore[no-untyped-call]
            except StopIteration:
                return
            self._asked.append(self._client.ask(self._epoch + pickle.dumps(index)))

    @override
    def _next_data(self) -> Any:
        if not self._asked:
            self._end()
            raise StopIteration
        try:
            batch = self._client.wait(self._asked[0], self._timeout, self._awaited)
        except WorkerTimeoutError:
            raise  # It may come yet.
        except Exception:
            self._go_on()
            raise
        self._go_on()
        return pin_memory(batch) if self._pin_memory else batch  # type: ignore[no-untyped-call]

    def _go_on(self) -> None:
        self._asked.popleft()
        self._given += 1
        self._ask()

    def _awaited(self) -> str:
        return f"the batch of indices {self._progress.order.epoch.index_of(self._given)!r:.400}"

    @override
    def _gave(self) -> None:
        self._progress.gave(self._given)

    @override
    def _let_go(self) -> None:
        self._end()


def _drop(client: Client, asked: "deque[int]") -> None:
    client.drop(asked)
