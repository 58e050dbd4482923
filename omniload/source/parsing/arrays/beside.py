"""Columns of numbers in files beside those of token ids: one value for each token of a file, or for each record.

::

    a.npy          5  6  0  7  8  9  0          token ids
    a.weights.npy  1 .5  1  1  1 .2  1          of tokens, or of labels
    a.year.npy     1999     2024                of samples

They are aligned by position alone, so how many values there are is held against the tokens before any is used.

Shape suffixes:
    B  records of a unit        V  values of all records together
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged
from omniload.mix.columns import column_kind, name_outside
from omniload.source.files import ShardFile, beside, reading
from omniload.source.formats.format import Records
from omniload.source.parsing.arrays.npy import LARGEST_HEADER, MAGIC, npy_array
from omniload.source.parsing.table_records import fault_of_numbers, numbers_as
from omniload.source.parsing.token_lists import RowsAt, row_at

__all__ = ["ColumnFile", "column_files", "shards_with_columns", "with_column", "with_numbers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFile:
    """A column of one file of tokens, in a file of its own whose values are as many as they have to be."""

    inside: str
    """What the column is called inside."""
    file: ShardFile
    start: int
    """First byte of its values."""
    dtype: np.dtype[Any]
    """As they are stored; of booleans a byte each."""
    shape: tuple[int, ...]
    """As it is stored; of a flat file all values in one run."""

    @property
    def count(self) -> int:
        """Its values."""
        return prod(self.shape)

    def values(self, first: int, stop: int) -> NDArray[Any]:
        """Return some of its values.

        Raises:
            OmniloadError: As for ``reading``.
        """
        size = self.dtype.itemsize
        if stop == first:
            return np.empty(0, self.dtype)
        with reading(self.file, f"values {first} to {stop}"):
            begin, end = self.start + first * size, self.start + stop * size
            return np.frombuffer(self.file.read_range(begin, end), self.dtype)

    def require_tokens(self, shape: tuple[int, ...], of: ShardFile) -> None:
        """Refuse a file that has not a value for each token, or a matrix of another shape than that of the tokens.

        Values in one run are taken beside a matrix too: they have no rows that could be others.

        Raises:
            IntegrityError: With both numbers, or both shapes.
        """
        self.require_count(prod(shape), of)
        if len(shape) > 1 and len(self.shape) > 1 and self.shape != shape:
            raise IntegrityError(
                f"{self.file.path}: has the shape {self.shape}, and {of.path} {shape}: values of "
                f"columns.{name_outside(self.inside)} would stand at other tokens; write them in the shape of the "
                "tokens, or in one run in their order"
            )

    def require_count(self, wanted: int, of: ShardFile) -> None:
        """Refuse a file that has another number of values than the tokens, or records, that they are of.

        Raises:
            IntegrityError: With both numbers.
        """
        what = "records" if column_kind(self.inside).is_tag else "tokens"
        if self.count != wanted:
            raise IntegrityError(
                f"{self.file.path}: holds {self.count:,} values of columns.{name_outside(self.inside)}, and {of.path} "
                f"{wanted:,} {what}; write one for each, in their order"
            )


def shards_with_columns(
    files: Sequence[ShardFile], columns: Mapping[str, str], passed_over: Sequence[str]
) -> tuple[ShardFile, ...]:
    """Put the files of columns beside each file of tokens; files that are called as those are no shards.

    Args:
        files: What the patterns of the source name.
        columns: The name of each column's file, with ``*`` for that of the tokens, by the name of the column inside.
        passed_over: Such names, those of columns that are not read too.

    Raises:
        ConfigError: A file of a column is missing, or no file, or all files are called as one.
        UnavailableError: A store did not answer.
    """
    if not passed_over:
        return tuple(files)
    names = {_path(file, each): each for file in files for each in passed_over}
    tokens = [file for file in files if file.path not in names]
    if not tokens:
        raise ConfigError(
            f"{files[0].path}: is called as a file of a column is, {names[files[0].path]!r}, and so is every file of "
            "its source, which then holds no token; name the column's files otherwise"
        )
    return tuple(
        replace(file, beside=tuple(_beside(file, *each) for each in columns.items()))
        for file in tokens
    )


def _path(file: ShardFile, named: str) -> str:
    folder, slash, _ = file.path.rpartition("/")
    return f"{folder}{slash}{_name(file, named)}"


def _name(file: ShardFile, named: str) -> str:
    return named.replace("*", PurePosixPath(file.path).stem)


def _beside(file: ShardFile, inside: str, named: str) -> ShardFile:
    try:
        return beside(file, _name(file, named))
    except IntegrityError as error:
        name, cause = name_outside(inside), error.__cause__
        # What is no file says what it is, and then what to write of a pattern, which a column has none of.
        found = str(cause).partition(";")[0] if isinstance(cause, ValueError) else "is not there"
        raise ConfigError(
            f"{_path(file, named)}: {found}, and columns.{name} is read from it beside {file.path}; write a file there "
            f"with a value for each token, correct columns.{name}, or leave {PurePosixPath(file.path).name} out of "
            "path if it holds no tokens"
        ) from error


def column_files(file: ShardFile, columns: Mapping[str, str]) -> list[ColumnFile]:
    """Return what the files beside one of tokens are, in the order of the columns.

    Raises:
        ConfigError: One holds no numbers, or such as its column does not take.
        IntegrityError: One cannot be read as what it says of itself.
        OSError: One cannot be read.
    """
    return [_column_file(inside, held) for inside, held in zip(columns, file.beside, strict=True)]


def _column_file(inside: str, file: ShardFile) -> ColumnFile:
    head = file.read_range(0, min(LARGEST_HEADER, file.size_bytes)) if file.size_bytes else b""
    wanted = column_kind(inside).dtype
    start, dtype = 0, wanted
    if head.startswith(MAGIC):
        array = npy_array(file.path, head)
        start, dtype, shape = array.start, array.dtype, array.shape
        # Rows of a matrix lie end to end in C order alone.
        if not array.holds_numbers or (array.is_fortran and len(array.shape) > 1):
            order = " in Fortran order" * array.is_fortran
            raise ConfigError(
                f"{file.path}: is an array of {dtype}{order}, and columns.{name_outside(inside)} is of numbers, or "
                "booleans, in C order; write them so"
            )
    else:
        shape = (file.size_bytes // dtype.itemsize,)
    count = prod(shape)
    if (stop := start + count * dtype.itemsize) != file.size_bytes:
        raise IntegrityError(
            f"{file.path}: {count} values of {dtype} from byte {start} on end at byte {stop}, and it has "
            f"{file.size_bytes}: it is cut short or of another type, replace it"
        )
    if dtype.kind == "f" and wanted.kind != "f":
        raise ConfigError(
            f"{file.path}: holds {dtype}, and columns.{name_outside(inside)} is of {wanted}; write integers, or say "
            "dtype: float32"
        )
    # Of a boolean any byte may be stored: what is neither 0 nor 1 is told as it is.
    stored = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    return ColumnFile(inside=inside, file=file, start=start, dtype=stored, shape=shape)


def with_column(
    records: Records, column: ColumnFile, values_V: NDArray[Any], where: RowsAt
) -> Records:
    """Add a column to records; one with a number that its type does not hold is bad.

    Args:
        records: Records of a unit.
        column: The column.
        values_V: Its values for them, as they are stored.
        where: Where the records lie.
    """
    kind, count = column_kind(column.inside), len(records.column)
    offsets = np.arange(count + 1) if kind.is_tag else records.column.offsets
    kept, odd_B = numbers_as(values_V, offsets, kind.dtype, np.zeros(count, np.bool_))
    stored = Ragged(values_V=values_V, offsets=offsets)
    return with_numbers(
        records,
        column.inside,
        kept,
        odd_B,
        lambda row: fault_of_numbers(stored[row], column.inside, len(stored[row])),
        where,
    )


def with_numbers(
    records: Records,
    inside: str,
    column: Ragged,
    unlike_B: NDArray[np.bool_],
    fault_of: Callable[[int], str],
    where: RowsAt,
) -> Records:
    """Add a column of numbers to records; those that it does not fit are bad, but for what is left out already.

    Args:
        records: Records of a unit.
        inside: What the column is called inside.
        column: The numbers of each, in the type of the column.
        unlike_B: Which of them do not fit the records.
        fault_of: Says what is wrong with those of a record.
        where: Where the records lie.
    """
    rows = np.flatnonzero(unlike_B & records.usable_B).tolist()
    # Of the first alone it is told: thousands may be bad, and each is looked at as it is stored.
    faults = dict.fromkeys(rows, "")
    for row in rows[:1]:
        faults[row] = f"{name_outside(inside)} {fault_of(row)}"
    records = replace(records, others={**records.others, inside: column})
    return records.with_faults(faults, partial(row_at, where))
