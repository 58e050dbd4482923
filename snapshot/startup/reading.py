"""Event files of many nodes, read and paired into runs. They come from anywhere, so every size is limited."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import orjson
from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from omniload.base.errors import ConfigError, StateError
from omniload.base.units import format_bytes
from snapshot.startup.events import LOG_VARIABLE, LONGEST_NAME, VERSION, StageEvent

__all__ = [
    "Joined",
    "Log",
    "Run",
    "parse_event",
    "parse_events",
    "read_events",
    "runs_of",
    "spans_of",
]

_HEAD = b'{"version":'
"""First bytes of one of our lines. Inside a JSON text the quote would be escaped."""
_SUFFIX = ".jsonl"
_SHOWN = 120

MOST_FILES = 65536
MOST_LINE_BYTES = 64 << 10
MOST_BYTES = 1 << 30
MOST_EVENTS = 2_000_000
"""Most events; 5000 nodes with 26 attempts and 7 stages make 1.8 million."""

_Name = Annotated[str, StringConstraints(max_length=LONGEST_NAME)]
_Given = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME)]
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


@with_config(ConfigDict(extra="forbid", strict=True))
class _Line(TypedDict):
    """The fields of a line, which may come from anybody."""

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
    """Events in the order of the files, and of the lines in each file."""
    torn: int
    """Number of lines that were cut short: their writer was killed, or its disk was full."""


def read_events(paths: Iterable[Path]) -> Log:
    """Read files, and the ``*.jsonl`` files at any depth of folders; each file once.

    Raises:
        ConfigError: A path does not exist, is no regular file, or is a folder without such files.
        StateError: A line is no event or of another version, or there is more than the limit.
    """
    events: list[StageEvent] = []
    torn = read_bytes = 0
    for path in _files_of(paths):
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
    return Log(events=tuple(events), torn=torn)


def parse_event(line: str | bytes) -> StageEvent:
    """Read one line.

    Raises:
        StateError: It is no event, or of another version.
    """
    try:
        checked: Any = _LINE.validate_json(line)
        return StageEvent(**checked)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        if fault["loc"] == ("version",) and type(fault["input"]) is int:
            raise StateError(
                f"start-up event has version {fault['input']}, this code reads {VERSION}; "
                "read it with the release that wrote it"
            ) from error
        why = f"{'.'.join(map(str, fault['loc']))[:_SHOWN]}: {fault['msg']}"
        shown = repr(line[:_SHOWN]) + ("..." if len(line) > _SHOWN else "")
        raise StateError(
            f"{shown} is no start-up event: {why}; expected a line as {LOG_VARIABLE} has it written"
        ) from error


def parse_events(data: bytes, name: str) -> tuple[list[StageEvent], int]:
    """Read the lines of one file.

    Returns:
        The events, and the number of cut lines.

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
        # This is the cut line of a killed writer, with the next writer's line appended: the complete part counts.
        if (begin := line.rfind(_HEAD)) > 0:
            torn += 1
            line = line[begin:]  # noqa: PLW2901 -- what is whole of it
        if not line.strip():
            continue
        # Only the last line, which has no newline, may be cut short, because its writer may still be writing it.
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
            # A folder may link to a file that is also named: its lines would count twice.
            found.setdefault(each.resolve(), each)
        if len(found) > MOST_FILES:
            raise StateError(f"{path} brings the files to {len(found)}, more than {MOST_FILES}")
    return list(found.values())


def _read(path: Path, left_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            # Read one byte more than is left, because a file may grow during the read, so its size is not reliable.
            data = file.read(left_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > left_bytes:
        raise StateError(
            f"{path} brings the logs above {format_bytes(MOST_BYTES)}; "
            "report on fewer attempts or nodes at once"
        )
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a stage by one process."""

    begin_ns: int
    end_ns: int | None
    """End of the run; ``None`` if none was written: it is under way, or its process was killed."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


class Joined(NamedTuple):
    """The runs of one attempt, and the counts of its invalid lines."""

    runs: dict[tuple[str, str], list[Run]]
    """Runs by node and stage, at least one each, in order of their begin."""
    strays: int
    """Number of ends without a begin before them."""
    backward: int
    """Number of runs whose end was before their begin; they end when they begin."""


def runs_of(events: Iterable[StageEvent]) -> Joined:
    """Pair the events of one attempt."""
    grouped: defaultdict[tuple[str, str, str], list[StageEvent]] = defaultdict(list)
    for event in events:
        grouped[event.node, event.stage, event.run].append(event)
    runs: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    strays = backward = 0
    for (node, stage, run), lines in grouped.items():
        # Events with a ``run`` are in order, because one process writes them into one file. Those without are paired
        # first to first; however they belong together, the time in which any run was under way is the same.
        if not run:
            # At the same moment, put the begin first, because a stage may take no time.
            lines.sort(key=lambda line: (line.time_ns, line.event))
        paired, unpaired, turned = _paired(lines)
        if paired:
            runs[node, stage] += paired
        strays += unpaired
        backward += turned
    for each in runs.values():
        each.sort(key=lambda run: run.begin_ns)
    return Joined(dict(runs), strays, backward)


def _paired(lines: Iterable[StageEvent]) -> tuple[list[Run], int, int]:
    """Return the runs, the ends without a begin, and the runs that end before they begin."""
    begins: list[int] = []
    ended = strays = backward = 0
    runs: list[Run] = []
    for line in lines:
        time_ns = line.time_ns
        if line.event == "begin":
            begins.append(time_ns)
            continue
        # An end without a begin: the log began in the middle, or its head was cut off.
        if ended == len(begins):
            strays += 1
            continue
        begin_ns, ended = begins[ended], ended + 1
        backward += time_ns < begin_ns
        runs.append(
            Run(
                begin_ns=begin_ns,
                end_ns=max(begin_ns, time_ns),
                bytes=line.bytes,
                facts=line.facts,
            )
        )
    runs += (Run(begin_ns=begin_ns, end_ns=None) for begin_ns in begins[ended:])
    return runs, strays, backward


def spans_of(runs: Iterable[Run], last_ns: int | None = None) -> list[tuple[int, int]]:
    """Return the spans in which at least one run was under way, in order and disjoint.

    Args:
        runs: Runs in any order.
        last_ns: End for runs that have none; ``None`` leaves them out.
    """
    ended = ((run.begin_ns, last_ns if run.end_ns is None else run.end_ns) for run in runs)
    spans: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for begin, end in ended if end is not None):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
    return spans
