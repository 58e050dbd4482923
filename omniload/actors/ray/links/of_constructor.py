"""A data constructor's ways to source loaders, as Ray actors.

They lead to whoever serves each source. Of a source the hand-over with the highest number counts: a role that is told
of an earlier one later does not go back.
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
"""Another holder is looked for so often while one gives no answer: a lost one is replaced before Ray says so."""
_FOLLOWED_S = 1.0
"""Longest wait for another holder of one that is lost and may have been cut off for a moment; it is asked again."""


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
    """Number of the last hand-over that this knows of."""
    limit_s: float
    """Longest wait for the slices of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A loader that serves sources from now on."""

    sources: tuple[int, ...]
    actor: Any
    name: str
    role: str
    turn: int
    """Number of the hand-over: what is said of a source later is not followed by what was said earlier."""


class LoaderHolders:
    """The source loaders as one constructor knows them. Safe to call from several threads."""

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
        """Return the number of the last hand-over known of each source: loaders from before it are not asked."""
        with self._changed:
            return tuple(self._turns.get(source, -1) for source in sources)

    def replace(self, serving: Serving) -> None:
        """Ask another loader for its sources, also for what was asked of the one before it."""
        with self._changed:
            # Names stay: an error of a loader that was asked before it was replaced still names it.
            self._names[serving.actor] = serving.name
            for source in serving.sources:
                if serving.turn > self._turns.get(source, -1):  # calls may overtake each other
                    self._actors[source], self._turns[source] = serving.actor, serving.turn
            self._changed.notify_all()

    def fetch(self, requests: Sequence[SliceRequest]) -> ColumnRanges:
        """Get the slices of steps: one call per loader, however many samples or sources.

        A loader that is lost, or replaced while it does not answer, is followed: the next one is asked
        for the same, and what the first may still say is not heard.

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
            # What was answered stays: of a window that many loaders share, one that is lost costs its part.
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
        """Return an answer; ``None`` when another loader is to be asked instead."""
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
                return None  # whatever ails it: another loader serves what it was asked for
            name = self._names[asked.actor]
            if not is_lost(error) or time.monotonic() > until_s:
                raise plain_error(error, name) from None
            with self._changed:
                self._changed.wait_for(lambda: self._is_replaced(asked), _FOLLOWED_S)
            return None
        return answer

    def _is_replaced(self, asked: "_Asked") -> bool:
        # One source that is served elsewhere is enough: for that one no answer may ever come.
        return any(self._actors[source] != asked.actor for source in asked.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call under way."""

    actor: Any
    sources: set[int]
    """What it was asked for."""
    places: list[int]
    """Places of the requests among all."""
    answer: Any
