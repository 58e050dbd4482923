"""Lines of a journal: text, a tab, and a checksum that chains the line to the one before it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from omniload.base.errors import IntegrityError, StateError
from omniload.base.reading import open_file
from omniload.base.state import JsonObject, require_version

__all__ = ["JOURNAL_VERSION", "JournalLine", "base_of", "line_of", "sound_lines"]

JOURNAL_VERSION = 2


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One line of a journal."""

    text: bytes
    """A JSON object."""
    checksum: bytes
    """xxh64, in hexadecimal, of the checksum of the line before and of ``text``."""

    def __bytes__(self) -> bytes:
        return self.text + b"\t" + self.checksum + b"\n"

    def parsed(self) -> JsonObject:
        """Return the object."""
        value: JsonObject = orjson.loads(self.text)
        return value


def line_of(value: JsonObject, before: bytes) -> JournalLine:
    """Return the line of an object that follows a line with checksum ``before``; the first follows ``b""``."""
    text = orjson.dumps(value)
    return JournalLine(text, _checksum(before, text))


def base_of(head: JournalLine) -> tuple[JsonObject, int]:
    """Return the base state in the first line of a journal, and its step.

    Raises:
        StateError: Another version, or no state.
    """
    value = head.parsed()
    require_version(value, JOURNAL_VERSION, of="journal")
    base = value.get("base")
    step = base.get("step") if isinstance(base, dict) else None
    if not isinstance(base, dict) or not isinstance(step, int):
        raise StateError(
            f"the journal starts from {base!r:.60}, which is no state; resume from a checkpoint"
        )
    return base, step


def sound_lines(path: Path) -> Iterator[JournalLine]:
    """Yield the base and the record of every step that follows, in order, up to a line torn by a kill.

    Raises:
        StateError: There is no journal, or it has another version, or it is empty.
        IntegrityError: A line is damaged, or missing, or where it does not belong.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        raise StateError(f"{path}: no journal; give the folder of a run") from None
    due, before = -1, b""
    with file:
        for number, line in enumerate(file, start=1):
            text, _, checksum = line.rstrip(b"\n").rpartition(b"\t")
            if _checksum(before, text) != checksum:
                if _is_torn(line, text) and not file.read(1):
                    break  # in mid-write; its batch was never handed out
                raise IntegrityError(
                    f"{path}:{number}: the line does not match its checksum {checksum[:16]!r}: it is damaged, or a "
                    "line before it is missing, moved or stands twice; resume from a checkpoint"
                )
            sound = JournalLine(text, checksum)
            if number == 1:
                due = base_of(sound)[1]
            elif text.startswith(b'{"step":%d,' % due):
                due += 1
            else:
                raise IntegrityError(
                    f"{path}:{number}: the line is no record of step {due}, which is due: it starts "
                    f"{text[:24]!r}; resume from a checkpoint"
                )
            before = checksum
            yield sound
    if due < 0:
        raise StateError(f"{path}: the journal is empty; resume from a checkpoint")


def _checksum(before: bytes, text: bytes) -> bytes:
    digest = xxhash.xxh64(before)
    digest.update(text)
    return digest.hexdigest().encode()


def _is_torn(line: bytes, text: bytes) -> bool:
    """Tell whether a last line was being written: its end is missing, or a power cut left a hole in it."""
    if not line.endswith(b"\n"):
        return True
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return True
    return False
