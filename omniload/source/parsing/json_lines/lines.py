"""What one line of a JSONL file holds: its text, or what is wrong with it.

A line is one JSON object. Three things are borne beside what RFC 8259 allows, as long as the
text itself is sound, because common writers put them into other keys: ``NaN`` and ``Infinity``,
numbers out of the range of a double, and escapes of half a surrogate pair.
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
"""Deepest nesting of a line that strict JSON does not cover; one within strict JSON may have 1,024."""

MISSING = object()
"""Stands for a value that is nowhere."""
ALL_GO_TO = 1_024
"""Nesting that no reader of lines refuses for its depth alone."""
_BLANK = b" \t\r"
_SHOWN_KEYS, _SHOWN_WIDTH = 12, 40
# A string that does not end reaches to the end: the search takes one pass, whatever it is given.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)
_TIMES_IN_MEMORY = 12
"""Bytes that orjson asks for at once to read a byte of JSON."""
_MOST_DIGITS = 20
"""Of an integer of 64 bits, its sign among them. Python itself refuses to read one of more than 4,300 digits."""


def _integer(text: str) -> int | float:
    """Read an integer as orjson does: one that 64 bits do not hold becomes a float."""
    if len(text) <= _MOST_DIGITS and -(1 << 63) <= (value := int(text)) < 1 << 64:
        return value
    return float(text)


_LENIENT = json.JSONDecoder(parse_int=_integer)
_NUMBER = re.compile(
    r"[+-]?(?:(?P<digits>\d+)|(?:\d+\.\d*|\.?\d+)(?:e[+-]?\d+)?|inf|infinity|nan)",
    re.ASCII | re.IGNORECASE,
)


class BadLineError(IntegrityError):
    """A line without a usable text; the message says why, as a predicate of the line."""


def text_of(line: bytes | memoryview, key: str, *, nested: bool = False) -> bytes:
    """Return the text under ``key`` of a line as UTF-8; a blank line is an empty text.

    A key that is given twice counts with its last value. The answer depends on the bytes of
    the line alone.

    Args:
        line: The line without its newline; a carriage return before that is white space.
        key: Key of the text.
        nested: Whether a list or an object is taken too, as JSON.

    Raises:
        BadLineError: The line is no JSON object, has no such key, or its value is no string of
            whole characters.
    """
    value = object_of(line)
    return b"" if value is None else text_in(value, key, nested=nested)


_LINES_OF_LIST = "of a file that is one list, write a line for each object: jq -c '.[]' FILE"
_BEGUN = {
    b"[": f"begins a list that goes over several lines; {_LINES_OF_LIST}",
    b"{": "begins an object that goes over several lines; write each on a line of its own: jq -c . FILE",
}
"""What a line is that is none, though the file is sound."""


def object_of(line: bytes | memoryview) -> dict[str, object] | None:
    """Return the object of a line; ``None`` of a blank one.

    Raises:
        BadLineError: The line is no JSON object.
        ConfigError: Memory is lacking to tell.
    """
    value: object
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            # Blank lines are few: they are looked for once JSON has refused one.
            if not bytes(line).strip(_BLANK):
                return None
            value = _leniently(bytes(line), error)
        except MemoryError:
            # Not a bad line: which lines are bad must not depend on what else a process holds.
            raise ConfigError(f"the line {said_of_no_memory(len(line))}, or split it") from None
    if not isinstance(value, dict):
        lines = f"; {_LINES_OF_LIST}" if isinstance(value, list) else ""
        raise BadLineError(f"is a JSON {type(value).__name__}, not an object{lines}")
    return value


def lacks_memory(error: orjson.JSONDecodeError) -> bool:
    """Whether orjson gave up for want of memory, which it says as if the text were at fault."""
    return "memory" in error.msg


def said_of_no_memory(size_bytes: int) -> str:
    """Return what a text of JSON takes that there is no memory for, as a predicate of it, and a remedy."""
    return (
        f"holds {format_bytes(size_bytes)}, and {_TIMES_IN_MEMORY} times as much memory, which it takes to read, is "
        "not to be had; give the process more"
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
    """Return what stands under several keys of an object, as an object in JSON.

    Args:
        value: The object.
        keys: The keys.
        may_lack: Those that may be missing, and are null then.

    Raises:
        BadLineError: There is no such key, or its value cannot be written as JSON.
    """
    found = {key: (value_at if key in may_lack else value_in)(value, key) for key in keys}
    try:
        return orjson.dumps({k: None if held is MISSING else held for k, held in found.items()})
    except TypeError as error:
        raise BadLineError(f"{', '.join(keys)} cannot be written as JSON: {error}") from error


def key_in(value: dict[str, object], key: str) -> bytes:
    """Return what a line is known by, under ``key`` of its object: a text, or an integer in decimal digits.

    Raises:
        BadLineError: There is no such key, or it holds something else.
    """
    known_by = value_in(value, key)
    # A bool is an int to Python, and nobody's key.
    if isinstance(known_by, bool) or not isinstance(known_by, str | int):
        raise BadLineError(f"{key!r} is {known_by!r:.40}, not a text or an integer, as a key is")
    return _utf8(str(known_by), key)


def number_in(text: str) -> int | float | None:
    """Return the number that a text is, read as one of a line is; ``None`` where it is none.

    Written as any program does: ``7``, ``+7``, ``.5``, ``5.``, ``1E-3``, ``inf``, ``nan``, with blanks around it.
    """
    stripped = text.strip(" \t")
    found = _NUMBER.fullmatch(stripped)
    if found is None:
        return None
    return float(stripped) if found["digits"] is None else _integer(stripped)


def value_in(value: Mapping[str, object], key: str) -> object:
    """Return what stands under a key of an object.

    Raises:
        BadLineError: There is no such key; says which there are.
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
    """Return what stands under a key, or, of ``meta.lang``, under ``lang`` of the object under ``meta``.

    A key that is called so as a whole comes first. Inside a null all is null; ``MISSING`` is what is nowhere.
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
        BadLineError: It is no JSON in the wider sense either; says what strict JSON said.
        MemoryError: Memory is lacking to tell.
    """
    refusal = BadLineError(f"is not JSON: {strict}")
    begun = line.strip()
    if begun.startswith(b"[") and begun.endswith(b","):  # with its first object on the same line
        begun = b"["
    if what := said_of_beginning(line) or _BEGUN.get(begun) or said_of_stand_in(line):
        raise BadLineError(what)
    # Told by itself: an editor shows nothing there, and the line looks sound.
    if line.startswith(MARK):
        # Within a file: at its beginning it is left out.
        raise BadLineError(
            "begins with a byte-order mark; save the file as UTF-8 without one, or take it off: "
            "sed -i 's/^\\xef\\xbb\\xbf//' FILE"
        )
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(f"is not JSON: not UTF-8: {error}") from error
    # The reader below recurses: without a limit, how deep it comes would depend on who calls.
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
    """Return how deep brackets nest outside of strings."""
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in {"[", "{"}:
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in {"]", "}"}:
            depth -= 1
    return deepest


def _shown(value: Mapping[str, object]) -> str:
    """List keys for a message: a few, short, and nothing that a terminal would obey."""
    names = [ascii(name)[1:-1] if not name.isprintable() else name for name in sorted(value)]
    short = [
        name if len(name) <= _SHOWN_WIDTH else name[: _SHOWN_WIDTH - 1] + "…" for name in names
    ]
    more = len(short) - _SHOWN_KEYS
    listed = ", ".join(short[:_SHOWN_KEYS]) or "none"
    return f"{listed} and {more} more" if more > 0 else listed
