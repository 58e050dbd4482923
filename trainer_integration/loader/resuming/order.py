"""The indices of an epoch's batches: noted as they are drawn, and found again from a state.

Words of this module:
    ordinal  number of a batch in its epoch, in the sampler's order
    task     number of a batch since this iterator began; after a resume, late batches come first
    late     a batch that was overtaken (``in_order=False``) and has not been handed out
"""

import zlib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple, Self, cast

from typing_extensions import override

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject
from trainer_integration.loader.resuming.random_state import (
    ambient_kept,
    capture,
    generator_states,
    restore,
)
from trainer_integration.loader.samplers import Anatomy

__all__ = ["Drawn", "Epoch", "Order", "Place"]


class Drawn(NamedTuple):
    """A batch's index from the sampler, and the state after it."""

    index: Any
    digest: int
    """CRC-32 of the epoch's indices up to here; 0 if the order is known without it."""
    kept: Any
    """State of the sampler, if it has one."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Position in an epoch's order, and how to find the order's beginning again."""

    batches: int = 0
    """The ordinal after the last batch that was handed out or is late."""
    late: tuple[int, ...] = ()
    digest: int = 0
    kept: Any = None
    epochs: list[Json] = field(default_factory=list)
    begun: JsonObject | None = None
    """States of generators before ``iter``, for a sampler that may draw there."""
    drawn: JsonObject | None = None
    """States of generators before the first index; ``None`` if none was drawn."""
    now: JsonObject | None = None
    """States of the generators of the loader and its samplers, if nothing was drawn yet."""

    def of_epoch(self, other: "Place") -> bool:
        """Whether both places belong to one epoch, drawn from the same beginning."""
        same = self.begun is other.begun and self.drawn is other.drawn
        return same and self.epochs == other.epochs


class Epoch:
    """Indices that one epoch has drawn and batches it has handed out. It outlives its iterator and holds no worker."""

    def __init__(self, anatomy: Anatomy, start: Place) -> None:
        self._anatomy, self.start = anatomy, start
        self.begun, self.drawn = start.begun, start.drawn
        self.epochs = anatomy.epochs()
        self.tasks = 0
        """Number of indices drawn."""
        self._held: dict[int, Drawn] = {}
        self._digest = start.digest  # of all drawn indices
        kept, keeper = start.kept, anatomy.keeper
        if kept is None and keeper is not None:
            kept = deepcopy(keeper.state_dict())
        self._last = Drawn(None, start.digest, kept)
        self._given = 0  # tasks before this one are handed out
        # Drawn but not handed out, if batches may overtake each other.
        self._open: tuple[int, ...] | None = None

    def drew(self, index: Any) -> None:
        """Note the next task's index."""
        if self.tasks >= len(self.start.late) and not self._anatomy.known:
            # A checksum and not the indices, because a state of millions of them would exceed a small model.
            self._digest = zlib.crc32(repr(index).encode(), self._digest)
        keeper = self._anatomy.keeper
        # Saved now: when this batch is handed out, later batches will have been drawn from the sampler.
        kept = None if keeper is None else deepcopy(keeper.state_dict())
        self._held[self.tasks] = Drawn(index, self._digest, kept)
        self.tasks += 1

    def index_of(self, task: int) -> Any:
        """Return the index of a task that is not handed out."""
        return self._held[task].index

    def gave(self, tasks: int) -> None:
        """Note that every task before ``tasks`` is handed out."""
        for task in range(self._given, tasks):
            self._last = self._held.pop(task)
        self._given = tasks

    def gave_any(self, still_open: Iterable[int]) -> None:
        """Note that all drawn tasks except ``still_open`` are handed out."""
        self._open = tuple(sorted(still_open))
        self._held = {task: self._held[task] for task in self._open}
        self._given = self.tasks

    def place(self) -> Place:
        """Return the position in the order after the batches handed out.

        Raises:
            StateError: Batches overtook each other, and a sampler has a state of its own.
        """
        late, free = self.start.late, self._open is not None
        if free and self._anatomy.keeper is not None:
            raise StateError(
                f"the sampler {type(self._anatomy.keeper).__name__} has a state of its own, which is of batches in "
                "order, and in_order=False hands them out in another; use in_order=True"
            )
        found_again = self.drawn is not None and self._anatomy.keeper is None
        return Place(
            batches=self.start.batches + max(0, self._given - len(late)),
            late=tuple(self._ordinal(task) for task in self._open or ()) + late[self._given :],
            # If batches may overtake each other, the place is after all drawn batches, with the late ones listed.
            digest=self._digest if free else self._last.digest,
            kept=self._last.kept,
            epochs=self.epochs,
            begun=self.begun,
            drawn=self.drawn,
            now=None if found_again else self._generators_now(),
        )

    def _generators_now(self) -> JsonObject:
        # A resumed epoch sets its generators with its first index; until then, the resumed place's states count.
        if self.tasks == 0 and self.start.now is not None:
            return self.start.now
        return {"generators": generator_states(self._anatomy.generators)}

    def _ordinal(self, task: int) -> int:
        late = self.start.late
        return late[task] if task < len(late) else self.start.batches + task - len(late)


