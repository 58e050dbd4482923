"""Replacing ranges of a file that lies in segments: what stays, what comes new, and when to stop.

Objects never change, so a write in the middle becomes a new segment, the *patch*, and the
manifest names ranges::

    before   [ A A A A A A A A ]
    changed        ^^    ^
    after    [ A A | P | A | P | A A ]      A and P are one segment each

Every splice leaves more ranges and more bytes that no range shows. A file that is worn by
it is written anew in one go.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence

from fusefs.format.manifest import Segment

__all__ = ["MOST_RANGES", "MOST_RANGES_CLOSED", "filled", "is_worn", "splice"]

MOST_RANGES = 1024
"""Ranges of a file under change; its manifest is then some 50 KiB, written at every fsync."""
MOST_RANGES_CLOSED = 256
"""Ranges a file is left with at its last close: each costs its readers a request."""

Plan = list[Segment | int]
"""A file in order: ranges that stay, and how many bytes of the patch come between them."""


def splice(base: Sequence[Segment], size_bytes: int, changed: Sequence[range]) -> Plan:
    """Plan a file whose ``changed`` ranges come from a patch and whose other bytes stay.

    Args:
        base: Segments of the file before.
        size_bytes: Of the file afterwards.
        changed: Byte ranges within it, rising, disjoint, none empty. What lies behind the
            end of ``base`` must be among them.

    Returns:
        A plan whose sizes sum to ``size_bytes`` and whose patch bytes sum to those of ``changed``.

    Raises:
        ValueError: A byte that is not changed lies behind the end of ``base``.
    """
    starts = list(itertools.accumulate((s.size_bytes for s in base), initial=0))
    plan: Plan = []
    at = 0
    for hole in [*changed, range(size_bytes, size_bytes)]:
        if hole.start > at:
            plan += _parts(base, starts, range(at, hole.start))
        if len(hole):
            plan.append(len(hole))
        at = max(at, hole.stop)
    return plan


def filled(plan: Plan, patch: Segment | None) -> tuple[Segment, ...]:
    """Return the segments of a planned file, once its patch is written.

    Args:
        plan: From ``splice``.
        patch: The changed bytes one after the other; None where nothing changed.
    """
    segments: list[Segment] = []
    taken = 0
    for item in plan:
        if isinstance(item, Segment):
            segments.append(item)
        else:
            assert patch is not None, "bytes changed, so there is a patch"
            segments.append(patch.part(taken, item))
            taken += item
    return tuple(segments)


def is_worn(plan: Plan, *, most_ranges: int = MOST_RANGES) -> bool:
    """Return whether writing the whole file anew is better than this splice.

    It is where most of the file changes anyway, where its objects would hold more than
    twice its bytes, or where too many ranges would be left. So a file costs at most
    twice its space, and writing it anew is paid by what was saved before.
    """
    fresh = sum(item for item in plan if isinstance(item, int))
    stay = [item for item in plan if isinstance(item, Segment)]
    size = fresh + sum(segment.size_bytes for segment in stay)
    # Each segment once, and whole: its objects stay whole though a range of them is shown.
    stored = sum({s.segment_id: s.stored_bytes for s in stay}.values())
    return len(plan) > most_ranges or fresh * 2 > size or stored + fresh > 2 * size


def _parts(base: Sequence[Segment], starts: list[int], wanted: range) -> Iterator[Segment]:
    if wanted.stop > starts[-1]:
        raise ValueError(f"bytes up to {wanted.stop} are to stay, the file had {starts[-1]}")
    number = bisect.bisect_right(starts, wanted.start) - 1
    at = wanted.start
    while at < wanted.stop:
        segment, start = base[number], starts[number]
        stop = min(wanted.stop, start + segment.size_bytes)
        if stop > at:
            yield segment.part(at - start, stop - at)
        at, number = stop, number + 1
