"""Braces of a pattern, as shells and WebDataset write them: ``{000..127}`` and ``{a,b}``; what else they write is told.

A pattern is read once, and what it stands for is counted before any of it is written out: a hostile one
costs no more than its own length.
"""

import re
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from omniload.base.units import format_bytes

__all__ = ["expanded", "none_at"]

_LARGEST_EXPANSION = 200_000
"""Names that one pattern may stand for at most."""
_MOST_BYTES = 1 << 26
"""Length of these names together; no file's name is longer than 4,096."""
_DEEPEST = 32

_RANGE = re.compile(r"(?P<first>[0-9]{1,18})\.\.(?P<last>[0-9]{1,18})")
_LONGEST_RANGE = 38
"""Letters of a range; what is longer is not looked at."""


def expanded(pattern: str) -> list[str]:
    """Return what a pattern stands for; one without braces stands for itself.

    A number keeps the zeros that its range begins with: ``{08..10}`` is 08, 09, 10. Braces may lie in
    braces. What is no range and has no comma stays as it is.

    Raises:
        ValueError: It stands for too many names, or for too long ones; its braces lie too deep; or a range falls.
    """
    return _Braces(pattern).sequence(0, len(pattern), 0).names()


def none_at(pattern: str, base_dir: Path) -> str:
    """Return where a pattern of this machine has led to nothing, and what is most likely to be changed in it.

    Args:
        pattern: As the mix file has it.
        base_dir: Folder that relative paths start at.
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
    """One of several, or a number of a range."""

    count: int
    length: int
    """Of all its names together."""
    among: "tuple[_Sequence, ...]" = ()
    numbers: range = range(0)
    width: int = 0

    def names(self) -> list[str]:
        if self.among:
            return [name for each in self.among for name in each.names()]
        return [f"{number:0{self.width}}" for number in self.numbers]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Letters and choices, one behind the other; the last choice changes first."""

    parts: tuple[str | _Choice, ...]
    count: int
    length: int

    def names(self) -> list[str]:
        each = ([part] if isinstance(part, str) else part.names() for part in self.parts)
        return ["".join(name) for name in product(*each)]


class _Braces:
    """The braces of one pattern: where each closes, and the commas that stand in it and in no other."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._stops: dict[int, int] = {}
        self._commas: dict[int, list[int]] = {}
        # In one pass: to look for the end of each brace anew would cost the square of the pattern.
        opened: list[int] = []
        for at, letter in enumerate(pattern):
            if letter == "{":
                opened.append(at)
            # One that closes what was never opened is a letter, as to a shell.
            elif letter == "}" and opened:
                self._stops[opened.pop()] = at
            elif letter == "," and opened:
                self._commas.setdefault(opened[-1], []).append(at)

    def sequence(self, start: int, stop: int, depth: int) -> _Sequence:
        """Read a part of the pattern in which every brace that closes was opened."""
        if depth > _DEEPEST:
            raise ValueError(f"its braces lie deeper than {_DEEPEST}; write the names out")
        parts: list[str | _Choice] = []
        count, length, letters, at = 1, 0, start, start
        while at < stop:
            choice = self._choice(at, depth) if self._pattern[at] == "{" else None
            if choice is None:
                at += 1
                continue
            # Counted part by part, and refused as soon as it is too much: the numbers themselves stay small.
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
        """Read the braces that open at ``at``; ``None`` where they are letters like others."""
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
