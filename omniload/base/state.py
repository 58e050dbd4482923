"""States as plain JSON: their version, and the digest that such JSON carries of itself."""

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
"""Key of the digest in an object that carries one."""


def require_version(state: Mapping[str, Json], version: int, *, of: str) -> None:
    """Refuse a state that another release wrote in another form.

    Raises:
        StateError: ``state["version"]`` is not ``version``.
    """
    found = state.get("version")
    # By type: ``True`` equals 1, and is no version.
    if type(found) is not int or found != version:
        raise StateError(
            f"{of} state has version {shown(found)}, this code reads {version}; "
            "resume with the release that wrote the checkpoint"
        )


def json_digest(value: Mapping[str, Json]) -> str:
    """Return the BLAKE2b (16 bytes, hexadecimal) of an object as compact JSON with sorted keys.

    Raises:
        TypeError: The value is not JSON, or holds an integer of more than 64 bits.
    """
    # Sorted: whoever wrote the object may have had its keys in another order than whoever checks it.
    data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def sealed(value: Mapping[str, Json]) -> JsonObject:
    """Return ``value`` with a digest of itself under ``blake2b``."""
    return {**value, SEAL: json_digest(value)}


def unsealed(value: Mapping[str, Json], *, of: str) -> JsonObject:
    """Return what was given to ``sealed``.

    The digest tells damage, not malice: whoever changes a value can make the digest anew. Whatever
    reads the values checks their ranges as well.

    Args:
        value: The object with its digest.
        of: What it is, for messages.

    Raises:
        StateError: The digest is missing or does not fit.
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
    """Return ``value`` where it is an integer from ``least`` to under ``below``.

    Raises:
        ValueError: It is another number, or no integer: ``true`` and ``3.0`` are none.
    """
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{shown(value)} is not a whole number from {least} to {below - 1}")
    return value


def shown(value: object) -> str:
    """Return a value of JSON for a message; of one that may be nested deeper than ``repr`` goes, what it is."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return f"{value!r:.60}"
