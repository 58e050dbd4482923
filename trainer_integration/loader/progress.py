"""How far an iterator has come: what ``state_dict`` reads. It outlives the iterator, and holds no worker."""

import pickle
from collections.abc import Iterable
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from omniload.base.errors import StateError
from omniload.base.state import JsonObject
from trainer_integration.loader.loader_state import LoaderState, Stage, sealed_order
from trainer_integration.loader.order import Order, Place
from trainer_integration.loader.random_state import generator_states, restore
from trainer_integration.loader.samplers import Anatomy, shape_of
from trainer_integration.loader.samples import Samples, Start

__all__ = ["Progress"]


class Progress:
    """The progress of the last iterator of a loader."""

    def __init__(self, loader: Any, state: LoaderState | None) -> None:
        """Begin as ``state`` says.

        Raises:
            StateError: The loader's batches are not those that the state is of.
        """
        self._anatomy = Anatomy(loader._index_sampler, loader.generator)
        self._iterable = loader._dataset_kind == _DatasetKind.Iterable
        self._piped = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
        self._shape = shape_of(loader, self._anatomy)
        self._workers, self._persistent = loader.num_workers, loader.persistent_workers
        self._in_order = loader.in_order
        self.stage: Stage = "fresh"
        self.seed = None if state is None else state.seed
        """Base seed that the iterator takes in place of one it draws."""
        self._drawn_seed: int | None = None
        self._sealed: tuple[Place, JsonObject] | None = None
        self._pickled: dict[int, bytes] = {}
        running = state is not None and state.stage == "running"
        if state is not None:
            state.check("iterable" if self._iterable else "map", self._shape, self._workers)
            if not running:
                self._prepare(state)
        self.order = Order(
            self._anatomy, state.place if running and state and not self._iterable else None
        )
        self._first_worker = state.next_worker if running and state else 0
        self._next_worker = self._first_worker
        lanes = max(1, self._workers)
        self._starts = list(state.starts) if state and len(state.starts) == lanes else []
        self._starts = self._starts or [Start()] * lanes
        self.samples = self._wrapped(loader) if self._iterable and not self._piped else None

    def _wrapped(self, loader: Any) -> Samples:
        return Samples(loader.dataset, list(self._starts), loader.batch_size or 1)

    def _prepare(self, state: LoaderState) -> None:
        """Make the generators and samplers what they were between two epochs."""
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
            return sum(start.batches for start in self._starts if not start.over)
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
        self._starts, self._pickled = self._kept_lanes(over=True), {}

    def gave(self, tasks: int) -> None:
        """Note that the batches of all tasks before ``tasks`` are handed out."""
        if not self._iterable:
            self.order.epoch.gave(tasks)
            return
        self.order.epoch.gave_any(())
        if not self._workers:
            self._count(0)

    def gave_any(self, still_open: Iterable[int]) -> None:
        """Note that all batches drawn but those of ``still_open`` are handed out."""
        self.order.epoch.gave_any(() if self._iterable else still_open)

    def carried(self, worker: int, state: bytes | None) -> None:
        """Note that a worker's next batch is handed out, and the state that came with it."""
        if self._iterable:
            self._count(worker)
            self._next_worker = (worker + 1) % self._workers
            if state is not None:
                self._pickled[worker] = state

    def _count(self, worker: int) -> None:
        start = self._starts[worker]
        self._starts[worker] = Start(
            batches=1 + (0 if start.over else start.batches), state=start.state
        )

    def finished(self) -> None:
        """Note that the epoch has ended."""
        self.stage = "finished"

    def state(self) -> dict[str, Any]:
        """Return the state after the batches handed out so far.

        Raises:
            StateError: This loader's place cannot be given exactly.
        """
        self._refuse_what_has_no_place()
        place = self._place()
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
            starts=self._lanes() if self._iterable else [],
        ).as_dict(self._sealed[1])

    def _place(self) -> Place:
        if self.stage == "running":
            return self.order.epoch.place()
        keeper = self._anatomy.keeper
        return Place(
            kept=None if keeper is None else keeper.state_dict(),
            epochs=self._anatomy.epochs(),
            now={"generators": generator_states(self._anatomy.generators)},
        )

    def _lanes(self) -> list[Start]:
        over = self.stage == "finished"
        if over and self._workers and not self._persistent:
            return [Start()] * self._workers  # the next epoch's workers get the dataset anew
        if not self._workers:
            return [self._lane_here(over)]
        return self._kept_lanes(over=over)

    def _kept_lanes(self, *, over: bool) -> list[Start]:
        loaded = {w: pickle.loads(data) for w, data in self._pickled.items()}  # noqa: S301 -- our own worker's
        return [
            Start(batches=s.batches, state=loaded.get(w, s.state), over=over or s.over)
            for w, s in enumerate(self._starts)
        ]

    def _lane_here(self, over: bool) -> Start:
        samples, start = self.samples, self._starts[0]
        if samples is None or self.stage == "fresh":
            return start
        state = samples.state()
        # Before its first batch a dataset stands where the epoch before has left it, unless its iterator says more.
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
        replayed = self._iterable and self._workers and not self._pickled
        if replayed and not self._in_order and self.stage == "running":
            raise StateError(
                "in_order=False over an iterable dataset without state_dict has no place that can be found again; "
                "give the dataset state_dict and load_state_dict, or use in_order=True"
            )
