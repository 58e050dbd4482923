"""The two ways to start a job that ``benchmarks.startup.whole`` compares, and one start of either."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.startup.place import MAIN, environment
from benchmarks.startup.whole_job import FirstStep, first_step_of
from benchmarks.startup.whole_place import IMAGE_VARIABLES
from omniload.base.errors import StateError
from snapshot.startup.path import FIRST_STEP
from snapshot.startup.reading import parse_event

__all__ = ["Command", "Places", "Start", "begin", "ours", "plain"]

INSTALL = (
    "python -m pip install -q --no-cache-dir --disable-pip-version-check -r /job/requirements.txt"
)
_LOG_INSIDE = "/run/omniload/startup.jsonl"
_SAY = """
say() {
    printf '{"version":1,"job":"%s","node":"%s","attempt":0,"stage":"%s","event":"%s","time_ns":%s}\\n' \\
        "$OMNILOAD_JOB" "$OMNILOAD_NODE" "$1" "$2" "$(date +%s%N)" >> "$OMNILOAD_STARTUP_LOG"
}
"""
_PLAIN = (
    _SAY
    + """
say image begin
skopeo copy -q --src-tls-verify=false "docker://$1" "oci:$2/layout:v" >&2
umoci unpack --image "$2/layout:v" "$2/bundle" >&2
root=$2/bundle/rootfs
shift 2
log=$OMNILOAD_STARTUP_LOG
for bind in "$log:/run/omniload/startup.jsonl" $BINDS; do
    from=${bind%%:*}; to=${bind#*:}; to=$root${to%:ro}
    if [ -d "$from" ]; then mkdir -p "$to"; else mkdir -p "${to%/*}"; touch "$to"; fi
done
say image end
exec unshare --mount --pid --fork --kill-child=KILL --propagation=private -- sh -ec '
    mkdir -p "$0/proc" "$0/dev"
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    for bind in "$LOG:/run/omniload/startup.jsonl" $BINDS; do
        to=${bind#*:}
        mount --rbind "${bind%%:*}" "$0${to%:ro}"
    done
    exec chroot "$0" "$@"' "$root" /usr/bin/env -i "$@"
"""
)
_PLAIN_INSIDE = (
    _SAY
    + """
say environment begin
"""
    + INSTALL
    + """
say environment end
[ -z "$1" ] || python /job/fetch.py "$1" /node/checkpoints
exec python /job/job.py "$2"
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command by which a way starts the job."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    unmounts: bool
    """Whether it must clean up at the end; it is then asked to end instead of being killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The input of both ways."""

    node: Path
    """Folder of this machine, empty at a start."""
    job: Path
    """Folder with the job."""
    plain: str
    lazy: str
    """The image, as gzip and converted."""
    trace: Path | None
    """Trace of an earlier start on another node; None if the node knows nothing of the image."""
    snapshots: str
    """Store of environment snapshots."""
    checkpoint: str
    """URL that the plain way fetches its checkpoint from; empty for none."""
    variables: Mapping[str, str]
    """Variables for the job, inside."""
    binds: tuple[str, ...]
    """``HOST:PATH``, in addition to those of the job and the node."""

    @property
    def all_binds(self) -> tuple[str, ...]:
        """Everything of this machine that is visible inside, including ``/job`` and ``/node``."""
        return (f"{self.job}:/job", f"{self.node}:/node", *self.binds)


def plain(places: Places, log: Path, training: str) -> Command:
    """Return the script that pulls, unpacks, installs, fetches, and starts the job in its image."""
    inside = {**places.variables, "OMNILOAD_STARTUP_LOG": _LOG_INSIDE}
    given = [*IMAGE_VARIABLES, *(f"{key}={value}" for key, value in inside.items())]
    outside = _identity(log)
    given += [f"{name}={outside[name]}" for name in ("OMNILOAD_JOB", "OMNILOAD_NODE")]
    job = ("sh", "-ec", _PLAIN_INSIDE, "sh", places.checkpoint, f"/job/{training}")
    words = ["sh", "-ec", _PLAIN, "sh", places.plain, str(places.node), *given, *job]
    variables = {**environment(), **outside, "BINDS": " ".join(places.all_binds), "LOG": str(log)}
    return Command(words=tuple(words), variables=variables, unmounts=False)


def ours(places: Places, log: Path, training: str) -> Command:
    """Return the one command that brings image, environment and checkpoint as they are touched."""
    words = [sys.executable, "-c", MAIN, "image", "run", places.lazy]
    words += ["--option", f"cache={places.node}/image", "--log", f"{places.node}/image.log"]
    words += ["--trace", str(places.trace)] if places.trace else []
    words += [word for bind in places.all_binds for word in ("--bind", bind)]
    inside = {**places.variables, "OMNILOAD_ENV_CACHE": "/node/env"}
    words += [word for key, value in inside.items() for word in ("-e", f"{key}={value}")]
    words += ["--", "omniload", "env", "run", "--auto", "--install", INSTALL]
    words += ["-o", places.snapshots, "--", "python", "/job/job.py", f"/job/{training}"]
    variables = {**environment(), **_identity(log)}
    return Command(words=tuple(words), variables=variables, unmounts=True)


def _identity(log: Path) -> dict[str, str]:
    """Return the variables that a scheduler and the user set for a start."""
    known = {"OMNILOAD_JOB": "whole-startup", "OMNILOAD_NODE": "n1", "OMNILOAD_ATTEMPT": "0"}
    return {**known, "OMNILOAD_STARTUP_LOG": str(log)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start, from its command to the end of the first step."""

    wall_s: float
    cpu_s: float
    """Processor time of all its processes, until the first step."""
    wire_bytes: int
    """Bytes over the link, until the first step."""
    first: FirstStep


def begin(
    command: Command,
    log: Path,
    run_dir: Path,
    *,
    sent: Callable[[], int],
    limit_s: float = 600.0,
) -> Start:
    """Start a job, wait for its first step, and end it at once.

    Args:
        command: The command of one of the ways.
        log: Log of the start-up; the job's own log, empty so far.
        run_dir: Folder of the run, as this machine sees it.
        sent: Returns the bytes that came over the link so far.
        limit_s: Longest wait.

    Raises:
        RuntimeError: The job ended before its first step, or took too long.
    """
    output = log.with_suffix(".output")
    began_ns, at_first = time.time_ns(), sent()
    with output.open("wb") as told:
        process = subprocess.Popen(
            command.words, env=command.variables, stdout=told, stderr=told, start_new_session=True
        )
    try:
        ended_ns = _first_step_ns(process, log, limit_s)
        moved, cpu_s, first = sent() - at_first, _cpu_s(process.pid), None
        while first is None and process.poll() is None:
            first = first_step_of(run_dir)  # its line follows within milliseconds
        if ended_ns is None or first is None:
            text = output.read_text(errors="replace")[-4000:]
            raise RuntimeError(
                f"no first step: {command.words[:8]} ended with {process.poll()}:\n{text}"
            )
    finally:
        _end(process, unmounts=command.unmounts)
    wall_s = (ended_ns - began_ns) / 1e9
    return Start(wall_s=wall_s, cpu_s=cpu_s, wire_bytes=moved, first=first)


def _first_step_ns(process: "subprocess.Popen[bytes]", log: Path, limit_s: float) -> int | None:
    """Wait for the end of the first step in the log; return None if the process ends before it."""
    end_s, pause = time.monotonic() + limit_s, threading.Event()
    while time.monotonic() < end_s:
        gone = process.poll() is not None
        for line in log.read_bytes().splitlines() if log.exists() else ():
            with suppress(StateError):  # the line is half written at this moment
                event = parse_event(line)
                if (event.stage, event.event) == (FIRST_STEP, "end"):
                    return event.time_ns
        if gone:
            return None
        pause.wait(0.02)
    return None


def _end(process: "subprocess.Popen[bytes]", *, unmounts: bool) -> None:
    """End the job. The first signal is passed on to it, the second kills it; then its image is unmounted."""
    for wait_s in (0.2, 30) if unmounts else ():
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.send_signal(signal.SIGTERM)
            process.wait(wait_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and all below it, including those that have ended."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for each in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(each.cpu_times()[:4])  # its own, and its children's once they ended
    return total
