"""Columns of numbers in separate files: one value for each token of a file of token ids, or for each record.

::

    a.npy          5  6  0  7  8  9  0          token ids
    a.weights.npy  1 .5  1  1  1 .2  1          of tokens, or of labels
    a.year.npy     1999     2024                of samples

Values and tokens are only aligned by position, so the number of values is compared with the tokens before use.

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
    """A column of one file of tokens, in a file of its own with the right number of values."""

    inside: str
    """Name of the column inside omniload."""
    file: ShardFile
    start: int
    """First byte of its values."""
    dtype: np.dtype[Any]
    """Type of the stored values; a boolean is stored as a byte."""
    shape: tuple[int, ...]
    """Shape of the stored array; a flat file has all values in one run."""

    @property
    def count(self) -> int:
        """Number of values."""
        return prod(self.shape)

    def values(self, first: int, stop: int) -> NDArray[Any]:
        """Return a range of the values.

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
        """Raise an error for a file without exactly one value per token, or a matrix of another shape than the tokens.

        Values in one run are also accepted for a matrix of tokens, because they have no rows that could differ.

        Raises:
            IntegrityError: Gives both numbers, or both shapes.
        """
        self.require_count(prod(shape), of)
        if len(shape) > 1 and len(self.shape) > 1 and self.shape != shape:
            raise IntegrityError(
                f"{self.file.path}: has the shape {self.shape}, and {of.path} {shape}: values of "
                f"columns.{name_outside(self.inside)} would stand at other tokens; write them in the shape of the "
                "tokens, or in one run in their order"
            )

    def require_count(self, wanted: int, of: ShardFile) -> None:
        """Raise an error for a file whose number of values differs from the number of tokens, or records.

        Raises:
            IntegrityError: Gives both numbers.
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
    """Attach the files of columns to each file of tokens; files with the name of a column's file are not shards.

    Args:
        files: Files that the patterns of the source match.
        columns: Name of each column's file, with ``*`` for the name of the tokens' file, by the inside name of the
            column.
        passed_over: Such names, including those of columns that are not read.

    Raises:
        ConfigError: A column's file is missing or no file, or all files have the name of a column's file.
        UnavailableError: A store did not answer.
    """
    if not passed_over:
        return tuple(files)
    names = {_path(file, each): each for file in files for each in passed_over}
    tokens = [file for file in files if file.path not in names]
    if not tokens:
        raise ConfigError(
            f"{files[0].path}: has the name of a file of a column, {names[files[0].path]!r}, and so has every file of "
            "its source, which then holds no token; rename the files of the column"
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
        # The error for a path that is no file also has a remedy for patterns, which a column does not have.
        found = str(cause).partition(";")[0] if isinstance(cause, ValueError) else "is not there"
        raise ConfigError(
            f"{_path(file, named)}: {found}, and columns.{name} is read from it beside {file.path}; write a file there "
            f"with a value for each token, correct columns.{name}, or leave {PurePosixPath(file.path).name} out of "
            "path if it holds no tokens"
        ) from error


def column_files(file: ShardFile, columns: Mapping[str, str]) -> list[ColumnFile]:
    """Return the column files of a file of tokens, in the order of the columns.

    Raises:
        ConfigError: A file has no numbers, or numbers that its column does not accept.
        IntegrityError: A file does not match its own header.
        OSError: A file cannot be read.
    """
    return [_column_file(inside, held) for inside, held in zip(columns, file.beside, strict=True)]


def _column_file(inside: str, file: ShardFile) -> ColumnFile:
    head = file.read_range(0, min(LARGEST_HEADER, file.size_bytes)) if file.size_bytes else b""
    wanted = column_kind(inside).dtype
    start, dtype = 0, wanted
    if head.startswith(MAGIC):
        array = npy_array(file.path, head)
        start, dtype, shape = array.start, array.dtype, array.shape
        # Rows of a matrix lie end to end only in C order.
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
    # Any byte may be stored for a boolean; bytes other than 0 and 1 are reported as they are.
    stored = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    return ColumnFile(inside=inside, file=file, start=start, dtype=stored, shape=shape)


def with_column(
    records: Records, column: ColumnFile, values_V: NDArray[Any], where: RowsAt
) -> Records:
    """Add a column to records; a record with a number outside of the column's type is bad.

    Args:
        records: Records of a unit.
        column: The column.
        values_V: Its values for the records, as they are stored.
        where: Place of the records.
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
    """Add a column of numbers to records; records that it does not fit are bad, except for those already left out.

    Args:
        records: Records of a unit.
        inside: Name of the column inside omniload.
        column: Numbers of each record, in the type of the column.
        unlike_B: Rows whose numbers do not fit the record.
        fault_of: Describes the fault in the numbers of a row.
        where: Place of the records.
    """
    rows = np.flatnonzero(unlike_B & records.usable_B).tolist()
    # Only the first fault is described: thousands of rows may be bad, and a description reads the stored values.
    faults = dict.fromkeys(rows, "")
    for row in rows[:1]:
        faults[row] = f"{name_outside(inside)} {fault_of(row)}"
    records = replace(records, others={**records.others, inside: column})
    return records.with_faults(faults, partial(row_at, where))
