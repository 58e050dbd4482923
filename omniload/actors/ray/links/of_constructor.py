"""A data constructor's links to source loaders, as Ray actors.

Each source has a link to the loader that serves it. The hand-over with the highest number counts, so a late message
about an earlier one changes nothing.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omniload.actors.ray.answers import plain_error
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.errors.verdict import is_lost
from omniload.base.errors import UnavailableError
from omniload.machine.messages import SliceRequest
from omniload.mix.columns import ColumnRanges, SampleColumns

__all__ = ["LoaderHolders", "Loaders", "Serving"]

_TURN_S = 0.02
"""Interval of looking for another holder while one does not answer; a lost one is replaced before Ray reports it."""
_FOLLOWED_S = 1.0
"""Longest wait for the replacement of a lost holder; then the holder is asked again, as it may have been cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """The source loaders of a plane."""

    of: Mapping[int, Any]
    """Actor of each source."""
    names: Mapping[Any, str]
    """Name of each actor as a member of its role."""
    roles: Mapping[int, str]
    """Role that serves each source."""
    turn: int
    """Number of the last known hand-over."""
    limit_s: float
    """Longest wait for the slices of one loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A loader that serves sources from now on."""

    sources: tuple[int, ...]
    actor: Any
    name: str
    role: str
    turn: int
    """Number of the hand-over; a lower number than the last one of a source is ignored."""


class LoaderHolders:
    """One constructor's view of the source loaders. Safe to call from several threads."""

    def __init__(self, loaders: Loaders) -> None:
        self._changed = threading.Condition()
        self._actors = dict(loaders.of)
        self._names = dict(loaders.names)
        self._turns = dict.fromkeys(loaders.of, loaders.turn)
        self._limit_s = loaders.limit_s

    def names(self) -> tuple[str, ...]:
        """Return the names of the loaders that serve at present."""
        with self._changed:
            return tuple(sorted({self._names[actor] for actor in self._actors.values()}))

    def turns(self, sources: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the last known hand-over of each source; loaders from before it are not asked."""
        with self._changed:
            return tuple(self._turns.get(source, -1) for source in sources)

    def replace(self, serving: Serving) -> None:
        """Ask another loader for its sources, including unanswered requests to the previous one."""
        with self._changed:
            # Old names stay, so that an error of a replaced loader can still name it.
            self._names[serving.actor] = serving.name
            for source in serving.sources:
                if serving.turn > self._turns.get(source, -1):  # calls may overtake each other
                    self._actors[source], self._turns[source] = serving.actor, serving.turn
            self._changed.notify_all()

    def fetch(self, requests: Sequence[SliceRequest]) -> ColumnRanges:
        """Get the slices of steps: one call per loader, however many samples or sources.

        If a loader is lost, or replaced before it answers, its replacement gets the same request, and
        late answers of the first are ignored.

        Raises:
            UnavailableError: No answer came within the limit.
            OmniloadError: What a loader raised.
        """
        until_s = time.monotonic() + self._limit_s
        slices: dict[int, SampleColumns] = {}
        missing = list(range(len(requests)))
        while missing:
            for asked in self._ask(requests, missing):
                slices |= zip(asked.places, self._answer_to(asked, until_s) or (), strict=False)
            # Other answers stay valid: a lost loader costs only its own part of a window.
            missing = [place for place in missing if place not in slices]
        return ColumnRanges.of([slices[place] for place in range(len(requests))])

    def _ask(self, requests: Sequence[SliceRequest], places: Sequence[int]) -> "list[_Asked]":
        """Ask each loader for its part."""
        of: dict[Any, list[int]] = {}
        with self._changed:
            for place in places:
                of.setdefault(self._actors[requests[place].source], []).append(place)
        return [
            _Asked(
                actor=actor,
                sources={requests[place].source for place in at},
                places=at,
                answer=actor.slices.remote([requests[place] for place in at]),
            )
            for actor, at in of.items()
        ]

    def _answer_to(self, asked: "_Asked", until_s: float) -> list[SampleColumns] | None:
        """Return an answer; ``None`` if another loader must be asked instead."""
        while not ray.wait([asked.answer], timeout=_TURN_S)[0]:
            if self._is_replaced(asked):
                return None
            if time.monotonic() > until_s:
                raise UnavailableError(
                    f"{self._names[asked.actor]} gave no answer within {self._limit_s:.0f} s, and no other loader took "
                    "its place; end the job and start again from the last checkpoint"
                )
        try:
            answer: list[SampleColumns] = ray.get(asked.answer)
        except RayError as error:
            if self._is_replaced(asked):
                return None  # whatever its error: another loader serves these sources now
            name = self._names[asked.actor]
            if not is_lost(error) or time.monotonic() > until_s:
                raise plain_error(error, name) from None
            with self._changed:
                self._changed.wait_for(lambda: self._is_replaced(asked), _FOLLOWED_S)
            return None
        return answer

    def _is_replaced(self, asked: "_Asked") -> bool:
        # A single source that moved is enough, because its answer may never come.
        return any(self._actors[source] != asked.actor for source in asked.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call under way."""

    actor: Any
    sources: set[int]
    """Sources of the requests."""
    places: list[int]
    """Indices of the requests among all requests."""
    answer: Any
