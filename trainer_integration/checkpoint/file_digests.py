"""Files whose size and checksum are known, and the small JSON file that lists them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import orjson
import xxhash

from omniload.base.errors import IntegrityError, StateError
from omniload.base.reading import open_file, read_kept_file
from omniload.base.state import Json, JsonObject, json_digest, shown

__all__ = [
    "FileDigest",
    "read_sealed_json",
    "sealed_json",
    "unsealed_json",
    "write_sealed_json",
    "write_synced",
]

_READ_BYTES = 4 << 20
_MOST_BYTES = 256 << 20
"""Size of a list, which allows a million files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Expected size and checksum of a file."""

    size_bytes: int
    """Its size."""
    xxh3: int
    """64-bit XXH3 of the content."""

    @classmethod
    def of(cls, file: Path) -> Self:
        """Read ``file`` and return its digest."""
        digest, size_bytes = xxhash.xxh3_64(), 0
        with open_file(file) as stream:
            while data := stream.read(_READ_BYTES):
                digest.update(data)
                size_bytes += len(data)
        return cls(size_bytes=size_bytes, xxh3=digest.intdigest())

    def fault_in(self, file: Path) -> str | None:
        """Return what is wrong with ``file``; ``None`` if nothing is."""
        # Sizes are checked first: this costs no read, and finds a truncated file.
        if (fault := self.size_fault_in(file)) is not None:
            return fault
        try:
            found = type(self).of(file)
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
        except StateError as error:
            return str(error)
        if found.xxh3 != self.xxh3:
            return f"{file} has checksum {found.xxh3:016x}, {self.xxh3:016x} was saved"
        return None

    def size_fault_in(self, file: Path) -> str | None:
        """Return what is wrong with ``file``, as far as this shows without reading it."""
        if not file.is_file():
            return f"{file} is missing, {self.size_bytes} bytes were saved"
        if (size_bytes := file.stat().st_size) != self.size_bytes:
            return f"{file} has {size_bytes} bytes, {self.size_bytes} were saved"
        return None

    def to_json(self) -> JsonObject:
        """Return plain JSON."""
        return {"size_bytes": self.size_bytes, "xxh3": f"{self.xxh3:016x}"}

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read the result of ``to_json``.

        Raises:
            ValueError: The value is something else.
        """
        match value:
            case {"size_bytes": int(size_bytes), "xxh3": str(xxh3)}:
                return cls(size_bytes=size_bytes, xxh3=int(xxh3, 16))
            case _:
                raise ValueError(f"{value!r} is no digest of a file; it needs size_bytes and xxh3")


def write_synced(file: Path, data: bytes) -> None:
    """Write ``data`` and wait until it is on storage."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        # The names of checkpoints are committed after their bytes: a rename may reach the disk before the bytes.
        os.fsync(stream.fileno())


def sealed_json(value: Mapping[str, Json]) -> bytes:
    """Return ``value`` as JSON that includes a digest of itself."""
    sealed = {**value, "blake2b": json_digest(value)}
    return orjson.dumps(sealed, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


def unsealed_json(data: bytes, *, name: str) -> JsonObject:
    """Read the result of ``sealed_json``.

    Args:
        data: The bytes.
        name: Name of their file, for messages.

    Raises:
        IntegrityError: The bytes are no such JSON, or the digest does not match.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{name} holds a {type(value).__name__}, not an object")
    found = value.pop("blake2b", None)
    if found != (expected := json_digest(value)):
        raise IntegrityError(
            f"{name} carries digest {shown(found)}, its content has {expected!r}; restore the file or "
            "resume from an earlier checkpoint"
        )
    return value


def write_sealed_json(file: Path, value: Mapping[str, Json]) -> None:
    """Write ``value`` with a digest of itself, and wait until it is on storage."""
    write_synced(file, sealed_json(value))


def read_sealed_json(file: Path) -> JsonObject:
    """Read the file that ``write_sealed_json`` wrote.

    Raises:
        IntegrityError: The file is missing, is no such JSON, or its digest does not match.
    """
    try:
        data = read_kept_file(file, most_bytes=_MOST_BYTES, what="a list of a checkpoint's files")
    except OSError as error:
        raise IntegrityError(f"{file} cannot be read as JSON: {error}") from error
    return unsealed_json(data, name=str(file))
