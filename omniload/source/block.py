"""The decoded units of a block, and the samples that are made of their records.

For each unit there are either records, as the format returns them, or samples from a token cache.

Shape suffixes:
    U  units of the block      R  records of the block      B  records of one unit      N  records asked for, or samples
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow.compute  # noqa: F401 -- not first in a reader's thread, as it compares: see omniload.mix.order
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
"""Column of a block that contains the token ids, or the text that they are made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReader:
    """How the units of a source are read, and which of their records are drawn."""

    read: Callable[[int], Records]
    """Decodes a unit; raises an error if the unit is damaged."""
    note: Callable[[Records], None]
    """Receives every unit to count its bad records; raises an error if bad records are not allowed."""
    drawn: Callable[[int, Records], NDArray[np.bool_] | None]
    """Returns which records are drawn, ``[B]``; ``None`` for all."""
    takes_bad: bool
    """Whether unusable records are passed over."""
    wants_keys: bool
    """Whether ``drawn`` needs the keys of the records."""
    tokens: SourceTokens | None = None
    """The entries of the source in a token cache, if there is one."""

    def usable_of(
        self, unit: int, records: Records, given_B: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which records of a unit give samples: records that are decoded, not empty, and drawn."""
        usable_B = given_B > records.bad_B
        drawn_B = self.drawn(unit, records)
        return usable_B if drawn_B is None else usable_B & drawn_B


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptSamples:
    """The samples of a block that came from a token cache, with the place of each record of the block."""

    held: HeldBlock
    is_sample_R: NDArray[np.bool_]
    places_R: NDArray[np.int64]
    """Place of each record, in ``held`` or among the decoded records."""
    spoilt_R: NDArray[np.bool_]
    """Whether the sample of a record could not be made; the reason is in ``spoilt``."""
    spoilt: str

    @classmethod
    def of(cls, held: HeldBlock, units: Sequence["_Unit"]) -> "_KeptSamples":
        """Make an index of the samples of some units of a block."""
        counts_U = [len(unit.bad_B) for unit in units]
        is_sample_R = np.repeat([unit.spoilt_B is not None for unit in units], counts_U)
        return cls(
            held=held,
            is_sample_R=is_sample_R,
            # The place of a record is the number of records of its kind before it in the block.
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
        """Return the samples of records. Each of the records must have a sample."""
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
    """Decoded units with their records end to end."""

    units: tuple[int, ...]
    begins_U: NDArray[np.int64]
    """First record of each unit, ``[U]``."""
    usable_R: NDArray[np.bool_]
    """Whether each record is decoded, not empty, and drawn."""
    bad_R: NDArray[np.bool_]
    records: HeldBlock | None
    """Records of the units that were decoded; ``None`` if all units came from the token cache."""
    kept: _KeptSamples | None
    """Samples of the units that came from the token cache; ``None`` if all units were decoded."""
    filling: Filling | None = None
    is_whole: bool = False
    """Whether all records are usable, so that reads need not check each record."""

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first record of each unit, and the first record after the unit."""
        return list(pairwise([*self.begins_U.tolist(), len(self.usable_R)]))

    def places_of(self, rows_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the unit of each record, by its number in the source, and the number of the record in the unit."""
        at_N = np.searchsorted(self.begins_U, rows_N, side="right") - 1
        return np.asarray(self.units, np.int64)[at_N], rows_N - self.begins_U[at_N]

    def encoded(self, rows: Rows, pipeline: Pipeline, *, lent: bool = False) -> Samples:
        """Return the samples of records before any transform of tokens; ``lent`` if the caller copies their tokens."""
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
        # The inverse of the order of the parts restores the requested order.
        return _merged(parts, np.argsort(order))

    def _made(self, rows: Rows, pipeline: Pipeline, *, lent: bool = False) -> Samples:
        assert self.records is not None, "some unit was decoded"
        places = rows if self.kept is None else self.kept.places_R[numbers_of(rows)]
        if not pipeline.takes_text:
            others = self.records.take(places, lent=_TOKENS if lent else None)
            return Samples(tokens=others.pop(_TOKENS), others=others)
        # Text is dropped once it is tokenised. All other columns continue, and must not keep the block alive.
        texts = self.records.texts(_TOKENS, places)
        samples = pipeline.encoded(texts, self.records.take(places, without=_TOKENS))
        if self.filling is not None:
            self.filling.add(numbers_of(rows), samples)
        return samples


def _merged(parts: Sequence[Samples], order_N: NDArray[np.int64]) -> Samples:
    """Return samples of several parts as one value, in another order."""
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
    """What a block keeps of a unit, apart from its columns."""

    bad_B: NDArray[np.bool_]
    usable_B: NDArray[np.bool_]
    spoilt_B: NDArray[np.bool_] | None = None
    """Records whose samples could not be made; ``None`` if the records of the unit were decoded."""
    spoilt: str = ""
    to_fill: UnitToFill | None = None
    """Writer of the cache entry of the unit; ``None`` if the samples were cached already or no cache is used."""


class DecodedBlocks:
    """The decoded block of a source, or two blocks if the source was asked to stand at both. Not thread-safe."""

    def __init__(self) -> None:
        self._held: list[Block] = []
        self.is_new = True
        """Whether no block has been decoded yet."""

    def of(
        self,
        units: tuple[int, ...],
        reader: UnitReader,
        memory: BlockMemory,
        beside: Sequence[tuple[int, ...]] = (),
    ) -> Block:
        """Return the records of ``units`` from memory, or decode them in place of all blocks except ``beside``."""
        # A source of one block decodes once for all epochs, because its units stay the same and only the order of the
        # rows changes.
        found = next((block for block in self._held if block.units == units), None)
        if found is None:
            # The last block is released first. Otherwise memory would have to hold one block more.
            self.let_go(but=beside)
            self.is_new = False
            found = decoded_block(units, reader, memory)
            self._held.append(found)
        return found

    def let_go(self, but: Sequence[tuple[int, ...]] = ()) -> None:
        """Release all blocks except the blocks of some units."""
        for block in self._held:
            if block.units not in but and block.filling is not None:
                block.filling.keep_whole_units()
        self._held = [block for block in self._held if block.units in but]

    def keep_tokens(self, block: Block) -> None:
        """Keep the tokens of a block that was read to its end, so that its next epoch takes them from the cache."""
        if block.filling is not None and block.filling.keep_whole_units():
            self._held = [each for each in self._held if each is not block]


def decoded_block(units: tuple[int, ...], reader: UnitReader, memory: BlockMemory) -> Block:
    """Return the records of units: samples from the token cache where it has them, and decoded records otherwise."""
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
    """Hold the cached samples of units, and add these units to ``found``."""
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
            # When the entry of a unit without a sample was made, its columns were unknown. Blank columns keep all units
            # in step.
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
        # A block without a column could not be asked for one.
        return memory.hold(writer.finish()) if found else None


def _blank(shape: Mapping[str, Ragged], count: int) -> dict[str, Ragged]:
    """Return columns like those of ``shape``, with ``count`` records without a value."""
    offsets = np.zeros(count + 1, np.int64)
    return {
        name: Ragged(values_V=np.empty(0, column.values_V.dtype), offsets=offsets)
        for name, column in shape.items()
    }


def _suffices(kept: EncodedUnit, usable_B: NDArray[np.bool_], reader: UnitReader) -> bool:
    """Return whether an entry has all that is drawn of a unit, and no fault that the shard itself shows better."""
    if reader.wants_keys and kept.keys_B is None:
        return False
    # Other shards also decide which records are the first of their kind, but the name of the entry does not cover them.
    if (usable_B & ~kept.made_B).any():
        return False
    return reader.takes_bad or not (kept.bad_B.any() or kept.spoilt_B.any())


def _decoded_units(
    units: Sequence[int], reader: UnitReader, memory: BlockMemory, found: dict[int, _Unit]
) -> HeldBlock:
    """Hold the records of units, and add these units to ``found``."""
    with memory.writing() as writer:
        for unit in units:
            records = reader.read(unit)
            reader.note(records)
            # An entry of the cache has no text that a key could be made from later.
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
            del records  # so that the next unit is decoded without this one in memory
        return memory.hold(writer.finish())
