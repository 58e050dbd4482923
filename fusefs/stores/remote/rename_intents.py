"""The intent to replace a file, on stores where this takes several steps: written down in advance, for recovery.

``.omnifs/intents/<xxh3-128 of the target path>`` holds ``{"version":1,"source":...,"target":...}``.
In version 2, for names that are not UTF-8, each byte of a name is one character.
Any caller that can write to the store can write an intent, and reading an intent moves a file. So an intent
counts only if both its names are plain paths within the store and its own path belongs to
its target.
"""

import os
from dataclasses import dataclass

import orjson
import xxhash

from fusefs.stores.protocol import RESERVED, TEMPORARY, is_at_or_below, parent_of, stored_path
from omniload.base.errors import IntegrityError

__all__ = ["INTENTS", "MAX_INTENT_BYTES", "Intent", "decode_intent", "encode_intent", "intent_path"]

INTENTS = f"{RESERVED}/intents"
MAX_INTENT_BYTES = 64 << 10
"""Size limit of an intent: two paths, longer than any store allows."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A pending rename: the file at ``source`` is to replace ``target``."""

    source: str
    target: str


def intent_path(target: str) -> str:
    """Return the path of the intent to replace ``target``."""
    # Named by the target, so that a reader that misses the target finds the intent without a listing.
    digest = xxhash.xxh3_128_hexdigest(target.encode("utf-8", "surrogateescape"))
    return f"{INTENTS}/{digest}"


def encode_intent(intent: Intent) -> bytes:
    """Return the bytes of an intent."""
    try:
        return orjson.dumps({"version": 1, "source": intent.source, "target": intent.target})
    except TypeError:  # the bytes of a name are not UTF-8, which JSON cannot hold
        source, target = map(_as_text, (intent.source, intent.target))
        return orjson.dumps({"version": 2, "source": source, "target": target})


def decode_intent(data: bytes, *, path: str) -> Intent:
    """Read an intent.

    Args:
        data: Bytes of the intent.
        path: Path of the intent.

    Raises:
        IntegrityError: It is half written, or no fusefs writer would have written it: the source
            is no plain path of the store or belongs to the store itself, or the target belongs to another path.
    """
    name = f"intent {path!r}"
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(f"{name} is no JSON: {error}; repair removes it") from error
    if not isinstance(record, dict) or record.get("version") not in {1, 2}:
        raise IntegrityError(f"{name} is no record of version 1 or 2; repair removes it")
    given = [record.get(field) for field in ("source", "target")]
    if record["version"] == 2:
        given = [_from_text(value, name) for value in given]
    source = stored_path(given[0], where=f"source of {name}")
    target = stored_path(given[1], where=f"target of {name}")
    if intent_path(target) != path or is_at_or_below(target, RESERVED):
        raise IntegrityError(
            f"{name} is for {target!r}, which belongs elsewhere; repair removes it"
        )
    # Otherwise a forged intent could expose a store's own files, such as objects of other users.
    if is_at_or_below(source, RESERVED) and parent_of(source) != TEMPORARY:
        raise IntegrityError(
            f"{name} names the source {source!r}, which belongs to the store; repair removes it"
        )
    return Intent(source, target)


def _as_text(path: str) -> str:
    return os.fsencode(path).decode("latin-1")


def _from_text(value: object, name: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return os.fsdecode(value.encode("latin-1"))
    except UnicodeEncodeError as error:
        raise IntegrityError(
            f"{name} holds {error.object[error.start]!r}, no byte; repair removes it"
        ) from error
