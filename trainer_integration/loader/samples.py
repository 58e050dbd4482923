"""A dataset that has a state, under a loader: the state travels with the batches that were made before it."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import override

from omniload.base.state import JsonObject
from trainer_integration.loader.resuming.random_state import ambient_kept, capture, restore
from trainer_integration.loader.samplers import is_stateful

__all__ = ["Carried", "CarryingCollate", "OwnState", "Samples", "Start", "are_alike"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a worker continues: its part of an iterable dataset, or its copy of a map dataset that has a state."""

    batches: int = 0
    """Batches that the worker has handed out in this epoch."""
    state: dict[str, Any] | None = None
    """States of ``dataset`` and ``iterator`` after those batches, if they have states."""
    over: bool = False
    """Whether the epoch has ended, so that the next one begins."""
    begun: JsonObject | None = None
    """Without workers: states of generators before ``iter(dataset)``, and before the first sample."""
    drawn: JsonObject | None = None


class Carried(NamedTuple):
    """A batch and the state of the worker's dataset after it."""

    batch: Any
    state: bytes

    def pin_memory(self) -> "Carried":
        """Return the batch in pinned memory, as torch's thread asks for it."""
        return Carried(pin_memory(self.batch), self.state)  # type: ignore[no-untyped-call]


class Samples(IterableDataset[Any]):
    """The dataset as a worker iterates it: from its start, or from where a state was taken."""

    def __init__(self, dataset: Any, starts: list[Start], batch_samples: int) -> None:
        """Wrap ``dataset`` for one worker per start; a batch has ``batch_samples`` samples."""
        self.dataset = dataset
        self.begun: JsonObject | None = None
        self.drawn: JsonObject | None = None
        self._starts, self._batch_samples = starts, batch_samples
        self._iterator: Any = None

    @override
    def __repr__(self) -> str:
        return repr(self.dataset)

    @override
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        # Only once, because a persistent worker iterates again from the beginning in every further epoch.
        start, self._starts = self._starts[place], [Start()] * len(self._starts)
        if worker is None and start.drawn is not None and start.state is None:
            self.begun, self.drawn = start.begun, start.drawn
            with ambient_kept():
                restore(start.begun or {"generators": []}, [])
                self._iterator = iter(self.dataset)
                restore(start.drawn, [])
                return self._after(start)
        if worker is None:
            # All generators, because it is unknown which of them a user's ``__iter__`` draws from.
            self.begun, self.drawn = capture([], "all"), None
        samples = self._from(start)
        # A generator, so that the random states of the first sample are noted when it is asked for, not before.
        return chain.from_iterable(self._noting(samples)) if worker is None else samples

    def state(self) -> dict[str, Any] | None:
        """Return the states of dataset and iterator, if they have states."""
        parts = {"dataset": self.dataset, "iterator": self._iterator}
        if parts["iterator"] is parts["dataset"]:
            del parts["iterator"]
        return {name: p.state_dict() for name, p in parts.items() if is_stateful(p)} or None

    def _noting(self, samples: Iterator[Any]) -> Iterator[Iterator[Any]]:
        self.drawn = capture([], "all")
        yield samples

    def _from(self, start: Start) -> Iterator[Any]:
        state = start.state
        if state is None:
            self._iterator = iter(self.dataset)
            return self._after(start)
        self._begin_as(state)
        return self._next_epoch() if start.over else self._going_on()

    def _begin_as(self, state: dict[str, Any]) -> None:
        """Begin an epoch at the position of the dataset, and of its iterator if the iterator has a state.

        A dataset that is its own iterator may start anew in ``__iter__``, or may be unable to load a state before it. A
        dataset whose ``__iter__`` yields needs its state before.
        """
        held, early = state.get("dataset"), None
        if held is not None:
            try:
                self.dataset.load_state_dict(held)
            except Exception as error:  # noqa: BLE001 -- raised below, unless the order of calls caused it
                early = error
        self._iterator = iter(self.dataset)
        # ``__iter__`` may have reset the state that was just loaded; only then it is loaded again.
        if held is not None and self._iterator is self.dataset:
            if early is not None or not are_alike(self.dataset.state_dict(), held):
                self.dataset.load_state_dict(held)
        elif early is not None:
            raise early
        if "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])

    def _after(self, start: Start) -> Iterator[Any]:
        """Skip the samples handed out before; a dataset without a state is read again."""
        if not start.over and start.batches:
            samples = start.batches * self._batch_samples
            next(islice(self._going_on(), samples, samples), None)
        return self._going_on()

    def _next_epoch(self) -> Iterator[Any]:
        """Return the epoch after one that has ended.

        A dataset at its end gives at most a dropped tail and then ends; asked again, it begins anew. A dataset that
        went back to its beginning gives the first samples immediately.
        """
        tail: list[Any] = []
        for _ in range(self._batch_samples):
            sample = next(self._iterator, self)
            if sample is self:
                self._iterator = iter(self.dataset)
                return self._going_on()
            # Samples left in an ended epoch are less than a batch, which ``drop_last`` has dropped.
            tail.append(sample)
        return chain(tail, self._going_on())

    def _going_on(self) -> Iterator[Any]:
        """Return the rest of the iterator; ``iter`` of a dataset that is its own iterator would begin anew."""
        return map(next, repeat(self._iterator))


class OwnState:
    """The own state of a map dataset, in each worker's copy of it."""

    def __init__(self, dataset: Any, states: list[dict[str, Any] | None]) -> None:
        """Begin each worker's copy of ``dataset`` at its state in ``states``, ``[W]``, if it has one."""
        self.dataset, self._states = dataset, states

    def begin(self, worker: int) -> None:
        """Give this process's copy the state of ``worker``."""
        # Only once, because with persistent workers the next epoch continues from the copy's position.
        state, self._states[worker] = self._states[worker], None
        if state is not None:
            self.dataset.load_state_dict(state["dataset"])

    def go_on(self, worker: int, state: dict[str, Any] | None) -> None:
        """Set the state with which a process that replaces ``worker`` begins."""
        self._states[worker] = state

    def state(self) -> dict[str, Any]:
        """Return the state in this process."""
        return {"dataset": self.dataset.state_dict()}


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two states have the same bytes; tensors cannot be compared as a whole by ``==``."""
    return pickle.dumps(one) == pickle.dumps(other)


class CarryingCollate:
    """A worker's ``collate_fn``: makes the batch, and adds the dataset's state after it."""

    def __init__(self, collate: Callable[[Any], Any], samples: Samples | OwnState) -> None:
        """Wrap ``collate``, which the user gave or torch chose."""
        self._collate, self._samples = collate, samples

    def __call__(self, batch: Any) -> Any:
        """Return the batch, with the state of a dataset that has one."""
        made, state = self._collate(batch), self._samples.state()
        # Pickled immediately, because the queue would pickle it later, when the dataset has advanced.
        return made if state is None else Carried(made, pickle.dumps(state))
