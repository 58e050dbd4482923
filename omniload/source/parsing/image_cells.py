"""Encoded images of records in the form that formats return: bytes end to end, and the size of each image.

Shape suffixes:
    B  records of a unit
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged, offsets_of
from omniload.source.columns import drained, lying
from omniload.source.formats.format import Records
from omniload.source.parsing.token_lists import RowsAt, is_list, row_at, type_asked_for

__all__ = [
    "ENCODED",
    "ENCODED_SIZES",
    "encoded_columns",
    "require_images",
    "with_images",
]

ENCODED = "encoded_images"
"""Column of a block: bytes of all images of a record, end to end."""
ENCODED_SIZES = "encoded_image_sizes"
"""Column of a block: size of each of these images in bytes."""
_FIELD, _PATH = "bytes", "path"
_TEXTS = frozenset({pa.string(), pa.large_string(), pa.string_view()})


def encoded_columns(images_B: Sequence[Sequence[bytes | memoryview]]) -> dict[str, Ragged]:
    """Return the images of each record as the two columns of a block."""
    sizes = [[len(image) for image in images] for images in images_B]
    data = b"".join(chain.from_iterable(images_B))
    offsets = np.cumsum([0, *map(sum, sizes)], dtype=np.int64)
    return {
        ENCODED: Ragged(values_V=np.frombuffer(data, np.uint8), offsets=offsets),
        ENCODED_SIZES: Ragged.of([np.asarray(each, np.int64) for each in sizes], np.int64),
    }


def require_images(schema: pa.Schema, column: str, path: str) -> None:
    """Raise an error for a shard that lacks the column of images, or has it with another type.

    Raises:
        ConfigError: Names the columns of the shard.
    """
    found = type_asked_for(schema, column, path, by="images", remedy="name the one that has them")
    if not _is_image(found.value_type if is_list(found) else found):
        raise ConfigError(
            f"{path}: column {column!r} is {found}, not images; give bytes, an object with a field {_FIELD!r}, or a "
            "list of either; files that it names are not read, so write their bytes into the table"
        )


def with_images(records: Records, column: pa.ChunkedArray, where: RowsAt | str) -> Records:
    """Add the images of a column to records. A null or empty value is no image; a path without bytes is bad.

    Images of one chunk are not copied, because a row group may hold a gigabyte of them.

    Args:
        records: The records.
        column: Column of the images.
        where: Place of the column, for reasons.
    """
    lost_B = np.concatenate([np.zeros(0, np.bool_), *map(_paths_alone, column.chunks)])
    # Faults in a record that is left out anyway do not matter.
    lost_B &= records.usable_B
    reason = (
        f"{row_at(where, int(lost_B.argmax()))}: an image has a path and no {_FIELD}, and nothing is read from other "
        f"files; write its {_FIELD} into the table"
        if lost_B.any()
        else ""
    )
    return replace(
        records,
        bad_B=records.bad_B | lost_B,
        reason=records.reason or reason,
        others={**records.others, **_images_of(column)},
    )


def _images_of(column: pa.ChunkedArray) -> dict[str, Ragged]:
    """Return the images of each cell as the two columns of a block."""
    # A column without a chunk is one of no cells.
    parts = [_encoded(cells) for cells in column.chunks or [pa.nulls(0, column.type)]]
    encoded, sizes = map(list, zip(*parts, strict=True))
    return {
        ENCODED: drained(encoded, np.dtype(np.uint8)),
        ENCODED_SIZES: drained(sizes, np.dtype(np.int64)),
    }


def _encoded(cells: pa.Array) -> tuple[Ragged, Ragged]:
    """Return the bytes of the images of each cell, end to end and not copied, and the size of each image."""
    import pyarrow.compute as pc  # noqa: PLC0415 -- it takes longer to load than a check takes for 300 sources

    flat, lengths_B = _flat(cells)
    # Fields next to the bytes, such as a path, are not decoded, because they need not be UTF-8.
    values = pc.struct_field(flat, _FIELD) if pa.types.is_struct(flat.type) else flat
    # Arrow may keep bytes under a null, which are no image.
    values = pc.fill_null(values.cast(pa.large_binary()), b"") if values.null_count else values
    data_V, ends = lying(values.cast(pa.large_binary()), np.int64)
    bounds_B, sizes_I = offsets_of(lengths_B), np.diff(ends)
    is_there_I = sizes_I > 0
    return (
        Ragged(values_V=data_V, offsets=ends[bounds_B] - ends[0]),
        Ragged(values_V=sizes_I[is_there_I], offsets=offsets_of(is_there_I)[bounds_B]),
    )


def _paths_alone(cells: pa.Array) -> NDArray[np.bool_]:
    """Return which cells have an image that is only a path, in the style of any operating system, ``[B]``."""
    import pyarrow.compute as pc  # noqa: PLC0415 -- it takes longer to load than a check takes for 300 sources

    flat, lengths_B = _flat(cells)
    lost_B = np.zeros(len(cells), np.bool_)
    if not pa.types.is_struct(flat.type) or flat.type.get_field_index(_PATH) < 0:
        return lost_B
    paths = pc.struct_field(flat, _PATH)
    if not (_is_binary(paths.type) or paths.type in _TEXTS):
        return lost_B
    said_path, said_bytes = (
        pc.fill_null(pc.greater(pc.binary_length(values), 0), fill_value=False)
        for values in (paths, pc.struct_field(flat, _FIELD))
    )
    alone = pc.and_(said_path, pc.invert(said_bytes))
    lost_B[np.repeat(np.arange(len(cells)), lengths_B)[alone.to_numpy(zero_copy_only=False)]] = True
    return lost_B


def _flat(cells: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the possible images end to end, and the number of them in each cell."""
    if not is_list(cells.type):
        return cells, np.ones(len(cells), np.int64)
    lengths = cells.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    # ``flatten`` leaves out values under a null, which ``values`` would include.
    return cells.flatten(), lengths.astype(np.int64)


def _is_image(found: pa.DataType) -> bool:
    if pa.types.is_struct(found):
        index = found.get_field_index(_FIELD)
        return index >= 0 and _is_binary(found.field(index).type)
    return _is_binary(found)


def _is_binary(found: pa.DataType) -> bool:
    return found in {pa.binary(), pa.large_binary(), pa.binary_view()}
