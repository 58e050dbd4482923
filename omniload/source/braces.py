"""Braces of a pattern, as in shells and WebDataset: ``{000..127}`` and ``{a,b}``; other forms raise an error.

A pattern is parsed once, and its names are counted before any of them is written out, so a hostile pattern costs no
more than its length.
"""

import re
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from omniload.base.units import format_bytes

__all__ = ["expanded", "none_at"]

_LARGEST_EXPANSION = 200_000
"""Most names that one pattern may stand for."""
_MOST_BYTES = 1 << 26
"""Total length of these names; no name of a file is longer than 4,096 bytes."""
_DEEPEST = 32

_RANGE = re.compile(r"(?P<first>[0-9]{1,18})\.\.(?P<last>[0-9]{1,18})")
_LONGEST_RANGE = 38
"""Longest text that is read as a range."""


def expanded(pattern: str) -> list[str]:
    """Return the names that a pattern stands for; a pattern without braces stands for itself.

    A number keeps the leading zeros of its range: ``{08..10}`` is 08, 09, 10. Braces may be nested. Braces without a
    range or a comma stay unchanged.

    Raises:
        ValueError: The pattern stands for too many or too long names, nests too deep, or has a falling range.
    """
    return _Braces(pattern).sequence(0, len(pattern), 0).names()


def none_at(pattern: str, base_dir: Path) -> str:
    """Return the place where a pattern of this machine stopped matching, and the most likely correction.

    Args:
        pattern: The pattern in the mix file.
        base_dir: Folder that relative paths start from.
    """
    if Path(pattern).is_absolute():
        return "; correct the path"
    remedy = "correct the path, relative paths start at the mix file"
    if pattern.startswith("~"):
        remedy = "~ stands for no home here: write the folder out"
    elif "$" in pattern:
        remedy = (
            "variables are written ${NAME}, in a file of version 2: write it so, or the folder out"
        )
    return f" under {base_dir}; {remedy}"


@dataclass(frozen=True, slots=True)
class _Choice:
    """Several alternatives, or the numbers of a range."""

    count: int
    length: int
    """Total length of all its names."""
    among: "tuple[_Sequence, ...]" = ()
    numbers: range = range(0)
    width: int = 0

    def names(self) -> list[str]:
        if self.among:
            return [name for each in self.among for name in each.names()]
        return [f"{number:0{self.width}}" for number in self.numbers]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Letters and choices, one after another; the last choice changes fastest."""

    parts: tuple[str | _Choice, ...]
    count: int
    length: int

    def names(self) -> list[str]:
        each = ([part] if isinstance(part, str) else part.names() for part in self.parts)
        return ["".join(name) for name in product(*each)]


class _Braces:
    """The braces of one pattern: the end of each, and the commas directly inside it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._stops: dict[int, int] = {}
        self._commas: dict[int, list[int]] = {}
        # In one pass, because a search for the end of each brace would take quadratic time.
        opened: list[int] = []
        for at, letter in enumerate(pattern):
            if letter == "{":
                opened.append(at)
            # A closing brace without an opening one is a letter, as in a shell.
            elif letter == "}" and opened:
                self._stops[opened.pop()] = at
            elif letter == "," and opened:
                self._commas.setdefault(opened[-1], []).append(at)

    def sequence(self, start: int, stop: int, depth: int) -> _Sequence:
        """Parse a part of the pattern in which every closing brace has an opening one."""
        if depth > _DEEPEST:
            raise ValueError(f"its braces lie deeper than {_DEEPEST}; write the names out")
        parts: list[str | _Choice] = []
        count, length, letters, at = 1, 0, start, start
        while at < stop:
            choice = self._choice(at, depth) if self._pattern[at] == "{" else None
            if choice is None:
                at += 1
                continue
            # Counted part by part, and refused at the limit, so that the numbers stay small.
            literal = self._pattern[letters:at]
            parts += [literal, choice]
            length = (length + len(literal) * count) * choice.count + choice.length * count
            count *= choice.count
            _require_few(count, length)
            letters = at = self._stops[at] + 1
        length += (stop - letters) * count
        _require_few(count, length)
        return _Sequence((*parts, self._pattern[letters:stop]), count, length)

    def _choice(self, at: int, depth: int) -> _Choice | None:
        """Parse the braces that open at ``at``; ``None`` if they are ordinary letters."""
        stop = self._stops.get(at)
        if stop is None:
            return None
        if stop - at - 1 <= _LONGEST_RANGE and (
            found := _RANGE.fullmatch(self._pattern, at + 1, stop)
        ):
            return _numbers(found)
        if at not in self._commas:
            return None
        ends = [at, *self._commas[at], stop]
        among = tuple(self.sequence(first + 1, last, depth + 1) for first, last in pairwise(ends))
        count, length = sum(each.count for each in among), sum(each.length for each in among)
        _require_few(count, length)
        return _Choice(count, length, among)


def _numbers(found: re.Match[str]) -> _Choice:
    first, last = int(found["first"]), int(found["last"])
    if last < first:
        raise ValueError(f"the range {{{found[0]}}} falls; write the smaller number first")
    zeros = any(len(end) > 1 and end.startswith("0") for end in found.groups())
    width = max(map(len, found.groups()))
    numbers = range(first, last + 1)
    return _Choice(len(numbers), len(numbers) * width, (), numbers, width if zeros else 0)


def _require_few(count: int, length: int) -> None:
    if count > _LARGEST_EXPANSION:
        raise ValueError(
            f"its braces stand for more than {_LARGEST_EXPANSION:,} names; name a folder or a glob"
        )
    if length > _MOST_BYTES:
        raise ValueError(
            f"its braces stand for names of more than {format_bytes(_MOST_BYTES)} together; name a folder or a glob"
        )
