"""Braces of a pattern, as shells and WebDataset write them: ``{000..127}`` and ``{a,b}``."""

import re
from collections.abc import Iterator
from itertools import islice

__all__ = ["LARGEST_EXPANSION", "expanded"]

LARGEST_EXPANSION = 200_000
"""Names that one pattern may stand for at most."""

_RANGE = re.compile(r"(?P<first>[0-9]{1,18})\.\.(?P<last>[0-9]{1,18})")


def expanded(pattern: str) -> list[str]:
    """Return what a pattern stands for; one without braces stands for itself.

    A number keeps the zeros that its range begins with: ``{08..10}`` is 08, 09, 10. Braces may lie in
    braces. What is no range and has no comma stays as it is.

    Raises:
        ValueError: It stands for too many names, or a range falls.
    """
    names = list(islice(_each(pattern), LARGEST_EXPANSION + 1))
    if len(names) > LARGEST_EXPANSION:
        raise ValueError(
            f"its braces stand for more than {LARGEST_EXPANSION:,} names; name a folder or a glob"
        )
    return names


def _each(pattern: str) -> Iterator[str]:
    found = _first_group(pattern)
    if found is None:
        yield pattern
        return
    start, stop = found
    for choice in _choices(pattern[start + 1 : stop]):
        for rest in _each(pattern[stop + 1 :]):
            yield f"{pattern[:start]}{choice}{rest}"


def _first_group(pattern: str) -> tuple[int, int] | None:
    """Return where the first braces open and close that hold a choice."""
    opened: list[int] = []
    groups: list[tuple[int, int]] = []
    for at, letter in enumerate(pattern):
        if letter == "{":
            opened.append(at)
        elif letter == "}" and opened:
            groups.append((opened.pop(), at))
    return next(
        (each for each in sorted(groups) if _is_choice(pattern[each[0] + 1 : each[1]])), None
    )


def _is_choice(inside: str) -> bool:
    return _RANGE.fullmatch(inside) is not None or len(_split(inside)) > 1


def _choices(inside: str) -> Iterator[str]:
    if found := _RANGE.fullmatch(inside):
        first, last = int(found["first"]), int(found["last"])
        if last < first:
            raise ValueError(f"the range {{{inside}}} falls; write the smaller number first")
        zeros = any(len(end) > 1 and end.startswith("0") for end in found.groups())
        width = max(map(len, found.groups())) if zeros else 0
        yield from (f"{number:0{width}}" for number in range(first, last + 1))
        return
    for choice in _split(inside):
        yield from _each(choice)


def _split(inside: str) -> list[str]:
    """Cut at commas that stand in no braces of their own."""
    parts, depth = [""], 0
    for letter in inside:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
