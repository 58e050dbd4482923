"""Segments: the objects of a journal on a store, and the bytes of the journal that each of them holds.

An object store cannot append to objects. Therefore everything that a planner adds is an object of its own, named by
the place of its bytes in the journal and by the *life* of the planner that wrote it::

    lines/0000000000004096-0000000000004610-00000002-9f31c2aa     bytes 4096 to 4610, by life 2

The name determines the bytes, so a put that arrives late or twice changes nothing. The first segment of a life shows
where that life continues. Everything that earlier lives wrote from there on is void, whenever it arrives. Segments of
one life may overlap if small segments were merged into a large one and are not removed yet.

::

    life 1   |aaaa|bb|cc|dd|            what is read:  aaaa bb | CCCC DD
    life 2           |CCCC|DD|

A journal that is not continued is moved aside into its own folder of segments::

    FOLDER/lines/     ── a start at step 0, or damage ──▶ FOLDER/aside-3/
    FOLDER/aside-1/   aside-3 holds all of its bytes ──▶ removed

If only the last steps are kept, a *mark* names the base from which on the journal is read. It is put before the
segments in front of that base are removed, and is void, as their bytes are, once a later life begins before it::

    lines/from-0000000000004096-70a3b1c2d4e5f607-00000002-9f31c2aa     byte, checksum of the line before, life
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from fusefs.stores.protocol import Entry, Store
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger
from omniload.mix.journal.storage import START, Since

__all__ = [
    "ASIDES",
    "FAN_IN",
    "LAST_LIFE",
    "Extent",
    "Life",
    "Listed",
    "Mark",
    "Merging",
    "Segment",
    "extents_of",
    "moved_aside",
]

_LOG = get_logger(__name__)
ASIDES = 8
"""Number of journals that are kept aside; beyond it, each new one replaces the oldest."""

FAN_IN = 16
"""Number of segments of similar size that are merged into one: each byte is rewritten once for every power of it."""
_RESTS_BYTES = 1 << 20
"""Size from which on a segment is not merged any more."""
LAST_LIFE = 99_999_999
"""Greatest number of a life that fits in a name."""
_LIFE = re.compile(r"([0-9]{8})-([0-9a-f]{8})")
_NAME = re.compile(rf"([0-9]{{16}})-([0-9]{{16}})-{_LIFE.pattern}")
_MARK = re.compile(rf"from-([0-9]{{16}})-([0-9a-f]{{16}})-{_LIFE.pattern}")
_ASIDE = re.compile(r"aside-([1-9][0-9]{0,8})")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Life:
    """The tenure of a planner over a journal; the planner of the greatest life continues the journal."""

    number: int
    """Number of the life, one more than any before it."""
    token: str
    """Random token that distinguishes lives that took the same number at once."""

    @override
    def __str__(self) -> str:
        return f"{self.number:08d}-{self.token}"

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the life of a name, or ``None`` if the name is not a life's."""
        parts = _LIFE.fullmatch(text)
        return None if parts is None else cls(int(parts[1]), parts[2])


@dataclass(frozen=True, slots=True)
class Segment:
    """One object of a journal."""

    start: int
    """First byte of the journal in it."""
    stop: int
    """The byte after its last byte, as its name says."""
    life: Life
    """The life of the planner that wrote it."""

    @property
    def name(self) -> str:
        """Its name on the store."""
        return f"{self.start:016d}-{self.stop:016d}-{self.life}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Return the segment of a name, or ``None`` for other names; other objects in the folder are left alone."""
        if (parts := _NAME.fullmatch(name)) is None:
            return None
        start, stop, number, token = parts.groups()
        return cls(int(start), int(stop), Life(int(number), token))


