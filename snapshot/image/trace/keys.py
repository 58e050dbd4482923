"""Which command a trace is for: by its words, by those most like them, or by how often it is started."""

import hashlib
import json
from collections.abc import Sequence

__all__ = ["command_key", "most_run", "nearest"]

_MOST_COMMANDS = 8
"""Of which traces are united: each one more is read before a start."""


def command_key(command: Sequence[str]) -> str:
    """Return the name of a command: sha256 of its words, in hex."""
    return hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()


def nearest(commands: Sequence[Sequence[str]], wanted: Sequence[str]) -> int | None:
    """Return which command starts most like another one.

    A job that goes on from another step is the same start with another argument.

    Returns:
        Place of the one that shares the most leading words, at least the first; of equals the
        shortest, then the first. None where no first word is shared.
    """
    shared = [_num_shared(command, wanted) for command in commands]
    places = [place for place, num in enumerate(shared) if num]
    return min(places, key=lambda p: (-shared[p], len(commands[p]), p), default=None)


def most_run(runs: Sequence[int]) -> tuple[int, ...]:
    """Return which commands make up three quarters of the starts of an image.

    What is started is then like one of these, more likely than not, where nobody says what it is.

    Args:
        runs: Starts of each command.

    Returns:
        Places, the most started first, of equals the first; no more than eight.
    """
    order = sorted(range(len(runs)), key=lambda place: (-runs[place], place))
    found, started = [], 0
    for place in order[:_MOST_COMMANDS]:
        if 4 * started >= 3 * sum(runs):
            break
        found.append(place)
        started += runs[place]
    return tuple(found)


def _num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
