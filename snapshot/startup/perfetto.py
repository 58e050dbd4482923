"""A start-up as Chrome trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing draw.

One process of the trace is one node, one thread of it a lane in which no two runs overlap.
Process 0 is the critical path.

Source:
    "Trace Event Format", Google, 2016: complete events (``X``), metadata events (``M``).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from omniload.base.errors import ConfigError
from omniload.base.writing import write_whole
from snapshot.startup.attempts import BETWEEN, Attempt
from snapshot.startup.runs import Run

__all__ = ["trace_of", "write_trace"]

_PATH = 0
"""Process of the critical path."""
_NS_PER_US = 1e3


def write_trace(path: Path, attempt: Attempt) -> None:
    """Write the trace; it is there whole or not at all.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write_whole(path, orjson.dumps(trace_of(attempt)))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be written: {error.strerror}") from error


def trace_of(attempt: Attempt) -> dict[str, Any]:
    """Return the document: microseconds since the begin of the attempt; a run without an end lasts to the last line.

    The arguments of an event are the run's bytes by tier and its facts.
    """
    events = [_named(_PATH, "critical path")]
    for part in attempt.path:
        args: dict[str, Any] = {"node": part.node}
        events.append(
            _event(attempt, part.stage or BETWEEN, (_PATH, 0), (part.begin_ns, part.end_ns), args)
        )
    for process, node in enumerate(attempt.nodes, start=1):
        events.append(_named(process, node))
        for lane, stage, run in _lanes(attempt, node):
            args = {"bytes": dict(run.bytes), **run.facts}
            if run.end_ns is None:
                args["unfinished"] = "true"
            span = (run.begin_ns, max(run.begin_ns, _last_ns(attempt, run)))
            events.append(_event(attempt, stage, (process, lane), span, args))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"job": attempt.job, "attempt": str(attempt.number)},
        "traceEvents": events,
    }


def _lanes(attempt: Attempt, node: str) -> Iterator[tuple[int, str, Run]]:
    """Yield the runs of a node in order of their begin, each in the first lane that is free by then."""
    runs = [
        (run.begin_ns, stage.name, run)
        for stage in attempt.stages
        for each in stage.nodes
        if each.node == node
        for run in each.runs
    ]
    free_ns: list[int] = []
    for begin_ns, stage, run in sorted(runs, key=lambda found: found[:2]):
        lane = next((i for i, end_ns in enumerate(free_ns) if end_ns <= begin_ns), len(free_ns))
        free_ns[lane : lane + 1] = [max(_last_ns(attempt, run), begin_ns)]
        yield lane, stage, run


def _last_ns(attempt: Attempt, run: Run) -> int:
    return attempt.end_ns if run.end_ns is None else run.end_ns


def _event(
    attempt: Attempt, name: str, place: tuple[int, int], span: tuple[int, int], args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": place[0],
        "tid": place[1],
        "ts": (span[0] - attempt.begin_ns) / _NS_PER_US,
        "dur": (span[1] - span[0]) / _NS_PER_US,
        "args": args,
    }


def _named(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
