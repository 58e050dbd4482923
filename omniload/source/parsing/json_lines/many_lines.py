"""Many lines of strict JSON at once: what stands under some keys of each.

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
"""A key, the type of its values, which refer to no line, and whether a line may lack it, and has ``None`` then."""
Integer = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""One of 64 bits; a line that has a larger one is read by itself."""
NEWLINES = b"\n"
_NEWLINE, _RETURN, _BRACE, _CLOSING_BRACE = b"\n\r{}"
_CASE = _BRACE ^ ord("[")
"""What a brace has more than a bracket."""
_PART_BYTES = 1 << 18
"""Lines that are held as objects of Python at once: what a core has in its cache, with what becomes of them."""
_FAR_APART = 1 << 10
"""Bytes of a line, in the mean, from which on newlines are looked for one after the other: C's search is four times as
quick as a look at each byte by numpy, and a call of it takes as long as some hundred bytes."""


class PlainLines:
    """What stands under some keys of lines of strict JSON, of many lines at once: in a third of the time of one by one.

    Values are those that ``object_of`` finds, where they are of the types that are asked for. The values of other keys
    are passed over, and made into nothing. What is read in a wider sense is left to ``object_of``, and so is what would
    be read otherwise here: bytes of other keys that are no UTF-8 are looked for in all bytes at once, lines that
    hold more or less than one object by what stands around newlines, and values that nest deeper than any reader may go
    by their brackets.
    """

    def __init__(self, decoder: msgspec.json.Decoder[Any], fields: Sequence[str]) -> None:
        self._decoder, self._fields = decoder, fields

    @classmethod
    def of(cls, fields: Sequence[LineField]) -> Self | None:
        """Return what reads the values of some keys.

        ``None`` where a key has letters that a line writes as escapes, or may be one inside another.
        """
        if any("." in key for key, _, _ in fields):
            return None
        try:
            names = [f"field_{i}" for i in range(len(fields))]
            # Not looked at by the collector: a line refers to values, which refer to no line.
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
        """Return what lines have under each key: a list for each key.

        Args:
            data: Whole lines, at least one.
            ends: Where each ends: the place of its newline, or the end of ``data``.

        Returns:
            ``None`` where any line asks for a closer look: it is blank, begins or ends with white space, is read
            leniently or not at all, or has no value of its type under a key.
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
        # A newline within an object is white space there, and two objects may stand in one line.
        if len(found) != len(ends):
            return None
        return [list(map(attrgetter(name), found)) for name in self._fields]


def _are_apart(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> bool:
    """Whether each line begins and ends with a brace, but for a carriage return that all end with.

    No value goes on over a newline between such lines: it is none of its strings, which hold no newline, and between
    the braces of two objects within one stands a comma. So each line holds an object or more of its own.
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
    """Whether no line has brackets enough to nest deeper than every reader of lines may go."""
    # A line that nests has two brackets a level: most are too short.
    if ends[0] < 2 * ALL_GO_TO and (ends[1:] - ends[:-1]).max(initial=0) <= 2 * ALL_GO_TO:
        return True
    opening = (data | _CASE) == _BRACE
    if np.count_nonzero(opening) - len(ends) < ALL_GO_TO:
        return True
    up_to = np.searchsorted(np.flatnonzero(opening), ends)
    return bool(max(up_to[0], (up_to[1:] - up_to[:-1]).max(initial=0)) < ALL_GO_TO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesRead(Generic[Found]):
    """What lines gave that were read one by one."""

    found: list[Found]
    bad_L: NDArray[np.bool_]
    reason: str
    """Where the first bad one is and what is wrong with it."""


def one_by_one(
    lines: Sequence[bytes | memoryview],
    read: Callable[[bytes | memoryview], Found],
    bad: Found,
    path: str,
    first_line: int,
) -> LinesRead[Found]:
    """Read each line by itself.

    Args:
        lines: The lines.
        read: Returns what a line gives, or refuses it.
        bad: What stands for a line that is refused.
        path: Of their file.
        first_line: Number of the first in the file.
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
    """Cut lines into parts of which none is much longer than ``_PART_BYTES``, and say where each line ends.

    The last line of all needs no newline.
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
            part_bytes *= 2  # one line is longer than that
            continue
        part_bytes = _PART_BYTES
        yield part[: ends[-1] + 1], ends
        every = every[ends[-1] + 1 :]


def _newlines(part: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the places of newlines that are few."""
    held, places = part.tobytes(), []
    at = held.find(NEWLINES)
    while at >= 0:
        places.append(at)
        at = held.find(NEWLINES, at + 1)
    return np.array(places, np.int64)
