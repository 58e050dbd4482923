"""Places of the bytes of a striped segment: units dealt round-robin over objects.

Stripe unit ``u`` lies in object ``u % stripe_count``. With a unit of 4 bytes and 3
objects, the segment ``0123456789abcdef`` becomes::

    object 0   0123 cdef
    object 1   4567
    object 2   89ab

Units that follow each other in one object are adjacent in it, so a window of
many units costs one ranged read per object.
"""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["StripeLayout", "UnitRun"]

MAX_STRIPE_COUNT = 256
"""Most objects of one segment; each costs an open and a block list on the name node."""
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 4, 64 << 20


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Adjacent units of one object: ``first``, ``first + stripe_count``, ..."""

    object_number: int
    object_offset: int
    size_bytes: int
    units: tuple[int, ...]
    """Numbers of the units within the segment, rising."""


@dataclass(frozen=True, slots=True)
class StripeLayout:
    """A stripe unit in bytes and the number of objects it is dealt over.

    Raises:
        ValueError: A value is outside its range.
    """

    unit_bytes: int
    stripe_count: int

    def __post_init__(self) -> None:
        if not MIN_UNIT_BYTES <= self.unit_bytes <= MAX_UNIT_BYTES:
            raise ValueError(
                f"unit_bytes is {self.unit_bytes}; give {MIN_UNIT_BYTES} to {MAX_UNIT_BYTES}"
            )
        if not 1 <= self.stripe_count <= MAX_STRIPE_COUNT:
            raise ValueError(f"stripe_count is {self.stripe_count}; give 1 to {MAX_STRIPE_COUNT}")

    def num_units(self, size_bytes: int) -> int:
        """Return the number of units of a segment of ``size_bytes``; the last may be short."""
        return -(-size_bytes // self.unit_bytes)

    def unit_size(self, unit: int, size_bytes: int) -> int:
        """Return the bytes in ``unit`` of a segment of ``size_bytes``."""
        return min(self.unit_bytes, size_bytes - unit * self.unit_bytes)

    def object_size(self, object_number: int, size_bytes: int) -> int:
        """Return the bytes of one object; all objects together hold ``size_bytes``."""
        whole, short = divmod(size_bytes, self.unit_bytes)
        turns, extra = divmod(whole, self.stripe_count)
        size = (turns + (object_number < extra)) * self.unit_bytes
        # A last unit that is not full goes to the object whose turn it is.
        return size + (short if object_number == extra else 0)

    def num_objects(self, size_bytes: int) -> int:
        """Return the number of objects that hold at least one byte."""
        return min(self.stripe_count, self.num_units(size_bytes))

    def place(self, unit: int) -> tuple[int, int]:
        """Return the object of ``unit`` and the unit's offset in it."""
        turn, object_number = divmod(unit, self.stripe_count)
        return object_number, turn * self.unit_bytes

    def runs(self, units: list[int], size_bytes: int, *, longest_bytes: int) -> Iterator[UnitRun]:
        """Group ``units`` into ranged reads of whole units, none longer than ``longest_bytes``.

        Args:
            units: Distinct unit numbers, rising.
            size_bytes: Bytes of the segment.
            longest_bytes: Most bytes of one run; one unit is always allowed.

        Yields:
            Runs that together hold every unit once.
        """
        # At least one, because a unit is never divided: its checksum covers all of it.
        per_run = max(1, longest_bytes // self.unit_bytes)
        # One open run for each object, because consecutive units of the file are in different objects.
        open_runs: dict[int, list[int]] = {}
        for unit in units:
            run = open_runs.setdefault(unit % self.stripe_count, [])
            if run and (unit != run[-1] + self.stripe_count or len(run) == per_run):
                yield self._run(run, size_bytes)
                run = open_runs[unit % self.stripe_count] = []
            run.append(unit)
        for run in open_runs.values():
            yield self._run(run, size_bytes)

    def _run(self, units: list[int], size_bytes: int) -> UnitRun:
        object_number, start = self.place(units[0])
        size = (len(units) - 1) * self.unit_bytes + self.unit_size(units[-1], size_bytes)
        return UnitRun(object_number, start, size, tuple(units))
