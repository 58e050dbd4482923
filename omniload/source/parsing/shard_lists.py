"""Files that list the shards of a data set, as some formats have one beside them."""

from collections.abc import Iterable
from typing import Any

import orjson

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile, reading
from omniload.source.parsing.json_lines.lines import lacks_memory, said_of_no_memory

__all__ = ["listed_once", "read_json"]

_LARGEST_JSON = 256 << 20
"""Bytes of a file that lists shards at most: a million of them."""


def read_json(file: ShardFile) -> dict[str, Any]:
    """Read a file that lists shards: one JSON object.

    Raises:
        ConfigError: Memory is lacking to read it.
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
        if lacks_memory(error):
            raise ConfigError(
                f"{file.path}: {said_of_no_memory(len(data))}, or split the list"
            ) from error
        raise IntegrityError(f"{file.path}: is not JSON: {error}; replace it") from error
    if not isinstance(value, dict):
        raise IntegrityError(
            f"{file.path}: is a JSON {type(value).__name__}, not an object; replace it"
        )
    return value


def listed_once(shards: Iterable[tuple[str, ShardFile]]) -> tuple[ShardFile, ...]:
    """Return the shards that lists name, each with its list first among the files beside it.

    Args:
        shards: Of each its path, whether the file there is read or one that holds the same otherwise, and what is read.

    Raises:
        ConfigError: One is named twice: its samples would be drawn twice in every epoch, and its name would say of
            neither which is meant.
    """
    found: dict[str, ShardFile] = {}
    every = list(shards)
    for path, shard in every:
        first = found.setdefault(path, shard)
        if first is not shard:
            by, also_by = first.beside[0].path, shard.beside[0].path
            raise ConfigError(
                f"{also_by}: lists {path.rpartition('/')[2]} "
                f"{'twice' if by == also_by else f'too, as {by} does'}, and a shard is read once in an epoch: take it "
                "out of one place, and to draw it more often make it a source of its own with more weight"
            )
    return tuple(shard for _, shard in every)
