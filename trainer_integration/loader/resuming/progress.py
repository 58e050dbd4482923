"""Progress of an iterator, which ``state_dict`` reads. It outlives the iterator, and holds no worker."""

import pickle
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from omniload.base.errors import StateError
from omniload.base.state import JsonObject
from trainer_integration.loader.resuming.loader_state import LoaderState, Stage, sealed_order
from trainer_integration.loader.resuming.order import Order, Place
from trainer_integration.loader.resuming.random_state import generator_states, restore
from trainer_integration.loader.samplers import Anatomy, is_stateful, shape_of
from trainer_integration.loader.samples import OwnState, Samples, Start

__all__ = ["Progress", "check"]


def check(loader: Any, state: LoaderState, shape: JsonObject) -> None:
    """Refuse a loader that cannot continue from ``state``; ``shape`` is ``shape_of`` the loader.

    Raises:
        StateError: The message says what differs.
    """
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    state.check(
        "iterable" if iterable else "map",
        shape,
        loader.num_workers,
        takes_state=iterable or (is_stateful(loader.dataset) and not _reads_ahead(loader)),
    )


def _reads_ahead(loader: Any) -> bool:
    """Return whether workers read ahead in one copy of the dataset, whose state then belongs to no batch."""
    return bool(loader._ways.read_ahead) and loader.num_workers > 0


class _Lanes:
    """Batches that each worker has given, and the newest state of its copy of the dataset."""

    def __init__(self, starts: list[Start]) -> None:
        """Begin where each worker begins."""
        self.starts = list(starts)
        self._pickled: dict[int, bytes] = {}

    def count(self, worker: int, state: bytes | None = None) -> None:
        """Note a batch of a worker, and the state that came with it."""
        start = self.starts[worker]
        batches = 1 + (0 if start.over else start.batches)
        self.starts[worker] = Start(batches=batches, state=start.state)
        if state is not None:
            self._pickled[worker] = state

    def newest(self, worker: int, ahead: bytes | None) -> Any:
        """Return the newest state of a worker; ``ahead`` is a state after batches that were not handed out."""
        pickled = self._pickled.get(worker) if ahead is None else ahead
        return self.starts[worker].state if pickled is None else _loaded(pickled)

    def kept(self, *, over: bool) -> list[Start]:
        """Return where persistent workers continue; ``over`` means at the end of an epoch."""
        states = {worker: _loaded(pickled) for worker, pickled in self._pickled.items()}
        return [
            Start(batches=s.batches, state=states.get(w, s.state), over=over or s.over)
            for w, s in enumerate(self.starts)
        ]


def _loaded(pickled: bytes) -> Any:
    return pickle.loads(pickled)  # noqa: S301 -- from our own worker


