"""The values under some keys of many lines of strict JSON, read at once.

Shape suffixes:
    L  lines of a part
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Generic, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.source.columns import is_utf8
from omniload.source.parsing.json_lines.lines import ALL_GO_TO, BadLineError

__all__ = ["NEWLINES", "Integer", "LineField", "LinesRead", "PlainLines", "one_by_one", "parts_of"]

Found = TypeVar("Found")

LineField: TypeAlias = tuple[str, Any, bool]
"""A key, the type of its values, which refer to no line, and whether a line may lack it, which gives ``None``."""
Integer = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A 64-bit integer; a line with a larger one is read separately."""
NEWLINES = b"\n"
_NEWLINE, _RETURN, _BRACE, _CLOSING_BRACE = b"\n\r{}"
_CASE = _BRACE ^ ord("[")
"""Difference between the codes of a brace and a bracket."""
_PART_BYTES = 1 << 18
"""Bytes of lines that are Python objects at the same time, so that they and their results fit a core's cache."""
_FAR_APART = 1 << 10
"""Mean bytes of a line from which newlines are searched one after another.

C's search is four times as fast as numpy's check of every byte, but each call takes as long as a few hundred bytes.
"""


class PlainLines:
    """Reads the values under some keys of many lines of strict JSON at once, in a third of the time of single lines.

    The values are the same as those of ``object_of``, if they have the expected types. The values of other keys are
    skipped, and no objects are made of them. Lines that are only valid in a wider sense are left to ``object_of``, and
    so are lines that would be read differently here. Three checks find them: bytes of other keys that are not UTF-8, by
    a check of all bytes; lines with more or less than one object, by the characters around newlines; and values that
    nest too deep, by their brackets.
    """

    def __init__(self, decoder: msgspec.json.Decoder[Any], fields: Sequence[str]) -> None:
        self._decoder, self._fields = decoder, fields

    @classmethod
    def of(cls, fields: Sequence[LineField]) -> Self | None:
        """Return a reader of the values of some keys.

        ``None`` if lines write a key with escapes, or if a key may be nested in another.
        """
        if any("." in key for key, _, _ in fields):
            return None
        try:
            names = [f"field_{i}" for i in range(len(fields))]
            # Not tracked by the garbage collector, because a line refers to values, but no value refers to a line.
            line = msgspec.defstruct(
                "Line",
                [
                    (
                        name,
                        type_,
                        msgspec.field(name=key, default=None if may_lack else msgspec.NODEFAULT),
                    )
                    for name, (key, type_, may_lack) in zip(names, fields, strict=True)
                ],
                gc=False,
                kw_only=True,
            )
            return cls(msgspec.json.Decoder(line), names)
        except ValueError:
            return None

    def read(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[list[Any]] | None:
        """Return the values under each key: a list for each key.

        Args:
            data: Whole lines, at least one.
            ends: End of each line: the place of its newline, or the end of ``data``.

        Returns:
            ``None`` if any line needs a closer look: it is blank, begins or ends with white space, is only valid in a
            wider sense or not at all, or lacks a value of the right type.
        """
        whole = Ragged(values_V=data, offsets=np.array([0, len(data)]))
        if not (
            _are_apart(data, ends)
            and _are_flat(data, ends)
            and is_utf8(whole.values_V, whole.offsets)
        ):
            return None
        try:
            found = self._decoder.decode_lines(data.data)
        except (msgspec.MsgspecError, RecursionError):
            return None
        # A newline within an object is white space, and two objects may be on one line.
        if len(found) != len(ends):
            return None
        return [list(map(attrgetter(name), found)) for name in self._fields]


def _are_apart(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> bool:
    """Return whether each line begins and ends with a brace, apart from a carriage return at the end of all lines.

    No value continues over a newline between such lines: strings have no newline, and a comma separates the braces of
    two objects inside an object. So each line has one or more objects of its own.
    """
    lasts = ends - 1
    if data[lasts[0]] == _RETURN:
        if (data[lasts] != _RETURN).any():
            return False
        lasts -= 1
    return bool(
        data[0] == _BRACE
        and (data[lasts] == _CLOSING_BRACE).all()
        and (data[ends[:-1] + 1] == _BRACE).all()
    )


def _are_flat(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> bool:
    """Return whether no line has enough brackets to nest deeper than every reader accepts."""
    # Each level of nesting takes two brackets, for which most lines are too short.
    if ends[0] < 2 * ALL_GO_TO and (ends[1:] - ends[:-1]).max(initial=0) <= 2 * ALL_GO_TO:
        return True
    opening = (data | _CASE) == _BRACE
    if np.count_nonzero(opening) - len(ends) < ALL_GO_TO:
        return True
    up_to = np.searchsorted(np.flatnonzero(opening), ends)
    return bool(max(up_to[0], (up_to[1:] - up_to[:-1]).max(initial=0)) < ALL_GO_TO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesRead(Generic[Found]):
    """Results of lines that were read one by one."""

    found: list[Found]
    bad_L: NDArray[np.bool_]
    reason: str
    """Place of the first bad line, and its fault."""


def one_by_one(
    lines: Sequence[bytes | memoryview],
    read: Callable[[bytes | memoryview], Found],
    bad: Found,
    path: str,
    first_line: int,
) -> LinesRead[Found]:
    """Read each line separately.

    Args:
        lines: The lines.
        read: Returns the content of a line, or raises ``BadLineError``.
        bad: Result for a bad line.
        path: Path of their file.
        first_line: Number of the first line in the file.
    """
    found, bad_L, reason = [], np.zeros(len(lines), np.bool_), ""
    for i, line in enumerate(lines):
        try:
            found.append(read(line))
        except BadLineError as error:
            found.append(bad)
            bad_L[i] = True
            reason = reason or f"{path}:{first_line + i}: {error}"
        except ConfigError as error:
            raise ConfigError(f"{path}:{first_line + i}: {error}") from error
    return LinesRead(found=found, bad_L=bad_L, reason=reason)


def parts_of(data: pa.Buffer) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Divide lines into parts that are not much longer than ``_PART_BYTES``, with the end of each line.

    The very last line needs no newline.
    """
    every: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    part_bytes, apart = _PART_BYTES, 0
    while len(every):
        part = every[:part_bytes]
        ends = _newlines(part) if apart >= _FAR_APART else np.flatnonzero(part == _NEWLINE)
        apart = len(part) // (len(ends) + 1)
        if len(part) == len(every) and part[-1] != _NEWLINE:
            ends = np.append(ends, len(part))
        elif not len(ends):
            part_bytes *= 2  # a single line is longer than that
            continue
        part_bytes = _PART_BYTES
        yield part[: ends[-1] + 1], ends
        every = every[ends[-1] + 1 :]


def _newlines(part: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the places of a few newlines."""
    held, places = part.tobytes(), []
    at = held.find(NEWLINES)
    while at >= 0:
        places.append(at)
        at = held.find(NEWLINES, at + 1)
    return np.array(places, np.int64)
