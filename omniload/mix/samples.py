"""Metadata of samples: everything that the planner knows about them. The planner never sees their payload.

Shape suffixes:
    N  samples of one source, in position order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges

__all__ = ["Coded", "SampleTable", "joined_tables"]


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Samples made from the raw positions ``start`` to ``stop`` of a source.

    A raw record may give no sample (if it was dropped) or several. ``subs_N`` numbers the samples of one record from
    0. Positions run on over epochs: ``epoch = position // positions_in_an_epoch``.
    """

    start: int
    """First raw position covered."""
    stop: int
    """First raw position no longer covered."""
    positions_N: NDArray[np.int64]
    """Raw position of each sample; the values never fall."""
    subs_N: NDArray[np.int32]
    """Number of the sample within its record."""
    lengths_N: NDArray[np.int32]
    """Tokens in each sample, at least 1."""
    metadata: Mapping[str, Ragged] = field(default_factory=dict)
    """Small numbers of each sample by name, such as ``LOSS_SPANS``; empty for plain tokens. The planner stores them
    elsewhere when the table is reported, so tables that are derived from this one have none."""
    bad_N: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    """Positions of the records that could not be decoded and give no sample, rising, ``[bad records]``."""
    reason: str = ""
    """Fault of one of the bad records, or of the records that were decoded together with it."""
    places: tuple[str, ...] = ()
    """File of each of ``bad_N`` and its number in that file; empty where the maker of the table does not know them."""

    def __len__(self) -> int:
        return len(self.positions_N)

    @classmethod
    def empty(cls, at: int) -> Self:
        """Return a table that covers nothing, at position ``at``."""
        return cls(
            start=at,
            stop=at,
            positions_N=np.empty(0, np.int64),
            subs_N=np.empty(0, np.int32),
            lengths_N=np.empty(0, np.int32),
        )

    def followed_by(self, other: "SampleTable") -> "SampleTable":
        """Return this table and the one that starts where it stops, as one."""
        assert other.start == self.stop, (
            f"a table from {other.start} does not follow one that stops at {self.stop}"
        )
        return SampleTable(
            start=self.start,
            stop=other.stop,
            positions_N=np.concatenate((self.positions_N, other.positions_N)),
            subs_N=np.concatenate((self.subs_N, other.subs_N)),
            lengths_N=np.concatenate((self.lengths_N, other.lengths_N)),
            bad_N=np.concatenate((self.bad_N, other.bad_N)),
            reason=other.reason or self.reason,
            places=(*self._every_place(), *other._every_place()),
        )

    def of_samples(self, which: slice | NDArray[np.bool_]) -> "SampleTable":
        """Return a table of the same positions with only some of the samples."""
        return SampleTable(
            start=self.start,
            stop=self.stop,
            positions_N=self.positions_N[which],
            subs_N=self.subs_N[which],
            lengths_N=self.lengths_N[which],
            bad_N=self.bad_N,
            reason=self.reason,
            places=self.places,
        )

    def bad_from(self, position: int) -> "SampleTable":
        """Return the table without the bad records before a position."""
        count = int(self.bad_N.searchsorted(position))
        if not count:
            return self
        # ``replace`` would take three times as long, and in each step some of a thousand sources forget bad records.
        return SampleTable(
            start=self.start,
            stop=self.stop,
            positions_N=self.positions_N,
            subs_N=self.subs_N,
            lengths_N=self.lengths_N,
            metadata=self.metadata,
            bad_N=self.bad_N[count:],
            reason=self.reason,
            places=self.places[count:],
        )

    def place_of(self, position: int) -> str:
        """Return the file of a bad record and its number there; empty where they are unknown."""
        at = int(self.bad_N.searchsorted(position))
        is_known = at < len(self.places) and int(self.bad_N[at]) == position
        return self.places[at] if is_known else ""

    def _every_place(self) -> tuple[str, ...]:
        return self.places or ("",) * len(self.bad_N)

    def within(self, start: int, stop: int) -> "SampleTable":
        """Return the part from raw position ``start`` to ``stop``, as far as it is covered, with its metadata."""
        start, stop = max(start, self.start), min(stop, self.stop)
        # The cut lies before the first sample of a record, so records stay whole.
        first, last = self.positions_N.searchsorted((start, stop)).tolist()
        bad_N, places = self.bad_N, self.places
        if len(bad_N):
            inside = slice(*bad_N.searchsorted((start, stop)).tolist())
            bad_N, places = bad_N[inside], places[inside]
        return SampleTable(
            start=start,
            stop=stop,
            positions_N=self.positions_N[first:last],
            subs_N=self.subs_N[first:last],
            lengths_N=self.lengths_N[first:last],
            metadata={name: each.between(first, last) for name, each in self.metadata.items()},
            bad_N=bad_N,
            reason=self.reason,
            places=places,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """One value for each of ``N`` samples, stored as numbers into a list of distinct texts.

    The languages of a million documents then take a million bytes and a few words.
    """

    values_N: NDArray[Any]
    """Numbers. For texts, each is an index into ``words``, in the narrowest type that can hold all indices."""
    words: tuple[str, ...] | None = None
    """Every distinct text, in the order of its first sample; ``None`` where the values are numbers."""

    @classmethod
    def of_texts(cls, texts: Ragged) -> Self:
        """Number texts that are stored end to end as UTF-8.

        Raises:
            UnicodeDecodeError: A text is not valid UTF-8.
        """
        array = pa.Array.from_buffers(
            pa.large_binary(),
            len(texts),
            [
                None,
                pa.py_buffer(np.ascontiguousarray(texts.offsets, np.int64)),
                pa.py_buffer(np.ascontiguousarray(texts.values_V, np.uint8)),
            ],
        ).dictionary_encode()
        words = tuple(word.decode() for word in array.dictionary.to_pylist())
        narrowest = np.min_scalar_type(max(len(words) - 1, 0))
        return cls(values_N=array.indices.to_numpy().astype(narrowest), words=words)

    def __len__(self) -> int:
        return len(self.values_N)

    def between(self, first: int, last: int) -> Self:
        """Return the values from sample ``first`` to before ``last``; no value is copied, and all words stay."""
        return replace(self, values_N=self.values_N[first:last])


def joined_tables(parts: Sequence[SampleTable]) -> SampleTable:
    """Return tables that follow each other as one, with the metadata that all of them have."""
    if len(parts) == 1:
        return parts[0]
    # A table without samples may lack metadata that the others have, because all of its records were left out.
    given = [part for part in parts if len(part)] or parts[:1]
    names = set.intersection(*(set(part.metadata) for part in given))
    return replace(
        reduce(SampleTable.followed_by, parts),
        metadata={
            name: Ranges.of(
                [part.metadata[name] for part in given], given[0].metadata[name].values_V.dtype.type
            ).packed()
            for name in names
        },
    )
