"""The keys of another tool's file: each is read, noted as without an equivalent, or refused."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import TypeIs

from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets
from omniload.importing.documents import Lined, Place

__all__ = ["Fields", "Report", "is_count"]

Value = TypeVar("Value")
_SHOWN = 60
"""Letters of a value that a message shows."""
_LARGEST = 1 << 53
"""Whole number that stands for a number with a fraction at most."""
_GROUPED = re.compile("[1-9][0-9]*(_[0-9]+)+")
"""A whole number in groups, as ``100_000``: a number to YAML 1.1, which other tools read, and a text to YAML 1.2."""
_MOST_KEYS = 5
"""Keys that a note names."""
_MOST_FAULTS = 50
"""Faults that a message lists."""


@dataclass(slots=True)
class Report:
    """What an import came upon: faults, which refuse it, and notes for a person."""

    left_out: frozenset[str] = frozenset()
    """Keys that the user has given up."""
    notes: list[str] = field(default_factory=list)
    faults: list[tuple[str, bool]] = field(default_factory=list)
    """What is said of each, and whether that names the file."""

    def note(self, where: str, said: str) -> None:
        """Say what has no equivalent and changes no sample, or what was assumed; once, however often it stands."""
        line = f"{where}: {said}" if where else said
        if line not in self.notes:
            self.notes.append(line)

    def refuse(self, where: str, said: str, place: Place | None = None) -> None:
        """Refuse the import, once everything has been read; a fault that comes again is one.

        Args:
            where: The key.
            said: What is wrong with it.
            place: Where it stands, as far as that is known.
        """
        line = f"{where}: {said}" if where else said
        if place is not None:
            file, number = place
            # The key of a file that another names begins with that file, which stands ahead of the line already.
            line = f"{file}:{number}: {line.removeprefix(f'{file}.')}"
        if (line, place is not None) not in self.faults:
            self.faults.append((line, place is not None))

    def raise_faults(self, name: str) -> None:
        """Refuse the file called ``name`` if there was a fault.

        Raises:
            ConfigError: Listing all of them.
        """
        if self.faults:
            shown = [said if placed else f"{name}: {said}" for said, placed in self.faults]
            if (more := len(shown) - _MOST_FAULTS) > 0:
                shown[_MOST_FAULTS:] = [f"{name}: and {more} more"]
            raise ConfigError("\n".join(shown))


class Fields:
    """One mapping of the file, and which of its keys were dealt with."""

    def __init__(
        self,
        content: Mapping[str, object],
        where: str,
        report: Report,
        above: Place | None = None,
    ) -> None:
        """Read ``content``, which stands at the key ``where``; the empty text is the whole file.

        Args:
            content: The mapping; a ``Lined`` one knows where it stands.
            where: Its key.
            report: What the import comes upon.
            above: Where the mapping stands that this one is missing in.
        """
        self._content, self._where, self._report = dict(content), where, report
        self._place = content.place if isinstance(content, Lined) else above
        self._places = content.places if isinstance(content, Lined) else {}
        for key in [key for key in self._content if key in report.left_out]:
            # As if it were not there: what asks for it later takes its default.
            del self._content[key]
            report.note(self.at(key), "was left out, as asked")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that were not dealt with yet."""
        return tuple(self._content)

    def at(self, key: str | int) -> str:
        """Return where a key stands in the file."""
        name = f"[{key}]" if isinstance(key, int) else key
        return f"{self._where}.{name}".replace(".[", "[") if self._where else name

    def take(self, key: str, kind: type[Value], default: Value) -> Value:
        """Return the value of a key; where it is missing or null, ``default``."""
        value = self._content.pop(key, None)
        if value is None:
            return default
        if isinstance(value, str) and kind in (int, float) and _GROUPED.fullmatch(value):
            value = int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            # A larger one has no exact float, or none at all: left as it is, it is refused as no number.
            value = float(value) if abs(value) <= _LARGEST else value
        if isinstance(value, str) and _left_open(value):
            self.refuse(key, f"{_shown(value)} {_OPEN}")
            return default
        # ``True`` is an integer to Python, and an object as anything is.
        truth = isinstance(value, bool) and kind not in (bool, object)
        if not isinstance(value, kind) or truth:
            self.refuse(key, f"{_shown(value)} is no {_KINDS.get(kind, kind.__name__)}")
            return default
        return value

    def peek(self, key: str) -> object:
        """Return the value of a key as it stands, and leave it to be dealt with."""
        return self._content.get(key)

    def need(self, key: str, kind: type[Value], default: Value) -> Value:
        """Return the value of a key that must be there; ``default`` lets the reading go on behind a fault."""
        if self._content.get(key) is None:
            self.refuse(key, "is missing")
        return self.take(key, kind, default)

    def number(self, key: str, *, least: float = 0.0) -> float | None:
        """Return a number that is at least ``least``, None where it is missing."""
        if self._content.get(key) is None:
            self._content.pop(key, None)
            return None
        value = self.take(key, float, least)
        if not least <= value < float("inf"):
            self.refuse(key, f"is {value}; it is a number from {least:g} on")
            return least
        return value

    def numbers(self, key: str, count: int) -> list[float] | None:
        """Return a list of ``count`` numbers from 0 on; None, and a fault, for anything else."""
        listed: Sequence[object] = self.take(key, list, [])
        found = [
            float(each)
            for each in listed
            if isinstance(each, int | float)
            and not isinstance(each, bool)
            and 0 <= each <= _LARGEST
        ]
        if len(found) == len(listed) == count:
            return found
        self.refuse(key, f"holds {len(listed)} entries, not {count} numbers from 0 to {_LARGEST}")
        return None

    def texts(self, key: str) -> list[str]:
        """Return a text or a list of texts as a list; empty where it is missing."""
        value = self._content.pop(key, None)
        if value is None:
            return []
        listed = [value] if isinstance(value, str) else value
        if isinstance(listed, list) and all(isinstance(each, str) for each in listed):
            if opened := [each for each in listed if _left_open(each)]:
                self.refuse(key, f"{_shown(opened[0])} {_OPEN}")
            return listed
        self.refuse(key, f"{_shown(value)} is no text and no list of texts")
        return []

    def inner(self, key: str) -> "Fields":
        """Return the mapping at a key; an empty one where it is missing."""
        content: Mapping[str, object] = self.take(key, dict, {})
        return Fields(content, self.at(key), self._report, self._place_of(key))

    def items(self, key: str) -> Iterator["Fields"]:
        """Yield the mappings of the list at a key."""
        listed: Sequence[object] = self.take(key, list, [])
        for i, content in enumerate(listed):
            if isinstance(content, dict):
                yield Fields(content, f"{self.at(key)}[{i}]", self._report, self._place_of(key))
            else:
                self.refuse(key, f"[{i}] is {_shown(content)}, no mapping")

    def note(self, meanings: Mapping[str, str]) -> None:
        """Note keys, where they are set, that change no sample here, each with the reason."""
        for key, why in meanings.items():
            value = self._content.pop(key, None)
            # By equality, so that a 0 is none either: what is switched off changes nothing.
            if value not in (None, False, [], {}, ""):
                self._report.note(self.at(key), f"{_shown(value)} has no equivalent: {why}")

    def refuse(self, key: str, said: str) -> None:
        """Refuse what stands at a key."""
        self._report.refuse(self.at(key), said, self._place_of(key))

    def _place_of(self, key: str) -> Place | None:
        """Return where a key stands, or would stand."""
        return self._places.get(key, self._place)

    def refuse_if_set(self, meanings: Mapping[str, str]) -> None:
        """Refuse keys, where they are set, that would change samples and have no equivalent, each with the reason."""
        for key, why in meanings.items():
            value = self._content.pop(key, None)
            if value not in (None, False, [], {}, ""):
                self.refuse(key, f"{_shown(value)}: {why}; --leave-out {key} goes on without it")

    def note_unread(self) -> None:
        """Note the keys that are left of a file that says everything of a training, and not of its data alone."""
        if count := len(self._content):
            # Their values are not shown: they may be secrets.
            keys = ", ".join(_cut(key) for key in [*self._content][:_MOST_KEYS])
            if more := max(count - _MOST_KEYS, 0):
                keys += f" and {more} more {'key' if more == 1 else 'keys'}"
            were = "was" if count == 1 else "were"
            self._report.note("", f"{keys} of the training, and not of its data, {were} not read")

    def end(self) -> None:
        """Refuse the keys that nothing was done with: what they mean is not known here; a null says nothing."""
        for key in [key for key, value in self._content.items() if value is not None]:
            # Its value is not shown: it may be a secret.
            self.refuse(key, f"this key is not known; --leave-out {key} goes on without it")


def is_count(value: object) -> TypeIs[int]:
    """Tell whether a value is a whole number from 0 to what stands for a number with a fraction."""
    return type(value) is int and 0 <= value <= _LARGEST


_OPEN = "names no value of this file: write the value in its place"


def _left_open(text: str) -> bool:
    """Tell whether a text names something that is not in the file: an environment, a key that is missing."""
    return "${" in text


_KINDS: dict[type, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "truth",
    list: "list",
    dict: "mapping",
}


def _shown(value: object) -> str:
    # Before it is cut: half a secret would not be known as one.
    return _cut(without_secrets(repr(value)))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
