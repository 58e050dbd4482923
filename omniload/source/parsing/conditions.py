"""Conditions on the columns of records, with equal results for single records and for whole columns.

Shape suffixes:
    B  records of a unit
"""

from collections.abc import Callable, Mapping
from functools import reduce
from math import ceil, floor, inf, isfinite

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.mix.schema.records import Between, Condition, Value, kind_of
from omniload.source.parsing.json_lines.lines import BadLineError, number_in, value_in
from omniload.source.parsing.token_lists import type_asked_for

__all__ = ["keeps", "kept_columns", "kept_records", "require_where", "value_of_text", "wanted_kind"]

_TRUTHS = {"true": True, "false": False}

_IS_KIND: Mapping[str, Callable[[pa.DataType], bool]] = {
    "text": lambda kind: kind in {pa.string(), pa.large_string(), pa.string_view()},
    "number": lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind),
    "truth": pa.types.is_boolean,
}


def keeps(where: Mapping[str, Condition], record: Mapping[str, object]) -> bool:
    """Return whether a record, such as the object of a line, meets all conditions; a record with a null does not.

    Raises:
        BadLineError: A key is missing, or a value is of another kind.
    """
    # All keys are looked up first, so that a missing key is reported whatever the other values are.
    found = {key: value_in(record, key) for key in where}
    for key, value in found.items():
        wanted = wanted_kind(where[key])
        if value is not None and kind_of(value) != wanted:
            raise BadLineError(f"{key!r} is {value!r:.40}, not a {wanted}, as where.{key} asks for")
    return all(value is not None and _holds(where[key], value) for key, value in found.items())


def kept_records(
    where: Mapping[str, Condition], record: Callable[[int], Mapping[str, object]], count: int
) -> tuple[NDArray[np.bool_], dict[int, str]]:
    """Return which records meet all conditions, checking one record at a time.

    Args:
        where: The conditions.
        record: Returns the values of a record, by its number, under the columns of the conditions; its ``BadLineError``
            is a fault.
        count: Records of the unit.

    Returns:
        Which records are kept, ``[B]``, including records with a fault, and the fault of each of these.
    """
    kept_B, faults = np.ones(count, np.bool_), {}
    for i in range(count):
        try:
            kept_B[i] = keeps(where, record(i))
        except BadLineError as error:
            faults[i] = str(error)
    return kept_B, faults


def value_of_text(cell: bytes, column: str, condition: Condition) -> object:
    """Return the value of a field of a file without types, as the kind of value that a condition needs.

    An empty field is an empty text, or null if a number or a boolean is needed. A field that cannot be read as this
    kind stays a text, which is of a wrong kind.

    Raises:
        BadLineError: The field is not UTF-8.
    """
    try:
        text = cell.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(f"{column!r} is not UTF-8: {error}") from error
    wanted = wanted_kind(condition)
    if wanted == "text":
        return text
    if not text:
        return None
    read = _TRUTHS.get(text.lower()) if wanted == "truth" else number_in(text)
    return text if read is None else read


def _holds(condition: Condition, value: object) -> bool:
    if isinstance(condition, Between):
        assert isinstance(value, int | float), "a number"
        least, most = _limits(condition)
        return least <= value <= most
    return value in _values(condition)


def _limits(condition: Between) -> tuple[float, float]:
    """Return the limits of a range; NaN is outside of every range."""
    return (
        -inf if condition.at_least is None else condition.at_least,
        inf if condition.at_most is None else condition.at_most,
    )


def _values(condition: Condition) -> tuple[Value, ...]:
    assert not isinstance(condition, Between), "it has limits"
    return condition if isinstance(condition, tuple) else (condition,)


def wanted_kind(condition: Condition) -> str:
    """Return the kind of value that a condition needs, as ``kind_of`` names it."""
    kind = "number" if isinstance(condition, Between) else kind_of(_values(condition)[0])
    assert kind is not None, "the model has seen to it"
    return kind


def require_where(schema: pa.Schema, where: Mapping[str, Condition], path: str) -> None:
    """Raise an error for a shard that lacks a column of a condition, or has it with another type.

    Raises:
        ConfigError: Names the columns of the shard.
    """
    for column, condition in where.items():
        found = type_asked_for(schema, column, path, by="where")
        # Views within a dictionary are refused, because Arrow does not return their values.
        is_read = pa.types.is_dictionary(found) and found.value_type != pa.string_view()
        values = found.value_type if is_read else found
        # Writers know no type for a column that is null in every row of a shard.
        if not (pa.types.is_null(values) or _IS_KIND[wanted_kind(condition)](values)):
            raise ConfigError(
                f"{path}: column {column!r} is {found}, not a {wanted_kind(condition)}, as where.{column} asks for"
            )


def kept_columns(
    where: Mapping[str, Condition], columns: Mapping[str, pa.ChunkedArray], rows: int
) -> NDArray[np.bool_]:
    """Return which rows meet all conditions, ``[B]``; ``require_where`` has checked the types."""
    each = (_kept(condition, columns[column]) for column, condition in where.items())
    return reduce(np.logical_and, each, np.ones(rows, np.bool_))


def _kept(condition: Condition, column: pa.ChunkedArray) -> NDArray[np.bool_]:
    import pyarrow.compute as pc  # noqa: PLC0415 -- it takes longer to load than a check takes for 300 sources

    # Read as its values, because the order of dictionary indices is not the order of the values.
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.bool_)
    if column.type == pa.string_view():  # which Arrow's lookup does not support
        column = column.cast(pa.large_string())
    if isinstance(condition, Between):
        least, most = _limits(condition)
        if pa.types.is_integer(column.type):
            # Compared like Python's integers in lines; beyond 2^53, an integer would become a float with another value.
            values = column.fill_null(0).to_numpy()
            least, most = (_whole(limit, of) for limit, of in ((least, ceil), (most, floor)))
        else:
            values = column.cast(pa.float64()).to_numpy()
        # Nulls are excluded at the end, because the value in the place of a null may be any number.
        kept: NDArray[np.bool_] = (values >= least) & (values <= most) & _there(column)
        return kept
    wanted = [value for value in _values(condition) if _fits(value, column.type)]
    if pa.types.is_float16(column.type):  # which Arrow's lookup does not support
        column = column.cast(pa.float32())
    found = pc.is_in(column, value_set=pa.array(wanted, column.type))
    kept = np.asarray(found.to_numpy(), np.bool_)
    return kept & _there(column)


def _whole(limit: float, of: Callable[[float], int]) -> float:
    return of(limit) if isfinite(limit) else limit


def _there(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    return np.asarray(column.is_valid().to_numpy(), np.bool_)


def _fits(value: Value, kind: pa.DataType) -> bool:
    """Return whether a column of this type can represent exactly this value."""
    try:
        held = pa.scalar(int(value) if pa.types.is_integer(kind) else value, kind).as_py()
    except (pa.ArrowInvalid, OverflowError):
        return False
    return bool(held == value)
