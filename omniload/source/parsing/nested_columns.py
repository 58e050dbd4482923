"""Columns of tables by name, those inside others too: ``meta.lang`` is the field ``lang`` of the objects in ``meta``.

A column that is called so as a whole comes first. In a row whose object is null, what is inside is null.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import pyarrow as pa

__all__ = ["Table", "column_of", "outer_of", "said_of_fields", "types_of"]

Table: TypeAlias = Mapping[str, pa.ChunkedArray] | pa.Table
"""Columns of one unit by name."""
_SHOWN = 12
"""Fields that a message names."""


def types_of(fields: Iterable[pa.Field], name: str) -> list[pa.DataType]:
    """Return the types of all columns of a name; of one that is inside another at most one."""
    held = list(fields)
    exact = [field.type for field in held if field.name == name]
    outer, dot, rest = name.partition(".")
    if exact or not dot:
        return exact
    around = [field.type for field in held if field.name == outer]
    return types_of(around[0], rest) if [*map(pa.types.is_struct, around)] == [True] else []


def column_of(table: Table, name: str) -> pa.ChunkedArray:
    """Return a column of some; ``types_of`` has found it in their schema."""
    if name in (table.column_names if isinstance(table, pa.Table) else table):
        return table[name]
    outer, _, rest = name.partition(".")
    around = table[outer]
    # Flattened, a null of the object is one of each of its fields.
    names = [field.name for field in around.type]
    return column_of(dict(zip(names, around.flatten(), strict=True)), rest)


def outer_of(names: Collection[str], name: str) -> str:
    """Return which of the columns of a table is read for a name: itself, or the one that it is inside."""
    return name if name in names else name.partition(".")[0]


def said_of_fields(fields: Iterable[pa.Field], name: str) -> str:
    """Return what is said of a name that reaches inside a column of objects, and finds nothing; empty of any other."""
    outer, dot, _ = name.partition(".")
    around = [field.type for field in fields if field.name == outer] if dot else []
    if not around:
        return ""
    if not pa.types.is_struct(around[0]):
        return f"; {outer!r} is {around[0]}, and nothing is inside"
    there = [field.name for field in around[0]]
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    return f"; inside {outer!r} are {', '.join(there[:_SHOWN]) or 'none'}{more}"
