"""Begin and end of every stage of a start-up, one JSON line each.

With ``OMNILOAD_STARTUP_LOG`` set to a path, whoever carries out a stage appends there;
without it, nothing is written. A line::

    {"version":1,"job":"pretrain-7","node":"n01","attempt":0,"stage":"environment",
     "event":"end","time_ns":1795251600000000000,"bytes":{"disk":0,"store":155000000}}

A line is written in one call on a file opened for appending, so that the processes
of a node may share the file. ``bytes`` is empty in a ``begin``.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from omniload.base.errors import StateError
from omniload.base.log import get_logger

__all__ = ["LOG_VARIABLE", "TIERS", "VERSION", "StageEvent", "Tally", "parse_event", "stage"]

VERSION = 1
_LOG = get_logger(__name__)
LOG_VARIABLE = "OMNILOAD_STARTUP_LOG"
TIERS = ("memory", "disk", "peer", "store", "registry")
"""Where bytes may come from, nearest first."""

_JOB = ("OMNILOAD_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")
_NODE = ("OMNILOAD_NODE", "SLURMD_NODENAME")
_ATTEMPT = ("OMNILOAD_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvent:
    """One line of the log."""

    version: int = VERSION
    job: str
    """What the scheduler calls the job; empty where nothing says."""
    node: str
    attempt: int
    """Starts of the job before this one."""
    stage: str
    """What begins or ends: ``image``, ``environment``, ``checkpoint``."""
    event: Literal["begin", "end"]
    time_ns: int
    """Wall clock, nanoseconds since 1970: lines of several nodes meet in one timeline."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes moved in the stage, by tier."""

    def line(self) -> str:
        """Return the line, newline included."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


class Tally:
    """Counts the bytes of a stage while it runs."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        """Bytes so far, by tier."""

    def add(self, tier: str, size_bytes: int) -> None:
        """Count bytes that came from ``tier``.

        Raises:
            ValueError: There is no such tier.
        """
        if tier not in TIERS:
            raise ValueError(f"tier {tier!r} is not among {TIERS}")
        self.bytes[tier] = self.bytes.get(tier, 0) + size_bytes


@contextmanager
def stage(name: str, environment: Mapping[str, str] = os.environ) -> Iterator[Tally]:
    """Write a begin event, carry out the body, write an end event; also when the body fails.

    Args:
        name: The stage.
        environment: Where the log, the job, the node and the attempt are looked up.

    Yields:
        Takes the bytes that the stage moves.
    """
    tally, path = Tally(), environment.get(LOG_VARIABLE)
    if not path:
        yield tally
        return
    _append(path, _event(name, "begin", {}, environment))
    try:
        yield tally
    finally:
        _append(path, _event(name, "end", tally.bytes, environment))


def parse_event(line: str | bytes) -> StageEvent:
    """Read one line.

    Raises:
        StateError: It is no event, or of another version.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        version = fields["version"]
        if version != VERSION:
            raise StateError(
                f"start-up event has version {version!r}, this code reads {VERSION}; "
                "read it with the release that wrote it"
            )
        event = StageEvent(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"{line!r} is no start-up event: {error}; remove the line") from error
    if event.event not in {"begin", "end"} or not isinstance(event.time_ns, int):
        raise StateError(f"{line!r} is no start-up event; remove the line")
    return event


def _event(
    name: str, event: Literal["begin", "end"], moved: Mapping[str, int], known: Mapping[str, str]
) -> StageEvent:
    attempt = _first(known, _ATTEMPT)
    return StageEvent(
        job=_first(known, _JOB),
        node=_first(known, _NODE) or socket.gethostname(),
        attempt=int(attempt) if attempt.isdecimal() else 0,
        stage=name,
        event=event,
        time_ns=time.time_ns(),
        bytes=dict(moved),
    )


def _first(known: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((known[name] for name in names if known.get(name)), "")


def _append(path: str, event: StageEvent) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        # A report that cannot be written must not keep a job from starting.
        _LOG.warning("%s=%s: no start-up events: %s", LOG_VARIABLE, path, error.strerror)
        return
    try:
        os.write(file, event.line().encode())
    finally:
        os.close(file)