@dataclass(frozen=True, slots=True)
class Mark:
    """An empty object that says where a journal begins."""

    since: Since
    life: Life
    """The life of the planner that put it."""

    @property
    def name(self) -> str:
        """Its name on the store."""
        return f"from-{self.since.offset:016d}-{self.since.before.decode()}-{self.life}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Return the mark of a name, or ``None`` for other names."""
        if (parts := _MARK.fullmatch(name)) is None:
            return None
        offset, before, number, token = parts.groups()
        return cls(Since(int(offset), before.encode()), Life(int(number), token))


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a journal that are read from one segment."""

    start: int
    stop: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class Listed:
    """The journal among the objects of a folder; objects with other names are left alone."""

    sized: Sequence[tuple[Segment, int]]
    """Segments, each with the size of its object, which is less than its name says if the object is torn."""
    marks: Sequence[Mark]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Self:
        """Find segments and marks by their names."""
        sized, marks = list[tuple[Segment, int]](), list[Mark]()
        for entry in entries:
            if (segment := Segment.named(entry.name)) is not None:
                sized.append((segment, entry.size_bytes))
            elif (mark := Mark.named(entry.name)) is not None:
                marks.append(mark)
        return cls(sized, marks)

    @property
    def begin(self) -> Since:
        """Where the journal begins: at the last mark that is not void, or at its first byte."""
        valid = (
            mark.since
            for mark in self.marks
            if not any(
                segment.life > mark.life and segment.start <= mark.since.offset
                for segment, _ in self.sized
            )
        )
        return max(valid, key=lambda since: since.offset, default=START)

    def extents(self) -> list[Extent]:
        """Return the place of each byte, as ``extents_of`` does."""
        return extents_of(self.sized, self.begin.offset)

    def needless(self, life: Life) -> list[str]:
        """Return the names of segments and marks that the planner of a life may remove.

        Of that life itself only segments before the mark are included: it may have put more than a listing shows. Of
        later lives nothing is.
        """
        needed, begin = {extent.segment for extent in self.extents()}, self.begin
        segments = [
            segment.name
            for segment, _ in self.sized
            if segment not in needed
            and (segment.life < life or (segment.life == life and segment.stop <= begin.offset))
        ]
        return segments + [
            mark.name for mark in self.marks if mark.life <= life and mark.since != begin
        ]


def extents_of(found: Iterable[tuple[Segment, int]], at: int = 0) -> list[Extent]:
    """Return the place of each byte of a journal, in order and without gaps.

    Args:
        found: Segments, each with the size of its object, which is less than its name says if the object is torn.
        at: First byte that counts.

    Raises:
        IntegrityError: Bytes before the last valid segment are in no segment.
    """
    sized = list(found)
    begin: dict[Life, int] = {}
    for segment, _ in sized:
        begin[segment.life] = min(segment.start, begin.get(segment.life, segment.start))
    limit: dict[Life, int | None] = {}
    void: int | None = None
    # From the last life back: each life voids what earlier lives have from its first byte on.
    for life in sorted(begin, reverse=True):
        limit[life] = void
        void = begin[life] if void is None else min(void, begin[life])
    held = []
    for segment, size in sized:
        stop, most = min(segment.stop, segment.start + size), limit[segment.life]
        stop = stop if most is None else min(stop, most)
        if segment.start < stop:
            # Of segments with the same start, the longest comes first, because it was merged from the others.
            held.append((segment.start, -stop, segment))
    extents: list[Extent] = []
    for start, negative_stop, segment in sorted(held, key=lambda each: each[:2]):
        if start > at:
            raise IntegrityError(
                f"bytes {at} to {start} of the journal lie in no segment, and {segment.name} follows: an object is "
                "missing or cut short; resume from a checkpoint"
            )
        if -negative_stop > at:
            # From the end of the segment before; where both overlap, their names guarantee the same bytes.
            extents.append(Extent(at, -negative_stop, segment))
            at = -negative_stop
    return extents


@dataclass(slots=True)
class _Held:
    segment: Segment
    content: bytes
    level: int


class Merging:
    """Decides which segments of a life are merged, so that their number grows only logarithmically.

    Segments of similar size are merged, as in a log-structured tree. For any number of appends, there are at most
    ``FAN_IN`` small segments of each size, and one of at least 1 MiB for every 1 MiB. The content that may still be
    merged is held in memory, 16 MiB at most.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def added(self, segment: Segment, content: bytes) -> None:
        """Register a segment that was written, and its content."""
        if len(content) >= _RESTS_BYTES:
            # Merged segments must be adjacent, so small segments in front of a large one stay small.
            self._held.clear()
        else:
            self._held.append(_Held(segment, content, 0))

    def due(self) -> tuple[Segment, bytes, Sequence[Segment]] | None:
        """Return a segment to write, its content, and the segments that it replaces; ``None`` if no merge is due.

        The segment counts as written from then on.
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
    """Move a folder of segments aside, and return the name under which its journal is kept.

    Each step leaves readable folders, even if it is interrupted. A folder is removed only if another one contains all
    of it, or if it is the oldest of more than ``ASIDES`` readable folders; of the latter, at most one is removed.

    Args:
        store: The folder of the journal.
        lines: Name of the segments' folder in it.

    Raises:
        OSError: The folder cannot be moved; likewise ``UnavailableError``.
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
        # The folder is moved, and keeping more folders than needed is harmless.
        _LOG.warning(
            "%s: journals that were moved aside before stay as they are: %s", store.location, error
        )
        return name


def _settled(store: Store, name: str, others: list[str]) -> str:
    """Remove folders contained in others, and one beyond ``ASIDES``; return the folder with the moved journal."""
    kept = {each: extents for each in (*others, name) if (extents := _extents(store, each))}
    for other in others:
        if name not in kept or other not in kept:
            continue  # a part is missing, so its beginning is unknown
        shorter, longer = sorted((name, other), key=lambda each: kept[each][-1].stop)
        if _begins_with(store, kept, longer, shorter):
            _LOG.warning("%s/%s is removed: %s holds all of it", store.location, shorter, longer)
            _remove(store, shorter)
            del kept[shorter]
            if shorter == name:
                return longer
    if len(kept) > ASIDES:
        # Only one for each that is added: an earlier release removed none, and an upgrade must not delete all of them.
        # Folders that cannot be read are not counted and stay, because their content is unknown.
        oldest = next(each for each in others if each in kept)
        _LOG.warning(
            "%s/%s is removed, the oldest of %d journals that were moved aside and can be read: one goes for each that "
            "comes beyond %d",
            *(store.location, oldest, len(kept), ASIDES),
        )
        _remove(store, oldest)
    return name


def _extents(store: Store, folder: str) -> list[Extent]:
    with suppress(IntegrityError):
        return Listed.of(store.listing(folder)).extents()
    return []


def _begins_with(store: Store, kept: Mapping[str, list[Extent]], longer: str, shorter: str) -> bool:
    """Return whether a journal begins with every byte of another journal, as far as both can be read."""
    stop = kept[shorter][-1].stop
    # From the end: each line has a checksum of all lines before, so journals of two runs differ there already.
    # Everything is compared, because one of two journals with the same end may be damaged before it and the other
    # sound.
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
    # From its end, and a mark last, so that the rest is the beginning of a journal at any moment.
    names = sorted((entry.name for entry in store.listing(folder)), reverse=True)
    for name in sorted(names, key=lambda name: Mark.named(name) is not None):
        with suppress(FileNotFoundError):
            store.remove(f"{folder}/{name}")
    with suppress(OSError):  # an object store has no empty folders
        store.remove_directory(folder)
