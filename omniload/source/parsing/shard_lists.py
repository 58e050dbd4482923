"""Files that list the shards of a data set, as some formats have one beside them."""

from typing import Any

import orjson

from omniload.base.errors import IntegrityError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile, reading

__all__ = ["read_json"]

_LARGEST_JSON = 256 << 20
"""Bytes of a file that lists shards at most: a million of them."""


def read_json(file: ShardFile) -> dict[str, Any]:
    """Read a file that lists shards: one JSON object.

    Raises:
        IntegrityError: It is too large, or no JSON object.
        UnavailableError: The file system did not answer.
    """
    if file.size_bytes > _LARGEST_JSON:
        raise IntegrityError(
            f"{file.path}: holds {format_bytes(file.size_bytes)}, more than the {format_bytes(_LARGEST_JSON)} "
            "of a list of shards; is it one?"
        )
    with reading(file):
        data = file.read_range(0, file.size_bytes) if file.size_bytes else b""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(f"{file.path}: is not JSON: {error}; replace it") from error
    if not isinstance(value, dict):
        raise IntegrityError(
            f"{file.path}: is a JSON {type(value).__name__}, not an object; replace it"
        )
    return value
