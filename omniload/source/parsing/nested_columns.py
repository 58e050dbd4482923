"""Columns of tables by name, including nested ones: ``meta.lang`` is the field ``lang`` of the objects in ``meta``.

A column whose whole name matches comes first. In a row with a null object, its fields are null.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import pyarrow as pa

__all__ = ["Table", "column_of", "outer_of", "said_of_fields", "types_of"]

Table: TypeAlias = Mapping[str, pa.ChunkedArray] | pa.Table
"""Columns of one unit by name."""
_SHOWN = 12
"""Most fields that a message names."""


def types_of(fields: Iterable[pa.Field], name: str) -> list[pa.DataType]:
    """Return the types of all columns with a name; for a nested column, at most one type."""
    held = list(fields)
    exact = [field.type for field in held if field.name == name]
    outer, dot, rest = name.partition(".")
    if exact or not dot:
        return exact
    around = [field.type for field in held if field.name == outer]
    return types_of(around[0], rest) if [*map(pa.types.is_struct, around)] == [True] else []


def column_of(table: Table, name: str) -> pa.ChunkedArray:
    """Return a column of a table, whose schema ``types_of`` has checked."""
    if name in (table.column_names if isinstance(table, pa.Table) else table):
        return table[name]
    outer, _, rest = name.partition(".")
    around = table[outer]
    # Flattening turns a null object into a null in each of its fields.
    names = [field.name for field in around.type]
    return column_of(dict(zip(names, around.flatten(), strict=True)), rest)


def outer_of(names: Collection[str], name: str) -> str:
    """Return the column of a table that is read for a name: the column itself, or the column that it is nested in."""
    return name if name in names else name.partition(".")[0]


def said_of_fields(fields: Iterable[pa.Field], name: str) -> str:
    """Return the message about a name that leads into a column of objects and finds nothing; empty for other names."""
    outer, dot, _ = name.partition(".")
    around = [field.type for field in fields if field.name == outer] if dot else []
    if not around:
        return ""
    if not pa.types.is_struct(around[0]):
        return f"; {outer!r} is {around[0]}, and nothing is inside"
    there = [field.name for field in around[0]]
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    return f"; inside {outer!r} are {', '.join(there[:_SHOWN]) or 'none'}{more}"