class Order:
    """An index sampler for torch's iterators: every ``iter`` begins an epoch and notes it."""

    def __init__(self, anatomy: Anatomy, resume: Place | None = None) -> None:
        """Continue from ``resume`` in the first epoch whose indices are drawn."""
        self.anatomy, self.resume = anatomy, resume
        self.epoch = Epoch(anatomy, resume or Place())

    def __iter__(self) -> Iterator[Any]:
        self.epoch = Epoch(self.anatomy, self.resume or Place())
        if self.resume is not None:
            self.epoch.epochs = self.resume.epochs
            return _Resumed(self, self.epoch)
        return _Fresh(self, self.epoch)

    def __len__(self) -> int:
        return len(self.anatomy.sampler)  # type: ignore[arg-type]


class _Indices(Iterator[Any]):
    """The indices of one epoch."""

    def __init__(self, order: Order, epoch: Epoch) -> None:
        self._order, self._epoch = order, epoch
        self._source: Iterator[Any] | None = None

    @override
    def __iter__(self) -> Self:
        return self

    @override
    def __next__(self) -> Any:
        if self._source is None:
            self._source = self._begin()
        index = next(self._source)
        self._epoch.drew(index)
        return index

    def _begin(self) -> Iterator[Any]:
        raise NotImplementedError


class _Fresh(_Indices):
    """An epoch from its first batch: the sampler is asked when torch asks it."""

    def __init__(self, order: Order, epoch: Epoch) -> None:
        super().__init__(order, epoch)
        anatomy = order.anatomy
        if not anatomy.known:
            # For a sampler of the user's, which may already shuffle in ``__iter__``.
            epoch.begun = capture(anatomy.generators, anatomy.ambient)
        self._asked = iter(anatomy.sampler)

    @override
    def _begin(self) -> Iterator[Any]:
        anatomy = self._order.anatomy
        self._epoch.drawn = capture(anatomy.generators, anatomy.ambient)
        return self._asked


class _Resumed(_Indices):
    """An epoch from a place inside it. No sample is loaded to get there."""

    @override
    def _begin(self) -> Iterator[Any]:
        place, anatomy = self._epoch.start, self._order.anatomy
        # The place applies only to this epoch.
        self._order.resume = None
        # Set before ``iter``, because a ``DistributedSampler`` shuffles by its epoch when it is asked for an iterator.
        anatomy.set_epochs(place.epochs)
        if anatomy.keeper is not None and place.kept is not None:
            restore(cast("JsonObject", place.now), anatomy.generators)
            # A copy, because a sampler may change the state it is given, and the state may be loaded again.
            anatomy.keeper.load_state_dict(deepcopy(place.kept))
            return iter(anatomy.sampler)
        # Everything drawn on the way was drawn once already, so the global generators stay untouched.
        with ambient_kept():
            if place.begun is not None:
                restore(place.begun, anatomy.generators)
            source = iter(anatomy.sampler)
            if place.drawn is not None:
                restore(place.drawn, anatomy.generators)
                return _primed(self._seek(source, place))
        restore(cast("JsonObject", place.now), anatomy.generators)
        self._epoch.drawn = capture(anatomy.generators, anatomy.ambient)
        return source

    def _seek(self, source: Iterator[Any], place: Place) -> Iterator[Any]:
        anatomy = self._order.anatomy
        # Late batches precede the place, so their indices must be drawn again.
        if not place.late and (rest := anatomy.after(place.batches)) is not None:
            return rest
        late, digest = [], 0
        for ordinal in range(place.batches):
            # This object is no index, so it can stand for the end.
            index = next(source, self)
            if index is self:
                raise StateError(
                    f"the sampler ends after {ordinal} batches, the state is of batch {place.batches}; "
                    "resume with the samples and the sampler of the run that saved"
                )
            if not anatomy.known:
                digest = zlib.crc32(repr(index).encode(), digest)
            if ordinal in place.late:
                late.append(index)
        if digest != place.digest:
            raise StateError(
                f"the sampler {anatomy.names[-1]} gives other indices than in the run that saved, within the first "
                f"{place.batches} batches; give it state_dict and load_state_dict, or a generator"
            )
        return chain(late, source)


def _primed(order: Iterator[Any]) -> Iterator[Any]:
    """Return ``order`` with its first index drawn, because most samplers draw their randomness with it."""
    return chain(list(islice(order, 1)), order)
