"""Files that list the shards of a data set, which some formats keep next to the shards."""

from collections.abc import Iterable
from typing import Any

import orjson

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile, reading
from omniload.source.parsing.json_lines.lines import lacks_memory, said_of_no_memory

__all__ = ["listed_once", "read_json"]

_LARGEST_JSON = 256 << 20
"""Largest file that lists shards, enough for a million of them."""


def read_json(file: ShardFile) -> dict[str, Any]:
    """Read a file that lists shards, as one JSON object.

    Raises:
        ConfigError: There is not enough memory to read it.
        IntegrityError: The file is too large, or no JSON object.
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
    """Return the shards that lists name, each with its list as the first file it needs.

    Args:
        shards: Path of each shard, whichever file with its content is read, and this file.

    Raises:
        ConfigError: A shard is named twice. Its samples would be drawn twice in every epoch, and its name would be
            ambiguous.
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
