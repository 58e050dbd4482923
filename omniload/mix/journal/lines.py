"""Lines of a journal: text, a tab, and a checksum that chains the line to the previous one.

The first line holds a base state. Each later line is either the record of a step, whose first key is ``step``, or a
*note*, whose first keys are ``kind`` and ``step`` and which applies from that step on. A note is another base, or the
*world* of ranks that steps are placed on, which may begin some steps before its line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import orjson
import xxhash

from omniload.base.errors import IntegrityError, StateError
from omniload.base.reading import open_file
from omniload.base.state import JsonObject, require_version, shown, whole_number
from omniload.base.units import format_bytes
from omniload.mix.journal.storage import START, JournalStorage, Since
from omniload.mix.state import COUNT_LIMIT

__all__ = [
    "BASE",
    "JOURNAL_VERSION",
    "LARGEST_LINE_BYTES",
    "WORLD",
    "JournalLine",
    "base_of",
    "chained",
    "first_line",
    "last_base",
    "line_of",
    "not_stored",
    "restarted",
    "since_of",
    "sound_lines",
]

JOURNAL_VERSION = 3
BASE = "base"
"""Kind of a note with a whole state; readers that need no earlier step start there."""
WORLD = "world"
"""Kind of a note that lists the ranks from its step on, until the next such note."""
LARGEST_LINE_BYTES = 1 << 28
"""Largest length of a line: a base of 5,000 sources, edits and carried pieces takes a hundredth of it."""
_VERSIONS = (2, JOURNAL_VERSION)
"""Versions that can be read. Version 2 had no notes, and is otherwise read in the same way."""
_KINDS = frozenset({BASE, WORLD})
# As orjson writes the first keys, so that the first bytes show the kind of a line without parsing.
_NOTE, _BASE_NOTE = b'{"kind":', b'\n{"kind":"base","step":'
_WORLD_NOTE = b'{"kind":"world",'
_BLOCK = 1 << 20
_DIGITS = 16
_BESIDE_TEXT = _DIGITS + 2
"""Length of a tab, the checksum and a newline."""


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One line of a journal."""

    text: bytes
    """A JSON object."""
    checksum: bytes
    """xxh64, in hexadecimal, of the previous line's checksum and ``text``."""

    def __bytes__(self) -> bytes:
        return self.text + b"\t" + self.checksum + b"\n"

    @property
    def is_note(self) -> bool:
        """Whether it is neither the record of a step nor the first line."""
        return self.text.startswith(_NOTE)

    @property
    def is_world(self) -> bool:
        """Whether it lists ranks."""
        return self.text.startswith(_WORLD_NOTE)

    @property
    def noted_step(self) -> int:
        """The step of a sound note."""
        step = self.parsed()["step"]
        assert isinstance(step, int), "a sound line"
        return step

    def parsed(self) -> JsonObject:
        """Return the object.

        Raises:
            IntegrityError: The text is not an object. The checksum does not exclude this, because it may be
                recomputed.
        """
        try:
            value = orjson.loads(self.text)
        except orjson.JSONDecodeError as error:
            raise _no_object(self.text, str(error)) from error
        if not isinstance(value, dict):
            raise _no_object(self.text, f"it is of type {type(value).__name__}")
        return value


def restarted(lines: Iterator[JournalLine]) -> Iterator[JournalLine]:
    """Yield the lines of a journal that begins with the base of the first of ``lines``."""
    base = next(lines)
    last = first_line(base_of(base)[0], str(base.parsed()["after"]))
    yield last
    for line in lines:
        # Each checksum includes the one before, so with another first line all checksums change.
        last = chained(line.text, last.checksum)
        yield last


def since_of(path: Path | JournalStorage) -> Since:
    """Return where a journal begins."""
    return START if isinstance(path, Path) else path.since()


def line_of(value: JsonObject, before: bytes) -> JournalLine:
    """Return the line of an object after a line with checksum ``before``; for the first line, this is ``b""``."""
    return chained(orjson.dumps(value), before)


def first_line(state: JsonObject, digest: str) -> JournalLine:
    """Return the first line of the journal of a run that begins with a state."""
    return line_of({"version": JOURNAL_VERSION, "base": state, "after": digest}, b"")


def chained(text: bytes, before: bytes) -> JournalLine:
    """Return the line of a text after a line with checksum ``before``.

    Raises:
        StateError: The line would be longer than any line that can be read.
    """
    if len(text) >= LARGEST_LINE_BYTES:
        raise StateError(
            f"a line of the journal would hold {format_bytes(len(text))}, more than the "
            f"{format_bytes(LARGEST_LINE_BYTES)} of any; begin a new run with fewer edits or sources"
        )
    return JournalLine(text, _checksum(before, text))


def base_of(line: JournalLine) -> tuple[JsonObject, int]:
    """Return the state in the line of a base, and its step.

    Raises:
        StateError: The line has another version, or no state.
        IntegrityError: The line does not hold an object.
    """
    value = line.parsed()
    if line.is_note:
        base = value.get("state")
    else:
        if value.get("version") not in _VERSIONS:
            require_version(value, JOURNAL_VERSION, of="journal")
        base = value.get("base")
    try:
        if isinstance(base, dict):
            return base, whole_number(base.get("step"), below=COUNT_LIMIT)
    except ValueError as error:
        raise StateError(
            f"the journal holds a state whose step is none: {error}; resume from a checkpoint"
        ) from error
    raise StateError(
        f"the journal has {line.text[:60]!r} where a state was due; resume from a checkpoint"
    )


