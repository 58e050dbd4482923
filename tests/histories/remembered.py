"""Answers of pure functions, remembered: histories share their mixes and data, so many calls repeat.

The machines run unchanged. Only the results of functions without state are looked up, by all their arguments. Reads
of sources and their tables are parts of a source that was made once. A history is the same with this cache and
without it.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ranges
from omniload.batch import digest as digest_module
from omniload.batch.microbatch import Microbatch
from omniload.batch.rows import build_rows
from omniload.machine import data_constructor as constructor_module
from omniload.machine.plans import ahead as ahead_module
from omniload.machine.plans import windows as windows_module
from omniload.mix.columns import SampleColumns
from omniload.mix.config import MixConfig
from omniload.mix.edits import history as history_module
from omniload.mix.edits.edit import Edit
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Membership
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import PieceFacts, PieceTags, StepPlan
from tests.support.plane import reference, simulation

__all__ = ["ROWS", "Remembered", "remembering"]

_MOST = 1 << 14
"""Most answers of one function that are kept; then the cache is emptied."""
_MADE = 64
"""Least number of records of a source that are made at once."""

Key = tuple[Hashable, ...]


class Remembered:
    """A function whose answers are kept, by the contents of its arguments."""

    def __init__(self, function: Callable[..., Any], key_of: Callable[..., Key]) -> None:
        self._function, self._key_of = function, key_of
        self._answers: dict[Key, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the result of the function for these arguments."""
        key = self._key_of(*arguments, **named)
        if (found := self._answers.get(key)) is None:
            if len(self._answers) >= _MOST:
                self._answers.clear()
            answer = self._function(*arguments, **named)
            _seal(answer)
            # An object that the key identifies by its id lives as long as the answer.
            found = self._answers[key] = answer, arguments
        return found[0]


def _seal(answer: object) -> None:
    """Refuse writes into arrays of an answer, because one history would change the answers of another."""
    if isinstance(answer, np.ndarray):
        answer.flags.writeable = False
    elif isinstance(answer, tuple | list):
        for each in answer:
            if not isinstance(each, int | float | str):
                _seal(each)
    elif isinstance(answer, Mapping):
        _seal(list(answer.values()))
    elif names := _names_in(type(answer)):
        _seal([getattr(answer, name) for name in names])


@cache
def _names_in(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


@contextmanager
def remembering() -> Iterator[None]:
    """Make machines and the reference look up results that were computed before."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in _ANSWERED]
    try:
        for module, name, answered in _ANSWERED:
            setattr(module, name, answered)
        yield
    finally:
        for module, name, plain in kept:
            setattr(module, name, plain)


def _of_pieces(pieces: PieceTable) -> Key:
    return (pieces.columns_CP.tobytes(),)


def _of_ranges(ranges: Ranges) -> Key:
    packed = ranges.packed()
    return packed.values_V.tobytes(), packed.offsets.tobytes()


def _of_placed(
    mix: MixConfig,
    tree: ClientPlaceTree,
    state: MixState,
    membership: Membership,
    facts: PieceFacts,
) -> Key:
    assert facts.images is None, "simulated sources have texts alone"
    assert facts.documents is None, "simulated sources have texts alone"
    drawn = _of_pieces(membership.pieces), membership.row_offsets.tobytes()
    return id(mix), tree, state.step, state.mix_revision, drawn, facts.labels_left_out


def _of_placed_again(mix: MixConfig, tree: ClientPlaceTree, plan: StepPlan, tags: PieceTags) -> Key:
    assert not tags, "no cost of a history reads any"
    return id(mix), tree, id(plan)


def _of_edited(mix: MixConfig, edit: Edit) -> Key:
    return id(mix), edit.model_dump_json()


def _of_rows(
    pieces: PieceTable,
    row_offsets: NDArray[np.int64],
    fetched_K: Ranges,
    *,
    length: int,
    others_K: Mapping[str, Ranges],
) -> Key:
    others = tuple((name, _of_ranges(ranges)) for name, ranges in others_K.items())
    return _of_pieces(pieces), row_offsets.tobytes(), _of_ranges(fetched_K), length, others


def _of_split(rows: Microbatch, counts_M: Sequence[int], row_offsets: NDArray[np.int64]) -> Key:
    return id(rows), tuple(counts_M), row_offsets.tobytes()


def _of_digest(microbatch: Microbatch) -> Key:
    return (id(microbatch),)


def _of_made(source: int, epoch: Sequence[Sequence[int]], start: int, stop: int) -> Key:
    return source, id(epoch), start, stop


def _of_table(epoch: Sequence[Sequence[int]], start: int, stop: int) -> Key:
    return id(epoch), start, stop


_made = Remembered(reference.read_range, _of_made)
_plain_table = reference.table_of
_whole_table = Remembered(_plain_table, _of_table)


def _enough(stop: int) -> int:
    """Return how many records to make at once, for a source whose records before ``stop`` are needed."""
    return 1 << (max(stop, _MADE) - 1).bit_length()


def _table_of(
    epoch: Sequence[Sequence[int]], start: int, stop: int, without: Sequence[int] = ()
) -> SampleTable:
    """Return the same as ``reference.table_of``: a part of the source's table, which is made once."""
    if without:
        return _plain_table(epoch, start, stop, without)
    whole: SampleTable = _whole_table(epoch, 0, _enough(stop))
    return whole.within(start, stop)


def _read_range(
    source: int,
    epoch: Sequence[Sequence[int]],
    start: int,
    stop: int,
    without: Sequence[int] = (),
) -> tuple[SampleTable, SampleColumns]:
    """Read as ``reference.read_range`` does: a part of the source, which is made once."""
    if without:
        return reference.read_range(source, epoch, start, stop, without)
    whole, columns = _made(source, epoch, 0, _enough(stop))
    table = whole.within(start, stop)
    if not len(table):
        nothing = SampleColumns(tokens=columns.tokens.between(0, 0))
        return replace(table, metadata={}), nothing
    first = int(np.searchsorted(whole.positions_N, start))
    last = first + len(table)
    others = {name: each.between(first, last) for name, each in columns.others.items()}
    return table, SampleColumns(tokens=columns.tokens.between(first, last), others=others)


ROWS = Remembered(build_rows, _of_rows)
"""Lays out rows."""

_ANSWERED: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (ahead_module, "place", Remembered(ahead_module.place, _of_placed)),
    (windows_module, "place_again", Remembered(windows_module.place_again, _of_placed_again)),
    (history_module, "edited_mix", Remembered(history_module.edited_mix, _of_edited)),
    (constructor_module, "split_rows", Remembered(constructor_module.split_rows, _of_split)),
    (
        digest_module,
        "microbatch_digest",
        Remembered(digest_module.microbatch_digest, _of_digest),
    ),
    (simulation, "read_range", _read_range),
    (reference, "table_of", _table_of),
)
"""Functions without state, and their replacements."""
