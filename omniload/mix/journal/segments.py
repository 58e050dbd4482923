"""Segments: the objects that a journal lies in on a store, and which bytes of it each of them holds.

A store of objects appends to nothing, so that what a planner adds is an object of its own, named by where
its bytes lie in the journal and by the *life* of the planner that wrote it::

    lines/0000000000004096-0000000000004610-00000002-9f31c2aa     bytes 4096 to 4610, by life 2

The name decides the bytes: a put that comes late, or twice, changes nothing. The first segment of a life says
where it goes on; whatever lives before it wrote from there on is void, whenever it comes. Segments of one life may
lie over each other, where small ones were merged into a large one and are not removed yet.

::

    life 1   |aaaa|bb|cc|dd|            what is read:  aaaa bb | CCCC DD
    life 2           |CCCC|DD|

A journal that is not gone on with is moved aside, a folder of segments of its own::

    FOLDER/lines/     ── a start at step 0, or damage ──▶ FOLDER/aside-3/
    FOLDER/aside-1/   aside-3 holds all of its bytes ──▶ removed
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from fusefs.stores.protocol import Store
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger

__all__ = [
    "ASIDES",
    "FAN_IN",
    "LAST_LIFE",
    "Extent",
    "Life",
    "Merging",
    "Segment",
    "extents_of",
    "moved_aside",
]

_LOG = get_logger(__name__)
ASIDES = 8
"""Journals that stay aside; beyond it each one that comes takes the place of the oldest."""

FAN_IN = 16
"""Segments of like size that are merged into one: each byte is written again for every power of it."""
_RESTS_BYTES = 1 << 20
"""A segment as large as that is merged no more."""
LAST_LIFE = 99_999_999
"""Greatest number of a life that a name holds."""
_LIFE = re.compile(r"([0-9]{8})-([0-9a-f]{8})")
_NAME = re.compile(rf"([0-9]{{16}})-([0-9]{{16}})-{_LIFE.pattern}")
_ASIDE = re.compile(r"aside-([1-9][0-9]{0,8})")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Life:
    """A planner's hold on a journal; the greatest one goes on with it."""

    number: int
    """One more than any before it."""
    token: str
    """Tells lives apart that took the same number at once."""

    @override
    def __str__(self) -> str:
        return f"{self.number:08d}-{self.token}"

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the life of a name, or ``None`` where it is none."""
        parts = _LIFE.fullmatch(text)
        return None if parts is None else cls(int(parts[1]), parts[2])


@dataclass(frozen=True, slots=True)
class Segment:
    """One object of a journal."""

    start: int
    """First byte of the journal in it."""
    stop: int
    """The byte behind its last one, as its name says."""
    life: Life
    """The planner that wrote it."""

    @property
    def name(self) -> str:
        """Its name on the store."""
        return f"{self.start:016d}-{self.stop:016d}-{self.life}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Return the segment of a name, or ``None`` where it is none: what else lies there is left alone."""
        if (parts := _NAME.fullmatch(name)) is None:
            return None
        start, stop, number, token = parts.groups()
        return cls(int(start), int(stop), Life(int(number), token))


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a journal that are read from one segment."""

    start: int
    stop: int
    segment: Segment


def extents_of(found: Iterable[tuple[Segment, int]]) -> list[Extent]:
    """Return where each byte of a journal lies, in order and without a gap.

    Args:
        found: Segments, each with the bytes that its object has: fewer than its name says where it is torn.

    Raises:
        IntegrityError: Bytes before the last segment that counts lie nowhere.
    """
    sized = list(found)
    begin: dict[Life, int] = {}
    for segment, _ in sized:
        begin[segment.life] = min(segment.start, begin.get(segment.life, segment.start))
    limit: dict[Life, int | None] = {}
    void: int | None = None
    # From the last life back: each voids what earlier ones have from its first byte on.
    for life in sorted(begin, reverse=True):
        limit[life] = void
        void = begin[life] if void is None else min(void, begin[life])
    held = []
    for segment, size in sized:
        stop, most = min(segment.stop, segment.start + size), limit[segment.life]
        stop = stop if most is None else min(stop, most)
        if segment.start < stop:
            # Of those that start together the longest first: it was merged of the others.
            held.append((segment.start, -stop, segment))
    extents: list[Extent] = []
    at = 0
    for start, negative_stop, segment in sorted(held, key=lambda each: each[:2]):
        if start > at:
            raise IntegrityError(
                f"bytes {at} to {start} of the journal lie in no segment, and {segment.name} follows: an object is "
                "missing or cut short; resume from a checkpoint"
            )
        if -negative_stop > at:
            # From where the one before ends: what both hold are the same bytes, as their names say.
            extents.append(Extent(at, -negative_stop, segment))
            at = -negative_stop
    return extents


@dataclass(slots=True)
class _Held:
    segment: Segment
    content: bytes
    level: int


class Merging:
    """Says which segments of a life become one, so that their number grows by the logarithm of what was added.

    Like sizes are merged, as in a log-structured tree: of n appends of b bytes there are at most ``FAN_IN`` small
    segments of each size, and one of 1 MiB or more for every 1 MiB. It holds what may be merged, 16 MiB at most.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def added(self, segment: Segment, content: bytes) -> None:
        """Take a segment that was written, and what is in it."""
        if len(content) >= _RESTS_BYTES:
            # What is merged lies end to end: small ones in front of a large one stay small.
            self._held.clear()
        else:
            self._held.append(_Held(segment, content, 0))

    def due(self) -> tuple[Segment, bytes, Sequence[Segment]] | None:
        """Return a segment that is to be written, its content, and those that it takes the place of; ``None`` for none.

        It counts as written from then on.
        """
        last = self._held[-FAN_IN:]
        if len(last) < FAN_IN or len({each.level for each in last}) > 1:
            return None
        del self._held[-FAN_IN:]
        first = last[0].segment
        merged = Segment(first.start, last[-1].segment.stop, first.life)
        content = b"".join(each.content for each in last)
        if len(content) < _RESTS_BYTES:
            self._held.append(_Held(merged, content, last[0].level + 1))
        else:
            self._held.clear()
        return merged, content, [each.segment for each in last]


