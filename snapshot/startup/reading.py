"""Reads the event files of many nodes. They come from anywhere, so every size is bounded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import orjson
from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from omniload.base.errors import ConfigError, StateError
from omniload.base.units import format_bytes
from snapshot.startup.events import LOG_VARIABLE, LONGEST_NAME, VERSION, StageEvent

__all__ = ["Log", "parse_event", "parse_events", "read_events"]

_HEAD = b'{"version":'
"""What a line of ours starts with. Inside a JSON text the quote would be escaped."""
_SUFFIX = ".jsonl"


_SHOWN = 120

MOST_FILES = 65536
MOST_LINE_BYTES = 64 << 10
MOST_BYTES = 1 << 30
MOST_EVENTS = 2_000_000
"""5000 nodes, 26 attempts, 7 stages come to 1.8 million."""


_Name = Annotated[str, StringConstraints(max_length=LONGEST_NAME)]
_Given = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME)]
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


@with_config(ConfigDict(extra="forbid", strict=True))
class _Line(TypedDict):
    """What a line may hold: it may come from anybody."""

    version: Literal[1]
    job: _Name
    node: _Given
    attempt: _Count
    stage: _Given
    event: Literal["begin", "end"]
    time_ns: _Count
    bytes: NotRequired[dict[Literal["memory", "disk", "peer", "store", "registry"], _Count]]
    run: NotRequired[_Name]
    facts: NotRequired[Annotated[dict[_Name, _Name], Field(max_length=16)]]


_LINE = TypeAdapter(_Line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """All events that were found."""

    events: tuple[StageEvent, ...]
    """In the order of the files and of the lines in each."""
    files: int
    torn: int
    """Lines that were cut short: their writer was killed, or its disk was full."""


def read_events(paths: Iterable[Path]) -> Log:
    """Read files, and the ``*.jsonl`` files at any depth of folders; each file once.

    Raises:
        ConfigError: A path is not there, no regular file, or a folder without such files.
        StateError: A line is no event or of another version, or there is more than is read.
    """
    events: list[StageEvent] = []
    torn = read_bytes = 0
    files = _files_of(paths)
    for path in files:
        data = _read(path, MOST_BYTES - read_bytes)
        read_bytes += len(data)
        found, cut = parse_events(data, str(path))
        events += found
        torn += cut
        if len(events) > MOST_EVENTS:
            raise StateError(
                f"{path} brings the events to {len(events)}, more than {MOST_EVENTS}; "
                "report on fewer attempts or nodes at once"
            )
    return Log(events=tuple(events), files=len(files), torn=torn)


def parse_event(line: str | bytes) -> StageEvent:
    """Read one line.

    Raises:
        StateError: It is no event, or of another version.
    """
    try:
        fields = orjson.loads(line)
        version = fields.get("version") if isinstance(fields, dict) else None
        if type(version) is int and version != VERSION:
            raise StateError(
                f"start-up event has version {version}, this code reads {VERSION}; "
                "read it with the release that wrote it"
            )
        checked: Any = _LINE.validate_python(fields)
        return StageEvent(**checked)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, fault['loc']))[:_SHOWN]}: {fault['msg']}"
        raise _no_event(line, why) from error
    except ValueError as error:
        raise _no_event(line, str(error)) from error


def _no_event(line: str | bytes, why: str) -> StateError:
    shown = repr(line[:_SHOWN]) + ("..." if len(line) > _SHOWN else "")
    return StateError(
        f"{shown} is no start-up event: {why}; expected a line as {LOG_VARIABLE} has it written"
    )


def parse_events(data: bytes, name: str) -> tuple[list[StageEvent], int]:
    """Read the lines of one file.

    A last line without an end may be cut short. A line with a whole event behind a cut one
    holds the cut line of a killed writer and what the next writer appended to it; the whole
    one counts.

    Args:
        data: The file.
        name: What errors call it.

    Returns:
        The events, and how many lines were cut.

    Raises:
        StateError: Another line is no event, is too long, or is of another version.
    """
    events: list[StageEvent] = []
    torn = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if len(line) > MOST_LINE_BYTES:
            raise StateError(
                f"{name}:{number}: line of {len(line)} bytes, longer than {MOST_LINE_BYTES}; "
                "it is no file of start-up events"
            )
        if (begin := line.rfind(_HEAD)) > 0:
            torn += 1
            line = line[begin:]  # noqa: PLW2901 -- what is whole of it
        if not line.strip():
            continue
        if number == len(lines) and not _is_json(line):
            torn += 1
            continue
        try:
            events.append(parse_event(line))
        except StateError as error:
            raise StateError(f"{name}:{number}: {error}") from error
    return events, torn


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except ValueError:
        return False
    return True


def _files_of(paths: Iterable[Path]) -> Sequence[Path]:
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            inside = [each for each in path.rglob(f"*{_SUFFIX}") if each.is_file()]
            if not inside:
                raise ConfigError(f"{path} holds no *{_SUFFIX} file; name the files themselves")
        elif path.is_file():
            inside = [path]
        else:
            raise ConfigError(f"{path} is no file and no folder; name files of start-up events")
        for each in sorted(inside):
            found.setdefault(each.resolve(), each)
        if len(found) > MOST_FILES:
            raise StateError(f"{path} brings the files to {len(found)}, more than {MOST_FILES}")
    return list(found.values())


def _read(path: Path, left_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(left_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > left_bytes:
        raise StateError(
            f"{path} brings the logs above {format_bytes(MOST_BYTES)}; "
            "report on fewer attempts or nodes at once"
        )
    return data
