"""The decoded units of a block, and the samples of records that are made of them.

Of a unit there are records as the format gives them, or samples that a token cache held.

Shape suffixes:
    U  units of the block      R  records of the block      B  records of one unit      N  records asked for, or samples
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow.compute  # noqa: F401 -- here, and not by a reader's thread as it first compares: see omniload.mix.order
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Rows, numbers_of
from omniload.mix.schema.splits import content_keys
from omniload.source.block_memory import BlockMemory, HeldBlock
from omniload.source.columns import drained
from omniload.source.formats.format import Records
from omniload.source.token_cache.entry import EncodedUnit
from omniload.source.token_cache.source_tokens import Filling, SourceTokens, UnitToFill
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.pipeline import Pipeline

__all__ = ["Block", "DecodedBlocks", "UnitReader", "decoded_block"]

_TOKENS = "tokens"
"""Column of a block that holds token ids, or the text that they are made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReader:
    """How the units of a source are read, and what is drawn of them."""

    read: Callable[[int], Records]
    """Decodes a unit; raises what is wrong with it."""
    note: Callable[[Records], None]
    """Told of every unit, for its bad records; raises where there must be none."""
    drawn: Callable[[int, Records], NDArray[np.bool_] | None]
    """Which records are drawn, ``[B]``; ``None`` for all."""
    takes_bad: bool
    """Whether records that cannot be used are passed over."""
    wants_keys: bool
    """Whether ``drawn`` looks at what records are known by."""
    tokens: SourceTokens | None = None
    """The entries of the source in a token cache, where there is one."""

    def usable_of(
        self, unit: int, records: Records, given_B: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which records of a unit give samples: decoded, not empty, and drawn."""
        usable_B = given_B > records.bad_B
        drawn_B = self.drawn(unit, records)
        return usable_B if drawn_B is None else usable_B & drawn_B


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptSamples:
    """The samples of a block that a token cache held; where a record lies that has one, or has none."""

    held: HeldBlock
    is_sample_R: NDArray[np.bool_]
    places_R: NDArray[np.int64]
    """Where each record lies, in ``held`` or among those that were decoded."""
    spoilt_R: NDArray[np.bool_]
    """Of samples: it could not be made, and why is in ``spoilt``."""
    spoilt: str

    @classmethod
    def of(cls, held: HeldBlock, units: Sequence["_Unit"]) -> "_KeptSamples":
        """Show the samples of some of the units of a block."""
        counts_U = [len(unit.bad_B) for unit in units]
        is_sample_R = np.repeat([unit.spoilt_B is not None for unit in units], counts_U)
        return cls(
            held=held,
            is_sample_R=is_sample_R,
            # A record lies behind as many of its kind as there are before it in the block.
            places_R=np.where(is_sample_R, np.cumsum(is_sample_R), np.cumsum(~is_sample_R)) - 1,
            spoilt_R=np.concatenate(
                [
                    np.zeros(len(unit.bad_B), np.bool_) if unit.spoilt_B is None else unit.spoilt_B
                    for unit in units
                ]
            ),
            spoilt=next((unit.spoilt for unit in units if unit.spoilt), ""),
        )

    def of_rows(self, rows_N: NDArray[np.int64]) -> Samples:
        """Return the samples of records, which all have one."""
        others = self.held.take(self.places_R[rows_N])
        bad_N = self.spoilt_R[rows_N]
        any_bad = bool(bad_N.any())
        return Samples(
            tokens=others.pop(_TOKENS),
            others=others,
            bad_N=bad_N if any_bad else None,
            reason=self.spoilt if any_bad else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Decoded units, their records end to end."""

    units: tuple[int, ...]
    begins_U: NDArray[np.int64]
    """First record of each unit."""
    usable_R: NDArray[np.bool_]
    """Decoded, not empty, and drawn."""
    bad_R: NDArray[np.bool_]
    records: HeldBlock | None
    """Records of the units that were decoded; ``None`` where all are samples."""
    kept: _KeptSamples | None
    """Samples of the others; ``None`` where all were decoded."""
    filling: Filling | None = None
    is_whole: bool = False
    """Whether all of its records are usable: they need not be looked at for each read."""

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first record of each unit, and the first one behind it."""
        return list(pairwise([*self.begins_U.tolist(), len(self.usable_R)]))

    def places_of(self, rows_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the unit of each record, as the source numbers them, and its number within that."""
        at_N = np.searchsorted(self.begins_U, rows_N, side="right") - 1
        return np.asarray(self.units, np.int64)[at_N], rows_N - self.begins_U[at_N]

    def encoded(self, rows: Rows, pipeline: Pipeline, *, lent: bool = False) -> Samples:
        """Return the samples of records before any transform of tokens; ``lent`` to whoever copies their tokens."""
        if self.kept is None:
            return self._made(rows, pipeline, lent=lent)
        rows_N = numbers_of(rows)
        is_sample_N = self.kept.is_sample_R[rows_N]
        if is_sample_N.all():
            return self.kept.of_rows(rows_N)
        if not is_sample_N.any():
            return self._made(rows_N, pipeline, lent=lent)
        parts = [
            self.kept.of_rows(rows_N[is_sample_N]),
            self._made(rows_N[~is_sample_N], pipeline),
        ]
        order = np.concatenate((np.flatnonzero(is_sample_N), np.flatnonzero(~is_sample_N)))
        # The inverse of the order in which the parts have them: back to that which was asked for.
        return _merged(parts, np.argsort(order))

    def _made(self, rows: Rows, pipeline: Pipeline, *, lent: bool = False) -> Samples:
        assert self.records is not None, "some unit was decoded"
        places = rows if self.kept is None else self.kept.places_R[numbers_of(rows)]
        if not pipeline.takes_text:
            others = self.records.take(places, lent=_TOKENS if lent else None)
            return Samples(tokens=others.pop(_TOKENS), others=others)
        # Text is gone once it is tokens; all else goes on, and must not keep the block.
        texts = self.records.texts(_TOKENS, places)
        samples = pipeline.encoded(texts, self.records.take(places, without=_TOKENS))
        if self.filling is not None:
            self.filling.add(numbers_of(rows), samples)
        return samples


def _merged(parts: Sequence[Samples], order_N: NDArray[np.int64]) -> Samples:
    """Return samples of several parts as one, in another order."""
    names = parts[0].others
    bad = [
        np.zeros(len(part.tokens), np.bool_) if part.bad_N is None else part.bad_N for part in parts
    ]
    bad_N = np.concatenate(bad)[order_N]
    return Samples(
        tokens=_taken([part.tokens for part in parts], order_N),
        others={name: _taken([part.others[name] for part in parts], order_N) for name in names},
        bad_N=bad_N if bad_N.any() else None,
        reason=next((part.reason for part in parts if part.reason), ""),
    )


def _taken(columns: list[Ragged], order_N: NDArray[np.int64]) -> Ragged:
    return drained(list(columns), columns[0].values_V.dtype).take(order_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What a block keeps of a unit beside its columns."""

    bad_B: NDArray[np.bool_]
    usable_B: NDArray[np.bool_]
    spoilt_B: NDArray[np.bool_] | None = None
    """``None`` where records were decoded."""
    spoilt: str = ""
    to_fill: UnitToFill | None = None
    """``None`` where samples were kept, or none are to be."""


class DecodedBlocks:
    """The decoded block of a source; two of them where it stands at both. For one thread."""

    def __init__(self) -> None:
        self._held: list[Block] = []
        self.is_new = True
        """Whether none was decoded yet."""

    def of(
        self,
        units: tuple[int, ...],
        reader: UnitReader,
        memory: BlockMemory,
        beside: Sequence[tuple[int, ...]] = (),
    ) -> Block:
        """Return the records of ``units``: those at hand, or newly decoded ones in place of all but ``beside``."""
        # A source of one block decodes once for all epochs: the units are the same, only the
        # order of the rows is another.
        found = next((block for block in self._held if block.units == units), None)
        if found is None:
            # The last block goes first: one more of them would be as much more memory.
            self.let_go(but=beside)
            self.is_new = False
            found = decoded_block(units, reader, memory)
            self._held.append(found)
        return found

    def let_go(self, but: Sequence[tuple[int, ...]] = ()) -> None:
        """Let go of all, but for those of some units."""
        for block in self._held:
            if block.units not in but and block.filling is not None:
                block.filling.keep_whole_units()
        self._held = [block for block in self._held if block.units in but]

    def keep_tokens(self, block: Block) -> None:
        """Keep the tokens of a block that was read to its end, and take them from there in its next epoch."""
        if block.filling is not None and block.filling.keep_whole_units():
            self._held = [each for each in self._held if each is not block]


def decoded_block(units: tuple[int, ...], reader: UnitReader, memory: BlockMemory) -> Block:
    """Return the records of units: samples of those that a token cache holds, the others decoded."""
    found: dict[int, _Unit] = {}
    samples = None
    if reader.tokens is not None:
        samples = _kept_units(units, reader, memory, found)
    left = [unit for unit in units if unit not in found]
    records = _decoded_units(left, reader, memory, found) if left else None
    each = [found[unit] for unit in units]
    counts_U = [len(unit.bad_B) for unit in each]
    begins_U = np.cumsum([0, *counts_U[:-1]])
    usable_R = np.concatenate([unit.usable_B for unit in each])
    return Block(
        units=units,
        begins_U=begins_U,
        usable_R=usable_R,
        is_whole=bool(usable_R.all()),
        bad_R=np.concatenate([unit.bad_B for unit in each]),
        records=records,
        kept=None if samples is None else _KeptSamples.of(samples, each),
        filling=None
        if reader.tokens is None or records is None
        else Filling(
            reader.tokens,
            {
                begin: unit.to_fill
                for begin, unit in zip(begins_U.tolist(), each, strict=True)
                if unit.to_fill is not None
            },
            sum(counts_U),
            memory.folder,
        ),
    )


def _kept_units(
    units: Sequence[int], reader: UnitReader, memory: BlockMemory, found: dict[int, _Unit]
) -> HeldBlock | None:
    """Hold the samples of units that are kept, and enter those in ``found``."""
    assert reader.tokens is not None, "there is a cache"
    shape: Mapping[str, Ragged] | None = None
    bare: list[Ragged] = []
    with memory.writing() as writer:
        for unit in units:
            kept = reader.tokens.get(unit)
            if kept is None:
                continue
            usable_B = reader.usable_of(unit, kept.records, kept.given_B)
            if not _suffices(kept, usable_B, reader):
                continue
            # Bad records count whether or not the text of their unit is decoded again.
            reader.note(kept.records)
            found[unit] = _Unit(
                bad_B=kept.bad_B, usable_B=usable_B, spoilt_B=kept.spoilt_B, spoilt=kept.spoilt
            )
            # Of a unit without a sample it was not known which columns one has: blank ones keep all in step.
            if kept.made_B.any():
                shape = kept.others
            bare.append(kept.tokens)
            if shape is None:
                continue
            for tokens in bare[:-1]:
                writer.append({_TOKENS: tokens, **_blank(shape, len(tokens))})
            writer.append({_TOKENS: kept.tokens, **_blank(shape, len(kept.tokens)), **kept.others})
            bare.clear()
        for tokens in bare:
            writer.append({_TOKENS: tokens})
        # A block without a column could not be asked for any.
        return memory.hold(writer.finish()) if found else None


def _blank(shape: Mapping[str, Ragged], count: int) -> dict[str, Ragged]:
    """Return columns as those of ``shape``, of so many records without a value."""
    offsets = np.zeros(count + 1, np.int64)
    return {
        name: Ragged(values_V=np.empty(0, column.values_V.dtype), offsets=offsets)
        for name, column in shape.items()
    }


def _suffices(kept: EncodedUnit, usable_B: NDArray[np.bool_], reader: UnitReader) -> bool:
    """Whether an entry has all that is drawn of a unit, and nothing to complain of better where it was found."""
    if reader.wants_keys and kept.keys_B is None:
        return False
    # Which records are the first of their kind goes by other shards too, of which the entry's name says nothing.
    if (usable_B & ~kept.made_B).any():
        return False
    return reader.takes_bad or not (kept.bad_B.any() or kept.spoilt_B.any())


def _decoded_units(
    units: Sequence[int], reader: UnitReader, memory: BlockMemory, found: dict[int, _Unit]
) -> HeldBlock:
    """Hold the records of units, and enter those in ``found``."""
    with memory.writing() as writer:
        for unit in units:
            records = reader.read(unit)
            reader.note(records)
            # An entry of the cache holds no text that a key could be made of later.
            if reader.wants_keys and records.keys_B is None and reader.tokens is not None:
                records = replace(records, keys_B=content_keys(records.column))
            offsets = records.column.offsets
            given_B = offsets[1:] > offsets[:-1]
            usable_B = reader.usable_of(unit, records, given_B)
            to_fill = None
            if reader.tokens is not None:
                to_fill = UnitToFill.of(unit, records, given_B=given_B, wanted_B=usable_B)
            found[unit] = _Unit(bad_B=records.bad_B, usable_B=usable_B, to_fill=to_fill)
            writer.append(
                {_TOKENS: records.column, **records.others}, (_TOKENS,) if records.is_own else ()
            )
            del records  # the next unit is decoded without this one
        return memory.hold(writer.finish())