def moved_aside(store: Store, lines: str) -> str:
    """Move a folder of segments aside, and return its name by then.

    Each step leaves folders that are read as they were, whenever it ends: what is removed is held by another one, or
    is the oldest of more than ``ASIDES`` that can be read; of these one goes at most.

    Args:
        store: The folder of the journal.
        lines: Name of the folder in it.

    Raises:
        OSError: It cannot be moved; likewise ``UnavailableError``.
    """
    numbers = sorted(
        int(found[1])
        for entry in store.listing("")
        if (found := _ASIDE.fullmatch(entry.name)) is not None
    )
    name = f"aside-{max(numbers, default=0) + 1}"
    store.rename(lines, name)
    try:
        return _settled(store, name, [f"aside-{number}" for number in numbers])
    except (OSError, OmniloadError) as error:
        # It is moved: that more than needed are kept harms nobody.
        _LOG.warning(
            "%s: journals that were moved aside before stay as they are: %s", store.location, error
        )
        return name


def _settled(store: Store, name: str, others: list[str]) -> str:
    """Remove what others hold, and one beyond ``ASIDES``; return what holds the one that was moved."""
    kept = {each: extents for each in (*others, name) if (extents := _extents(store, each))}
    for other in others:
        if name not in kept or other not in kept:
            continue  # a part is missing: what it begins with is not known
        shorter, longer = sorted((name, other), key=lambda each: kept[each][-1].stop)
        if _begins_with(store, kept, longer, shorter):
            _LOG.warning("%s/%s is removed: %s holds all of it", store.location, shorter, longer)
            _remove(store, shorter)
            del kept[shorter]
            if shorter == name:
                return longer
    if len(kept) > ASIDES:
        # One for the one that came: an earlier release removed none, and an upgrade must not take what it left.
        # What cannot be read counts for nothing, and stays: nobody can tell what it is.
        oldest = next(each for each in others if each in kept)
        _LOG.warning(
            "%s/%s is removed, the oldest of %d journals that were moved aside and can be read: one goes for each that "
            "comes beyond %d",
            *(store.location, oldest, len(kept), ASIDES),
        )
        _remove(store, oldest)
    return name


def _extents(store: Store, folder: str) -> list[Extent]:
    found = ((Segment.named(entry.name), entry.size_bytes) for entry in store.listing(folder))
    with suppress(IntegrityError):
        return extents_of((segment, size) for segment, size in found if segment is not None)
    return []


def _begins_with(store: Store, kept: Mapping[str, list[Extent]], longer: str, shorter: str) -> bool:
    """Tell whether a journal holds every byte of another one, as far as that can be read."""
    stop = kept[shorter][-1].stop
    # From the end: each line has a checksum of all before it, so that journals of two runs differ there already. Where
    # the ends are the same, one of them may be damaged before it for all that, and the other one is the sound one.
    return all(
        _read(store, shorter, kept[shorter], start, min(start + _BLOCK, stop))
        == _read(store, longer, kept[longer], start, min(start + _BLOCK, stop))
        for start in reversed(range(0, stop, _BLOCK))
    )


def _read(store: Store, folder: str, extents: list[Extent], start: int, stop: int) -> bytes:
    """Return the bytes from ``start`` to ``stop``."""

    def parts() -> Iterator[bytes]:
        for each in extents:
            first, last = max(start, each.start), min(stop, each.stop)
            if first < last:
                path = f"{folder}/{each.segment.name}"
                yield store.read(path, first - each.segment.start, last - first)

    return b"".join(parts())


def _remove(store: Store, folder: str) -> None:
    # From its end: what is left of it at any moment is the beginning of a journal.
    for entry in sorted(store.listing(folder), key=lambda each: each.name, reverse=True):
        with suppress(FileNotFoundError):
            store.remove(f"{folder}/{entry.name}")
    with suppress(OSError):  # a store of objects has no folder that is empty
        store.remove_directory(folder)
