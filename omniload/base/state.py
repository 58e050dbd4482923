"""States as plain JSON: their version, and the digest that such JSON contains of itself."""

import hashlib
from collections.abc import Mapping
from typing import TypeAlias

import orjson

from omniload.base.errors import StateError

__all__ = [
    "Json",
    "JsonObject",
    "json_digest",
    "require_version",
    "sealed",
    "shown",
    "unsealed",
    "whole_number",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = dict[str, Json]

SEAL = "blake2b"
"""Key of the digest in an object that contains one."""


def require_version(state: Mapping[str, Json], version: int, *, of: str) -> None:
    """Refuse a state that another release wrote in another form.

    Raises:
        StateError: ``state["version"]`` is not ``version``.
    """
    found = state.get("version")
    # Compared by type as well, because ``True`` equals 1 but is not a version.
    if type(found) is not int or found != version:
        raise StateError(
            f"{of} state has version {shown(found)}, this code reads {version}; "
            "resume with the release that wrote the checkpoint"
        )


def json_digest(value: Mapping[str, Json]) -> str:
    """Return the BLAKE2b digest (16 bytes, hexadecimal) of an object as compact JSON with sorted keys.

    Raises:
        TypeError: The value is not JSON, or contains an integer of more than 64 bits.
    """
    # Sorted, because the writer of the object may have had its keys in another order than the reader.
    data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def sealed(value: Mapping[str, Json]) -> JsonObject:
    """Return ``value`` with a digest of itself under ``blake2b``."""
    return {**value, SEAL: json_digest(value)}


def unsealed(value: Mapping[str, Json], *, of: str) -> JsonObject:
    """Return the value that was given to ``sealed``.

    The digest detects damage, not malice, because anyone who changes a value can also compute a new digest. Therefore
    readers of the values check their ranges as well.

    Args:
        value: The object with its digest.
        of: Name of the object, for messages.

    Raises:
        StateError: The digest is missing or does not match.
    """
    content = {key: part for key, part in value.items() if key != SEAL}
    try:
        expected = json_digest(content)
    except TypeError as error:
        raise StateError(f"{of} is damaged ({error}); resume from an earlier checkpoint") from error
    if value.get(SEAL) != expected:
        raise StateError(
            f"{of} is damaged: it carries digest {shown(value.get(SEAL))}, its content has {expected!r}; "
            "resume from an earlier checkpoint"
        )
    return content


def whole_number(value: Json, *, below: int, least: int = 0) -> int:
    """Return ``value`` if it is an integer from ``least`` to under ``below``.

    Raises:
        ValueError: It is another number, or not an integer: ``true`` and ``3.0`` are not integers here.
    """
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{shown(value)} is not a whole number from {least} to {below - 1}")
    return value


def shown(value: object) -> str:
    """Return a JSON value for a message; for an object or a list, which may be nested deeply, its kind and length."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return f"{value!r:.60}"
