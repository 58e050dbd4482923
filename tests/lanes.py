"""Run the suite in lanes: a process of pytest each, side by side, which collects its own tests alone.

Tests that start processes or mounts wait much, so several lanes fill a small machine; two of one lane at once would
compete for memory, for the one HDFS, and make each other late. What only computes runs behind the others, on what
they leave. Any option of pytest is handed on:

    python -m tests.lanes -m "not soak"
    python -m tests.lanes tests/property --hypothesis-profile=thorough
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parent
LATE_S = 10.0
"""For what a lane said last: a process that a test left behind may hold its output open for ever."""
BEHIND = 5
"""Niceness of what only computes."""
COMPUTING = {
    # What imports torch, or everything, is together.
    "units": (
        *("unit", "house", "mutants", "property/trainer_integration"),
        # It looks at the trees of all modules, which the house's rules have parsed.
        "docs/test_docs_messages.py",
    ),
    # As much as the others, in processor seconds: the last of two leaves a core without work.
    "properties": ("property", "histories", "unit/snapshot"),
}
"""Lanes of whole folders, or of one file, whose tests touch the machine only where a marker says so; the innermost
folder decides."""
WAITING = {
    "packages": (
        *("distribution", "frameworks"),
        # They share one HDFS, but for those that kill its nodes.
        *("hdfs", "journal_stores", "cache_stores", "format_stores", "env/test_places"),
        # One of them has a client of HDFS, the other needs the same S3.
        *("source/test_silent_stores", "source/test_stores"),
    ),
    # What imports torch, which takes a lane two seconds.
    "trainer": (
        *("trainer_integration", "integration/benchmarks", "chat_images"),
        *("front_rendezvous", "front_ranks"),
        # Pages run in the process of the lane, and their scripts are forked where ranks are.
        *("docs_snippets", "docs_torchrun"),
    ),
    # The faults and contracts of planes, which would hold up the last lane: this one ends before the others.
    "files": ("fusefs", "contract/omniload", "faults/omniload"),
    # Commands, and what lies below all else: by half a minute of a processor the lanes end closer together.
    "images": ("snapshot", "docs", "integration/omniload/base", "integration/omniload/commands"),
    "jobs": ("",),
}
"""Words of the paths of a lane's tests; a path is of the first lane that has a word of it."""
LANES = (*WAITING, *COMPUTING)

_FAILED = re.compile(r"^(FAILED|ERROR|XPASS) ")


def lane_of(path: Path) -> str:
    """Return the lane of a test file."""
    place = path.relative_to(TESTS)
    inside = [
        (len(folder), lane)
        for lane, folders in COMPUTING.items()
        for folder in folders
        if place.is_relative_to(folder)
    ]
    if inside:
        return max(inside)[1]
    return next(
        lane for lane, words in WAITING.items() if any(word in str(place) for word in words)
    )


def keep_those_of(lane: str, items: list[pytest.Item]) -> None:
    """Leave out tests of other lanes: a file that is named on the command line is collected by every lane."""
    lanes = {path: lane_of(path) for path in {item.path for item in items}}
    items[:] = [item for item in items if lanes[item.path] == lane]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a lane, by those of who runs them."""
    # Lanes fill the cores; more threads would spin. Where nothing compiled is kept, each lane rewrites the asserts of
    # all plugins before it reads a test.
    return {
        "OMP_NUM_THREADS": "1",
        **{name: value for name, value in given.items() if name != "PYTHONDONTWRITEBYTECODE"},
    }


@dataclass
class Lane:
    """One process of pytest, and what it said."""

    name: str
    report: Path
    process: subprocess.Popen[str]
    started_s: float
    failed: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @classmethod
    def start(cls, name: str, folder: Path, options: list[str]) -> "Lane":
        report = folder / f"{name}.xml"
        # Each new folder is numbered by all that are there: of thousands, those of tests that failed stay.
        folders = ("-o", "tmp_path_retention_policy=failed") if name in COMPUTING else ()
        command = [
            *(sys.executable, "-m", "pytest", f"--lane={name}", f"--junitxml={report}"),
            *("-o", f"cache_dir=.pytest_cache/{name}", "-o", "junit_logging=no"),
            *folders,
            *options,
        ]
        if name in COMPUTING and (nice := shutil.which("nice")):
            command = [nice, "-n", str(BEHIND), *command]
        process = subprocess.Popen(
            command,
            cwd=TESTS.parent,
            env=environment(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return cls(name, report, process, time.monotonic())

    def follow(self, said: threading.Lock) -> None:
        """Print what the process says, with the lane before each line, until it has ended."""
        with self.process:
            for line in self.process.stdout or ():
                with said:
                    print(f"{self.name:>10} {line}", end="", flush=True)
                if _FAILED.match(line):
                    self.failed.append(line.rstrip())
        self.took_s = time.monotonic() - self.started_s

    def interrupt(self) -> None:
        """Have the process end its test, and all that this started, in order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    @property
    def ended_well(self) -> bool:
        return self.process.returncode in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}

    def counts(self) -> dict[str, int]:
        """Return how many tests there were, failed, erred and were skipped, by the report of pytest."""
        names = ("tests", "failures", "errors", "skipped")
        if not self.report.exists():
            return dict.fromkeys(names, 0)
        suite = ElementTree.parse(self.report).getroot().find("testsuite")
        return {name: int(suite.get(name, "0")) if suite is not None else 0 for name in names}


def run(options: list[str]) -> int:
    """Run all lanes with ``options`` of pytest and say how they ended; 0 where all ended well."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="omniload-lanes-") as folder:
        lanes = [Lane.start(name, Path(folder), options) for name in LANES]
        said = threading.Lock()
        threads = [
            threading.Thread(target=lane.follow, args=(said,), daemon=True) for lane in lanes
        ]
        for thread in threads:
            thread.start()
        # A terminal interrupts the lanes too; they end what they started and say what failed.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: [lane.interrupt() for lane in lanes])
        for lane, thread in zip(lanes, threads, strict=True):
            lane.process.wait()  # a test ends by its own limit
            thread.join(LATE_S)
        counts = {lane.name: lane.counts() for lane in lanes}
    for lane in lanes:
        of_lane = ", ".join(f"{count} {what}" for what, count in counts[lane.name].items() if count)
        end = "" if lane.ended_well else f", ended with {lane.process.returncode}"
        print(f"{lane.name:>10} {lane.took_s:6.0f} s: {of_lane or 'no tests'}{end}")
    for line in [line for lane in lanes for line in lane.failed]:
        print(line)
    total = sum(of_lane["tests"] for of_lane in counts.values())
    bad = [lane.name for lane in lanes if not lane.ended_well]
    verdict = f"lanes that failed: {', '.join(bad)}" if bad else "all lanes passed"
    print(f"{total} tests in {time.monotonic() - started_s:.0f} s; {verdict}")
    if not total:
        print("no test was collected: the options fit none", file=sys.stderr)
    return 1 if bad or not total else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # progress as it is made, not by the block
    sys.exit(run(sys.argv[1:]))
