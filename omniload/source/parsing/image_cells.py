"""Encoded images of records, as formats hand them on: bytes end to end, and the size of each.

Shape suffixes:
    B  records of a unit
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.source.formats.format import Records

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
"""Column of a block: bytes of each of them."""
_FIELD = "bytes"


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
    """Refuse a shard without the column of images, or with another type of it.

    Raises:
        ConfigError: With what the shard has.
    """
    if schema.names.count(column) != 1:
        raise ConfigError(
            f"{path}: has no single column {column!r} for images; it has {', '.join(schema.names)}"
        )
    found = schema.field(column).type
    if not _is_image(found.value_type if _is_list(found) else found):
        raise ConfigError(
            f"{path}: column {column!r} is {found}, not images; give bytes, an object with a field {_FIELD!r}, or a "
            "list of either"
        )


def with_images(records: Records, column: pa.ChunkedArray) -> Records:
    """Add the images of a column to records; a null is no image."""
    images_B = [cell for chunk in column.chunks for cell in _images_of(chunk)]
    return replace(records, others={**records.others, **encoded_columns(images_B)})


def _images_of(cells: pa.Array) -> Iterator[list[bytes]]:
    """Yield the images of each cell."""
    if _is_list(cells.type):
        lengths = cells.value_lengths().fill_null(0).to_pylist()
        # By ``flatten``, which leaves out what lies under a null; ``values`` would not.
        cells = cells.flatten()
    else:
        lengths = [1] * len(cells)
    # What stands beside the bytes, such as a path, is not decoded: it need not be UTF-8.
    values = pc.struct_field(cells, _FIELD) if pa.types.is_struct(cells.type) else cells
    found = iter(values.to_pylist())
    for length in lengths:
        # An object without bytes names a path, on whichever machine it was written: that is no image.
        yield [image for image in islice(found, length) if image]


def _is_image(found: pa.DataType) -> bool:
    if pa.types.is_struct(found):
        index = found.get_field_index(_FIELD)
        return index >= 0 and _is_binary(found.field(index).type)
    return _is_binary(found)


def _is_binary(found: pa.DataType) -> bool:
    return found in {pa.binary(), pa.large_binary(), pa.binary_view()}


def _is_list(found: pa.DataType) -> bool:
    return isinstance(found, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))
