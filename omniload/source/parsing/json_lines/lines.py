"""The content of one line of a JSONL file: its text, or its fault.

A line is one JSON object. Three extensions of RFC 8259 are accepted if the text itself is sound, because common writers
produce them under other keys: ``NaN`` and ``Infinity``, numbers outside of the range of a double, and escapes of half a
surrogate pair.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence

import orjson

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.source.parsing.beginnings import MARK, said_of_beginning, said_of_stand_in

__all__ = [
    "ALL_GO_TO",
    "LARGEST_DEPTH",
    "MISSING",
    "BadLineError",
    "key_in",
    "lacks_memory",
    "number_in",
    "object_in",
    "object_of",
    "said_of_no_memory",
    "text_in",
    "text_of",
    "value_at",
    "value_in",
]

LARGEST_DEPTH = 512
"""Deepest nesting of a line that is not strict JSON; a line of strict JSON may have 1,024 levels."""

MISSING = object()
"""Stands for a missing value."""
ALL_GO_TO = 1_024
"""Nesting that every reader of lines accepts."""
_BLANK = b" \t\r"
_SHOWN_KEYS, _SHOWN_WIDTH = 12, 40
# A string without an end reaches to the end of the line, so the search takes one pass for any input.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)
_TIMES_IN_MEMORY = 12
"""Bytes of memory that orjson allocates per byte of JSON."""
_MOST_DIGITS = 20
"""Longest 64-bit integer, including its sign. Python itself refuses an integer of more than 4,300 digits."""


def _integer(text: str) -> int | float:
    """Read an integer as orjson does: an integer that does not fit into 64 bits becomes a float."""
    if len(text) <= _MOST_DIGITS and -(1 << 63) <= (value := int(text)) < 1 << 64:
        return value
    return float(text)


_LENIENT = json.JSONDecoder(parse_int=_integer)
_NUMBER = re.compile(
    r"[+-]?(?:(?P<digits>\d+)|(?:\d+\.\d*|\.?\d+)(?:e[+-]?\d+)?|inf|infinity|nan)",
    re.ASCII | re.IGNORECASE,
)


class BadLineError(IntegrityError):
    """A line without a usable text; the message is a predicate of the line."""


def text_of(line: bytes | memoryview, key: str, *, nested: bool = False) -> bytes:
    """Return the text under ``key`` of a line as UTF-8; a blank line is an empty text.

    If a key is given twice, its last value counts. The result depends only on the bytes of the line.

    Args:
        line: The line without its newline; a carriage return before the newline is white space.
        key: Key of the text.
        nested: Whether a list or an object is accepted too, as JSON.

    Raises:
        BadLineError: The line is no JSON object, lacks the key, or the value is no string of complete characters.
    """
    value = object_of(line)
    return b"" if value is None else text_in(value, key, nested=nested)


_LINES_OF_LIST = "of a file that is one list, write a line for each object: jq -c '.[]' FILE"
_BEGUN = {
    b"[": f"begins a list that goes over several lines; {_LINES_OF_LIST}",
    b"{": "begins an object that goes over several lines; write each on a line of its own: jq -c . FILE",
}
"""Descriptions of lines that show a file to be sound, but not of JSON lines."""


def object_of(line: bytes | memoryview) -> dict[str, object] | None:
    """Return the object of a line; ``None`` for a blank line.

    Raises:
        BadLineError: The line is no JSON object.
        ConfigError: There is not enough memory to decide.
    """
    value: object
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            # Blank lines are rare, so they are only looked for after JSON has refused a line.
            if not bytes(line).strip(_BLANK):
                return None
            value = _leniently(bytes(line), error)
        except MemoryError:
            # Not a bad line, because which lines are bad must not depend on other memory of the process.
            raise ConfigError(f"the line {said_of_no_memory(len(line))}, or split it") from None
    if not isinstance(value, dict):
        lines = f"; {_LINES_OF_LIST}" if isinstance(value, list) else ""
        raise BadLineError(f"is a JSON {type(value).__name__}, not an object{lines}")
    return value


def lacks_memory(error: orjson.JSONDecodeError) -> bool:
    """Return whether orjson ran out of memory, which it reports as if the text were at fault."""
    return "memory" in error.msg


def said_of_no_memory(size_bytes: int) -> str:
    """Return the message that JSON of some size needs more memory than there is, as a predicate, with a remedy."""
    return (
        f"holds {format_bytes(size_bytes)}, and reading it takes {_TIMES_IN_MEMORY} times as much memory, which is "
        "not free; give the process more"
    )


def text_in(value: dict[str, object], key: str, *, nested: bool = False) -> bytes:
    """Return the text under ``key`` of an object as UTF-8; see ``text_of``."""
    text = value_in(value, key)
    if nested and isinstance(text, list | dict):
        try:
            return orjson.dumps(text)
        except TypeError as error:
            raise BadLineError(f"{key!r} cannot be written as JSON: {error}") from error
    if not isinstance(text, str):
        first = text[0] if isinstance(text, list) and text else None
        meant = ""
        if isinstance(first, dict):
            meant = "; of a conversation add transforms: [{type: chat}]"
        elif type(first) is int:
            meant = f"; token ids are read by tokens: {key}, of a source of type jsonl"
        raise BadLineError(f"{key!r} is {text!r:.40}, not a string{meant}")
    return _utf8(text, key)


def object_in(
    value: dict[str, object], keys: Sequence[str], may_lack: Collection[str] = ()
) -> bytes:
    """Return the values under several keys of an object, as an object in JSON.

    Args:
        value: The object.
        keys: The keys.
        may_lack: Keys that may be missing, which then become null.

    Raises:
        BadLineError: A key is missing, or a value cannot be written as JSON.
    """
    found = {key: (value_at if key in may_lack else value_in)(value, key) for key in keys}
    try:
        return orjson.dumps({k: None if held is MISSING else held for k, held in found.items()})
    except TypeError as error:
        raise BadLineError(f"{', '.join(keys)} cannot be written as JSON: {error}") from error


def key_in(value: dict[str, object], key: str) -> bytes:
    """Return the key of a line under ``key`` of its object: a text, or an integer in decimal digits.

    Raises:
        BadLineError: The key is missing, or has another value.
    """
    known_by = value_in(value, key)
    # A bool is an int in Python, but no key.
    if isinstance(known_by, bool) or not isinstance(known_by, str | int):
        raise BadLineError(f"{key!r} is {known_by!r:.40}, not a text or an integer, as a key is")
    return _utf8(str(known_by), key)


def number_in(text: str) -> int | float | None:
    """Return the number in a text, read like the number of a line; ``None`` if the text is no number.

    All usual forms are accepted: ``7``, ``+7``, ``.5``, ``5.``, ``1E-3``, ``inf``, ``nan``, with blanks around them.
    """
    stripped = text.strip(" \t")
    found = _NUMBER.fullmatch(stripped)
    if found is None:
        return None
    return float(stripped) if found["digits"] is None else _integer(stripped)


def value_in(value: Mapping[str, object], key: str) -> object:
    """Return the value under a key of an object.

    Raises:
        BadLineError: The key is missing; the message names the existing keys.
    """
    found = value_at(value, key)
    if found is MISSING:
        outer, dot, _ = key.partition(".")
        inside = ""
        if dot and outer in value:
            inner = value[outer]
            inside = (
                f"; inside {outer!r} it has {_shown(inner)}"
                if isinstance(inner, dict)
                else f"; {outer!r} is {inner!r:.40}, not an object"
            )
        raise BadLineError(f"has no key {key!r}; it has {_shown(value)}{inside}")
    return found


def value_at(value: Mapping[str, object], key: str) -> object:
    """Return the value under a key; for ``meta.lang``, also the value under ``lang`` of the object under ``meta``.

    A key whose whole name matches comes first. Everything inside a null is null; a missing value is ``MISSING``.
    """
    if key in value:
        return value[key]
    outer, dot, rest = key.partition(".")
    inner = value.get(outer, MISSING) if dot else MISSING
    if isinstance(inner, dict):
        return value_at(inner, rest)
    return None if inner is None else MISSING


def _utf8(text: str, key: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadLineError(
            f"{key!r} holds half a surrogate pair at character {error.start}; write the character whole"
        ) from error


def _leniently(line: bytes, strict: orjson.JSONDecodeError) -> object:
    """Read a line that strict JSON refuses.

    Raises:
        BadLineError: The line is no JSON in the wider sense either; has the message of strict JSON.
        MemoryError: There is not enough memory to decide.
    """
    refusal = BadLineError(f"is not JSON: {strict}")
    begun = line.strip()
    if begun.startswith(b"[") and begun.endswith(b","):  # with its first object on the same line
        begun = b"["
    if what := said_of_beginning(line) or _BEGUN.get(begun) or said_of_stand_in(line):
        raise BadLineError(what)
    # Has its own message, because an editor does not show a mark, and the line looks sound.
    if line.startswith(MARK):
        # Only within a file; at the beginning of the file, the mark is removed.
        raise BadLineError(
            "begins with a byte-order mark; save the file as UTF-8 without one, or take it off: "
            "sed -i 's/^\\xef\\xbb\\xbf//' FILE"
        )
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(f"is not JSON: not UTF-8: {error}") from error
    # The reader below recurses, and without a limit its depth would depend on the caller's.
    if (depth := _depth(text)) > ALL_GO_TO:
        raise BadLineError(
            f"nests {depth:,} brackets deep, and a line is read to {ALL_GO_TO:,}; write it flatter"
        )
    if depth > LARGEST_DEPTH:
        if lacks_memory(strict):
            raise MemoryError
        raise BadLineError(
            f"is not strict JSON ({strict}), and nests {depth} brackets deep: what strict JSON lacks, such as NaN, is "
            f"read to {LARGEST_DEPTH}; write null for NaN, or the line flatter"
        )
    try:
        value: object = _LENIENT.decode(text)
    except json.JSONDecodeError as error:
        raise (
            BadLineError(f"is not JSON: {error}") if lacks_memory(strict) else refusal
        ) from strict
    return value


def _depth(text: str) -> int:
    """Return the depth of nested brackets outside of strings."""
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in {"[", "{"}:
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in {"]", "}"}:
            depth -= 1
    return deepest


def _shown(value: Mapping[str, object]) -> str:
    """List keys for a message: a few short ones, without control characters for a terminal."""
    names = [ascii(name)[1:-1] if not name.isprintable() else name for name in sorted(value)]
    short = [
        name if len(name) <= _SHOWN_WIDTH else name[: _SHOWN_WIDTH - 1] + "…" for name in names
    ]
    more = len(short) - _SHOWN_KEYS
    listed = ", ".join(short[:_SHOWN_KEYS]) or "none"
    return f"{listed} and {more} more" if more > 0 else listed