class Progress:
    """Progress of the last iterator of a loader."""

    def __init__(self, loader: Any, state: LoaderState | None) -> None:
        """Begin at ``state``.

        Raises:
            StateError: The loader's batches are not those of the state.
        """
        self._anatomy = Anatomy(loader._index_sampler, loader.generator)
        self._iterable = loader._dataset_kind == _DatasetKind.Iterable
        self._piped = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
        self._shape = shape_of(loader, self._anatomy)
        self._workers, self._persistent = loader.num_workers, loader.persistent_workers
        self._dataset_name = type(loader.dataset).__name__
        stateful = is_stateful(loader.dataset) and not (self._iterable or self._piped)
        self._hidden = stateful and _reads_ahead(loader)
        """Whether the map dataset has a state that is unknown for the batches handed out."""
        self.stage: Stage = "fresh"
        self.seed = None if state is None else state.seed
        """Base seed that the iterator takes instead of drawing one."""
        self._drawn_seed: int | None = None
        self._sealed: tuple[Place, JsonObject] | None = None
        if state is not None:
            check(loader, state, self._shape)
        # In the middle of an epoch; otherwise the next epoch begins.
        within = state if state is not None and state.stage == "running" else None
        if state is not None and within is None:
            self._prepare(state)
        self.order = Order(self._anatomy, within.place if within and not self._iterable else None)
        self._first_worker = 0
        # With another number of workers the turn has no meaning, and a map dataset needs none.
        if within and within.workers == self._workers:
            self._first_worker = within.next_worker
        self._next_worker = self._first_worker
        count = max(1, self._workers)
        self._lanes = _Lanes(state.starts_of(count) if state else [Start()] * count)
        starts = self._lanes.starts
        self.own: OwnState | None = None
        if stateful and not self._hidden:
            self.own = OwnState(loader.dataset, [start.state for start in starts])
        self.samples: Samples | None = None
        if self._iterable and not self._piped:
            self.samples = Samples(loader.dataset, list(starts), loader.batch_size or 1)

    def _prepare(self, state: LoaderState) -> None:
        """Restore the generators and samplers of a state between two epochs."""
        place = state.place
        if place.now is not None:
            restore(place.now, self._anatomy.generators)
        self._anatomy.set_epochs(place.epochs)
        if self._anatomy.keeper is not None and place.kept is not None:
            self._anatomy.keeper.load_state_dict(place.kept)

    @property
    def batches_before(self) -> int:
        """Batches of this epoch that were handed out before the iterator was made."""
        if self._iterable:
            return sum(start.batches for start in self._lanes.starts if not start.over)
        resume = self.order.epoch.start
        return resume.batches - len(resume.late)

    def began(self, seed: int) -> None:
        """Note that an iterator has its base seed, and is about to begin."""
        self._drawn_seed, self.stage = seed, "running"

    def take_first_worker(self) -> int:
        """Return the worker whose turn the first batch is; 0 from the next epoch on."""
        first, self._first_worker = self._first_worker, 0
        return first

    def next_epoch(self) -> None:
        """Begin another epoch with the same workers."""
        self.stage, self._next_worker = "running", 0
        # Persistent workers continue from their copies, which are at the end of the previous epoch.
        self._lanes = _Lanes(self._lanes.kept(over=True))

    def gave(self, tasks: int) -> None:
        """Note that the batches of all tasks before ``tasks`` are handed out."""
        if not self._iterable:
            self.order.epoch.gave(tasks)
            return
        self.order.epoch.gave_any(())
        if not self._workers:
            self._lanes.count(0)

    def gave_any(self, still_open: Iterable[int]) -> None:
        """Note that all drawn batches except ``still_open`` are handed out."""
        self.order.epoch.gave_any(() if self._iterable else still_open)

    def carried(self, worker: int, state: bytes | None) -> None:
        """Note that a worker's next batch is handed out, and the state that came with it."""
        if self._iterable or self.own is not None:
            self._lanes.count(worker, state)
            self._next_worker = (worker + 1) % self._workers

    def replaces(self, worker: int, ahead: bytes | None) -> None:
        """Begin the process that replaces a worker; ``ahead`` is the newest state that came from the old one."""
        if self.own is not None:
            self.own.go_on(worker, self._lanes.newest(worker, ahead))

    def finished(self) -> None:
        """Note that the epoch has ended."""
        self.stage = "finished"

    def state(self) -> dict[str, Any]:
        """Return the state after the batches handed out so far.

        Raises:
            StateError: This loader's position cannot be given exactly.
        """
        self._refuse_what_has_no_place()
        place = self._place()
        # The order is the large part of a state, and stays the same through an epoch.
        if self._sealed is None or not place.of_epoch(self._sealed[0]):
            self._sealed = (place, sealed_order(place))
        seed = self._drawn_seed if self.stage == "running" or self._persistent else None
        return LoaderState(
            kind="iterable" if self._iterable else "map",
            stage=self.stage,
            shape=self._shape,
            seed=seed,
            place=place,
            workers=self._workers,
            next_worker=self._next_worker,
            starts=self._starts() if self._iterable or self.own is not None else [],
        ).as_dict(self._sealed[1])

    def _place(self) -> Place:
        if self.stage == "running":
            return self.order.epoch.place()
        keeper = self._anatomy.keeper
        return Place(
            kept=None if keeper is None else deepcopy(keeper.state_dict()),
            epochs=self._anatomy.epochs(),
            now={"generators": generator_states(self._anatomy.generators)},
        )

    def _starts(self) -> list[Start]:
        """Return where each worker begins when it continues from here."""
        over = self.stage == "finished"
        if over and self._workers and not self._persistent:
            # Workers of the next epoch get a new copy of the dataset.
            return [Start()] * self._workers
        if not self._workers:
            return [self._start_here(over)]
        return self._lanes.kept(over=over)

    def _start_here(self, over: bool) -> Start:
        samples, start = self.samples, self._lanes.starts[0]
        if self.own is not None:
            return Start(batches=start.batches, state=deepcopy(self.own.state()), over=over)
        if samples is None or self.stage == "fresh":
            return start
        state = deepcopy(samples.state())  # the dataset may change the state it gave
        # Before its first batch, a dataset is where the previous epoch left it, unless its iterator has a state too.
        over = over or (state is not None and "iterator" not in state and not start.batches)
        if over and state is not None:
            state.pop("iterator", None)
        kept = state is None and not over
        return Start(
            batches=start.batches,
            state=state or None,
            over=over,
            begun=samples.begun if kept else None,
            drawn=samples.drawn if kept else None,
        )

    def _refuse_what_has_no_place(self) -> None:
        if self._piped:
            raise StateError(
                "a DataPipe's place cannot be saved: its shuffling and sharding happen inside the pipe; "
                "use a map dataset, or an IterableDataset with state_dict and load_state_dict"
            )
        if self._hidden:
            raise StateError(
                f"the map dataset {self._dataset_name} has a state of its own, and workers='thread' and share= read "
                "ahead of what is handed out in one copy of it; leave them out, or give a dataset without state_dict"
            )
