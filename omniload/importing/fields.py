"""The keys of another tool's file: each key is read, noted as having no equivalent, or refused."""

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
"""Number of characters of a value that a message shows."""
_LARGEST = 1 << 53
"""Largest whole number that is accepted as a number with a fraction."""
_GROUPED = re.compile("[1-9][0-9]*(_[0-9]+)+")
"""A whole number with separators, such as ``100_000``: a number in YAML 1.1, which other tools read, but a text in
YAML 1.2."""
_MOST_KEYS = 5
"""Number of keys that a note names."""
_MOST_FAULTS = 50
"""Number of faults that a message lists."""


@dataclass(slots=True)
class Report:
    """Findings of an import: faults, which refuse it, and notes for the user."""

    left_out: frozenset[str] = frozenset()
    """Keys that the user chose to leave out."""
    notes: list[str] = field(default_factory=list)
    faults: list[tuple[str, bool]] = field(default_factory=list)
    """Text of each fault, and whether the text names the file."""

    def note(self, where: str, said: str) -> None:
        """Note something without an equivalent that changes no sample, or an assumption; repetitions are noted once."""
        line = f"{where}: {said}" if where else said
        if line not in self.notes:
            self.notes.append(line)

    def refuse(self, where: str, said: str, place: Place | None = None) -> None:
        """Refuse the import after everything has been read; a repeated fault counts once.

        Args:
            where: The key.
            said: What is wrong with it.
            place: Place of the key, if it is known.
        """
        line = f"{where}: {said}" if where else said
        if place is not None:
            file, number = place
            # The key of a nested file begins with the file's name, which already stands in front of the line.
            line = f"{file}:{number}: {line.removeprefix(f'{file}.')}"
        if (line, place is not None) not in self.faults:
            self.faults.append((line, place is not None))

    def raise_faults(self, name: str) -> None:
        """Refuse the file called ``name`` if there was a fault.

        Raises:
            ConfigError: There are faults; the message lists all of them.
        """
        if self.faults:
            shown = [said if placed else f"{name}: {said}" for said, placed in self.faults]
            if (more := len(shown) - _MOST_FAULTS) > 0:
                shown[_MOST_FAULTS:] = [f"{name}: and {more} more"]
            raise ConfigError("\n".join(shown))


class Fields:
    """One mapping of the file, and which of its keys are still unread."""

    def __init__(
        self,
        content: Mapping[str, object],
        where: str,
        report: Report,
        above: Place | None = None,
    ) -> None:
        """Read ``content``, the mapping at the key ``where``; an empty ``where`` means the whole file.

        Args:
            content: The mapping; a ``Lined`` one knows its place.
            where: Its key.
            report: Report for the findings of the import.
            above: Place of the outer mapping, for a mapping that is missing in it.
        """
        self._content, self._where, self._report = dict(content), where, report
        self._place = content.place if isinstance(content, Lined) else above
        self._places = content.places if isinstance(content, Lined) else {}
        for key in [key for key in self._content if key in report.left_out]:
            # Treated as missing, so that it gets its default when it is read later.
            del self._content[key]
            report.note(self.at(key), "was left out, as asked")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that are still unread."""
        return tuple(self._content)

    def at(self, key: str | int) -> str:
        """Return the full name of a key in the file."""
        name = f"[{key}]" if isinstance(key, int) else key
        return f"{self._where}.{name}".replace(".[", "[") if self._where else name

    def take(self, key: str, kind: type[Value], default: Value) -> Value:
        """Return the value of a key, or ``default`` if it is missing or null."""
        value = self._content.pop(key, None)
        if value is None:
            return default
        if isinstance(value, str) and kind in (int, float) and _GROUPED.fullmatch(value):
            value = int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            # A larger number has no exact float, or no float at all. It stays an integer and is refused as not a
            # number.
            value = float(value) if abs(value) <= _LARGEST else value
        if isinstance(value, str) and _left_open(value):
            self.refuse(key, f"{_shown(value)} {_OPEN}")
            return default
        # ``True`` is an integer in Python, and an object like everything else.
        truth = isinstance(value, bool) and kind not in (bool, object)
        if not isinstance(value, kind) or truth:
            self.refuse(key, f"{_shown(value)} is no {_KINDS.get(kind, kind.__name__)}")
            return default
        return value

    def peek(self, key: str) -> object:
        """Return the value of a key as it is, and leave the key unread."""
        return self._content.get(key)

    def need(self, key: str, kind: type[Value], default: Value) -> Value:
        """Return the value of a required key; after a fault, reading continues with ``default``."""
        if self._content.get(key) is None:
            self.refuse(key, "is missing")
        return self.take(key, kind, default)

    def number(self, key: str, *, least: float = 0.0) -> float | None:
        """Return a number of at least ``least``; None if it is missing."""
        if self._content.get(key) is None:
            self._content.pop(key, None)
            return None
        value = self.take(key, float, least)
        if not least <= value < float("inf"):
            self.refuse(key, f"is {value}; it is a number from {least:g} on")
            return least
        return value

    def numbers(self, key: str, count: int) -> list[float] | None:
        """Return a list of ``count`` numbers of at least 0; None, with a fault, for anything else."""
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
        """Return a text or a list of texts as a list; empty if it is missing."""
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
        """Return the mapping at a key; an empty one if it is missing."""
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
        """Note keys, if they are set, that change no sample here, each with the reason."""
        for key, why in meanings.items():
            value = self._content.pop(key, None)
            # Compared by equality, so that 0 counts as False: a setting that is switched off changes nothing.
            if value not in (None, False, [], {}, ""):
                self._report.note(self.at(key), f"{_shown(value)} has no equivalent: {why}")

    def refuse(self, key: str, said: str) -> None:
        """Refuse the value of a key."""
        self._report.refuse(self.at(key), said, self._place_of(key))

    def _place_of(self, key: str) -> Place | None:
        """Return the place of a key, or the place where it is missing."""
        return self._places.get(key, self._place)

    def refuse_if_set(self, meanings: Mapping[str, str]) -> None:
        """Refuse keys, if they are set, that would change samples and have no equivalent, each with the reason."""
        for key, why in meanings.items():
            value = self._content.pop(key, None)
            if value not in (None, False, [], {}, ""):
                self.refuse(key, f"{_shown(value)}: {why}; --leave-out {key} goes on without it")

    def note_unread(self) -> None:
        """Note the unread keys of a file that describes a whole training and not only its data."""
        if count := len(self._content):
            # Their values are not shown, because they may be secrets.
            keys = ", ".join(_cut(key) for key in [*self._content][:_MOST_KEYS])
            if more := max(count - _MOST_KEYS, 0):
                keys += f" and {more} more {'key' if more == 1 else 'keys'}"
            were = "was" if count == 1 else "were"
            self._report.note("", f"{keys} of the training, and not of its data, {were} not read")

    def end(self) -> None:
        """Refuse unread keys, because their meaning is not known here; keys with null are ignored."""
        for key in [key for key, value in self._content.items() if value is not None]:
            # Its value is not shown, because it may be a secret.
            self.refuse(key, f"this key is not known; --leave-out {key} goes on without it")


def is_count(value: object) -> TypeIs[int]:
    """Return whether a value is a whole number from 0 to the largest that is accepted as a number with a fraction."""
    return type(value) is int and 0 <= value <= _LARGEST


_OPEN = "names no value of this file: write the value in its place"


def _left_open(text: str) -> bool:
    """Return whether a text refers to something outside the file, such as an environment variable or a missing key."""
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
    # Before cutting, because half a secret would not be recognized.
    return _cut(without_secrets(repr(value)))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