def last_base(path: Path | JournalStorage, *, at_most: int) -> Since:
    """Return the last base at a step up to ``at_most``; the file is searched from its end.

    Raises:
        StateError: There is no journal.
    """
    begin = since_of(path)
    with _opened(path) as file:
        start = file.seek(0, 2)
        tail = b""
        while start > begin.offset:
            size = min(start - begin.offset, _BLOCK)
            start = file.seek(start - size)
            # The searched text, and the checksum before it, may lie across two blocks.
            tail = file.read(size) + tail[: len(_BASE_NOTE) + 2 * _DIGITS]
            at = len(tail)
            while (at := tail.rfind(_BASE_NOTE, 0, at)) >= 0:
                step = tail[at + len(_BASE_NOTE) : at + len(_BASE_NOTE) + _DIGITS].partition(b",")
                if (
                    step[0].isdigit()
                    and int(step[0]) <= at_most
                    and start + at >= begin.offset + _DIGITS
                ):
                    file.seek(start + at - _DIGITS)
                    before = file.read(_DIGITS + 1)[:-1]
                    # A base torn by a kill is skipped, and the one before it is taken.
                    if file.readline(LARGEST_LINE_BYTES + _BESIDE_TEXT + 1).endswith(b"\n"):
                        return Since(start + at + 1, before)
    return begin


def sound_lines(path: Path | JournalStorage, since: Since | None = None) -> Iterator[JournalLine]:
    """Yield a base and all later records and notes, in order, up to a line torn by a kill.

    Args:
        path: The file, or the folder of a store.
        since: Place of the base; by default where the journal begins.

    Raises:
        StateError: There is no journal, or it is empty or of another version, or a newer release noted something in it
            that this release does not know.
        IntegrityError: A line is damaged, missing or misplaced.
    """
    since = since_of(path) if since is None else since
    due, before, at, last = -1, since.before, since.offset, b""
    with _opened(path) as file:
        file.seek(since.offset)
        # One byte more than the longest valid line, so that a longer line is reported before it is held in memory.
        read = partial(file.readline, LARGEST_LINE_BYTES + _BESIDE_TEXT + 1)
        for number, line in enumerate(iter(read, b""), start=1):
            if len(line) > LARGEST_LINE_BYTES + _BESIDE_TEXT:
                raise IntegrityError(
                    f"{_place(path, since, number)}: the line has no end within "
                    f"{format_bytes(LARGEST_LINE_BYTES)}, as every line of ours has; resume from a checkpoint"
                )
            text, _, checksum = line.rstrip(b"\n").rpartition(b"\t")
            if _checksum(before, text) != checksum:
                # Without its end it was the last line as it was read, whatever was written since. A line with a hole,
                # as a power cut leaves it, is torn only if nothing follows it; anywhere else it is damaged.
                if not line.endswith(b"\n") or (not _is_json(text) and not file.read(1)):
                    break  # incomplete: its batch was never handed out
                if _reads_otherwise(path, at - len(last), last + line):
                    break  # steps were taken back meanwhile: up to here, this is the former content
                raise IntegrityError(
                    f"{_place(path, since, number)}: the line does not match its checksum {checksum[:16]!r}: it is "
                    "damaged, or a line before it is missing, moved or stands twice; resume from a checkpoint"
                )
            sound = JournalLine(text, checksum)
            if number == 1:
                due = base_of(sound)[1]
            # Judged by its first bytes, so that readers of the last steps do not parse the earlier lines.
            elif text.startswith(b'{"step":%d,' % due):
                due += 1
            elif sound.is_note:
                _require_note(sound, due, _place(path, since, number))
            else:
                raise IntegrityError(
                    f"{_place(path, since, number)}: the line is no record of step {due}, which is due: it starts "
                    f"{text[:24]!r}; resume from a checkpoint"
                )
            before, last, at = checksum, line, at + len(line)
            yield sound
    if due < 0:
        raise StateError(f"{path}: the journal is empty; resume from a checkpoint")


def _reads_otherwise(path: Path | JournalStorage, offset: int, content: bytes) -> bool:
    """Return whether the bytes from an offset on differ from those that were read a moment ago."""
    with _opened(path) as file:
        file.seek(offset)
        return file.read(len(content)) != content


def _require_note(line: JournalLine, due: int, place: str) -> None:
    note = line.parsed()
    kind, step = note.get("kind"), note.get("step")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise StateError(
            f"{place}: a note of kind {shown(kind)}, this release knows {', '.join(sorted(_KINDS))}; "
            "read the journal with the release that wrote it"
        )
    fits = type(step) is int and (0 <= step <= due if kind == WORLD else base_of(line)[1] == due)
    if not fits:
        raise IntegrityError(
            f"{place}: a note of step {shown(step)} where step {due} is due; resume from a checkpoint"
        )


def _place(path: Path | JournalStorage, since: Since, number: int) -> str:
    return f"{path}:{number}" + (f" from byte {since.offset}" if since.offset else "")


def _opened(path: Path | JournalStorage) -> BinaryIO:
    try:
        return open_file(path) if isinstance(path, Path) else path.opened()
    except FileNotFoundError:
        if not isinstance(path, Path):
            raise not_stored(path) from None
        raise StateError(
            f"{path}: no journal; give the folder of a run, or put its journal back"
        ) from None


def not_stored(place: Path | JournalStorage) -> StateError:
    """Return an error for a run whose journal is not on the store that its mix names."""
    return StateError(f"{place}: no journal where runtime.journal of the run has it; put it back")


def _no_object(text: bytes, reason: str) -> IntegrityError:
    return IntegrityError(
        f"a line of the journal that starts {text[:24]!r} is no object as we write it ({reason:.80}); "
        "resume from a checkpoint"
    )


def _checksum(before: bytes, text: bytes) -> bytes:
    # Detects damage, not malice. Fast, because opening a journal reads every byte of it.
    digest = xxhash.xxh64(before)
    digest.update(text)
    return digest.hexdigest().encode()


def _is_json(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
