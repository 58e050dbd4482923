"""Begin and end of every stage of a start-up, one JSON line each.

With ``OMNILOAD_STARTUP_LOG`` set to a path, each process appends its stages there;
without it, nothing is written. A line::

    {"version":1,"job":"pretrain-7","node":"n01","attempt":0,"stage":"environment",
     "event":"end","time_ns":1795251600000000000,"bytes":{"disk":0,"store":155000000},
     "run":"8f14e45fceea167a","facts":{"packages":"sha256:9f86d0"}}

``bytes`` and ``facts`` are empty in a ``begin``. A script that writes its own lines may
leave out ``bytes``, ``run`` and ``facts``.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

from omniload.base.log import get_logger
from omniload.base.units import decimal_of

__all__ = [
    "LOG_VARIABLE",
    "LONGEST_NAME",
    "TIERS",
    "VERSION",
    "StageEvent",
    "Tally",
    "handed_down",
    "restarted",
    "stage",
]

VERSION = 1
_LOG = get_logger(__name__)
LOG_VARIABLE = "OMNILOAD_STARTUP_LOG"
TIERS = ("memory", "disk", "peer", "store", "registry")
"""Tiers that bytes may come from, nearest first."""

LONGEST_NAME = 256
_JOB = ("OMNILOAD_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")
_NODE = ("OMNILOAD_NODE", "SLURMD_NODENAME")
_ATTEMPT = ("OMNILOAD_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvent:
    """One line of the log."""

    version: int = VERSION
    job: str
    """Name of the job at the scheduler; empty if there is none."""
    node: str
    attempt: int
    """Number of starts of the job before this one."""
    stage: str
    """Stage that begins or ends: ``image``, ``environment``, ``checkpoint``."""
    event: Literal["begin", "end"]
    time_ns: int
    """Wall time, nanoseconds since 1970, so that lines of several nodes form one timeline."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes moved in the stage, by tier."""
    run: str = ""
    """Pairs an end with its begin if processes of a node run the same stage at the same time."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other facts known at the end: ``image`` and ``packages`` by digest, ``error`` of a failure."""

    def line(self) -> str:
        """Return the line, newline included."""
        # Use the standard library, because a process writes its first lines before it loads anything else.
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


class Tally:
    """Counts the bytes of a stage while it runs, and notes its inputs."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        """Bytes so far, by tier."""
        self.facts: dict[str, str] = {}
        """Facts for the end event, in addition to the bytes."""

    def add(self, tier: str, size_bytes: int) -> None:
        """Count bytes that came from ``tier``.

        Raises:
            ValueError: There is no such tier.
        """
        if tier not in TIERS:
            raise ValueError(f"tier {tier!r} is not among {TIERS}")
        self.bytes[tier] = self.bytes.get(tier, 0) + size_bytes

    def note(self, name: str, text: str) -> None:
        """Note an input of the stage: ``image`` or ``packages``, a digest; a long text is cut."""
        self.facts[name] = text[:LONGEST_NAME]


@contextmanager
def stage(name: str, environment: Mapping[str, str] = os.environ) -> Iterator[Tally]:
    """Write a begin event, run the body, which may count bytes, and write an end event, even if the body fails."""
    tally, path = Tally(), environment.get(LOG_VARIABLE)
    if not path:
        yield tally
        return
    run = secrets.token_hex(8)
    _append(path, _event(name, "begin", Tally(), run, environment))
    try:
        yield tally
    except BaseException as error:
        tally.note("error", type(error).__name__)
        raise
    finally:
        _append(path, _event(name, "end", tally, run, environment))


def handed_down(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which a process elsewhere writes lines of the same job, node and attempt."""
    # Include the node's name, because the host may have another name inside a container.
    known = {name: environment[name] for name in (*_JOB, *_NODE, *_ATTEMPT) if name in environment}
    return known | {_NODE[0]: _first(environment, _NODE) or socket.gethostname()}


def restarted(times: int, environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the environment of an attempt that comes ``times`` starts after the one that the scheduler counts."""
    return {**environment, _ATTEMPT[0]: str(_attempt(environment) + times)}


def _event(
    name: str, event: Literal["begin", "end"], tally: Tally, run: str, known: Mapping[str, str]
) -> StageEvent:
    return StageEvent(
        job=_first(known, _JOB),
        node=_first(known, _NODE) or socket.gethostname(),
        attempt=_attempt(known),
        stage=name,
        event=event,
        time_ns=time.time_ns(),
        bytes=dict(tally.bytes),
        run=run,
        facts=dict(tally.facts),
    )


def _attempt(known: Mapping[str, str]) -> int:
    text = _first(known, _ATTEMPT)
    return decimal_of(text) or 0


def _first(known: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((known[name] for name in names if known.get(name)), "")[:LONGEST_NAME]


def _append(path: str, event: StageEvent) -> None:
    # A report that cannot be written, or a pipe without a reader, must not keep a job from starting.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o644)
        try:
            # In one call on a file opened for appending, so that the processes of a node may share the file.
            os.write(file, event.line().encode())
        finally:
            os.close(file)
    except OSError as error:
        _LOG.warning("%s=%s: no start-up events: %s", LOG_VARIABLE, path, error.strerror)
