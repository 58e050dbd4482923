"""Rules for every test: what unit tests may touch, how properties are searched, what must not be left behind."""

import gc
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from omniload.base import secrets

# Programs that tests start load hundreds of modules each: compiled once, not by every one of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Read when gRPC is loaded: as snapshot.engines has it, also where a test loads gRPC first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

TESTS = Path(__file__).parent
UNIT = TESTS / "unit"
COMPUTING = (UNIT, *(TESTS / name for name in ("house", "property", "mutants", "histories")))
"""Folders whose tests touch the machine only where a marker says so."""

LANES = {
    "packages": (
        *("distribution", "frameworks", "front_ranks", "external_launchers"),
        # They share one HDFS, but for those that kill its nodes.
        *("hdfs", "journal_stores", "token_cache_stores", "env/test_places"),
    ),
    "files": ("fusefs",),
    "trainer": ("trainer_integration",),
    "images": ("snapshot", "docs", "hosts"),
}
"""Words of the paths of a lane's tests, the first lane that has one; what has none goes to the lane ``jobs``.

As many as there are workers: what only computes fills in as lanes end. The end of a run says how long each took.
"""
REST = "jobs"
COMPUTES = "what computes"
"""Tests in no lane: a worker that has none of the lanes takes them, and others when their lane has ended.

A module at a time: its fixtures are made once, and 9,000 tests dealt one by one cost the process that deals them
4 s more of a processor. Workers begin with what has most tests, and no such module has as many as a lane.
"""

# The same examples in every run: a change is refused for what it does, never for what was drawn.
settings.register_profile(
    "same",
    deadline=None,  # the machine is shared: time says nothing about the code
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
# Other examples in every run, and many: `make soak`, or `pytest --hypothesis-profile=thorough`.
settings.register_profile(
    "thorough", settings.get_profile("same"), derandomize=False, max_examples=1000
)
settings.load_profile("same")


def _refused(name):
    def refuse(*_args, **_kwargs):
        pytest.fail(f"a unit test called {name}; compute only, or move the test to integration")

    return refuse


@pytest.fixture(autouse=True)
def unit_tests_only_compute(request, monkeypatch):
    """Fail a unit test that sleeps, connects anywhere or starts Ray."""
    if not request.path.is_relative_to(UNIT):
        yield
        return
    monkeypatch.setattr(time, "sleep", _refused("time.sleep"))
    monkeypatch.setattr(socket.socket, "connect", _refused("socket.connect"))
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", _refused("ray.init"))
    yield
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.fail("a unit test left Ray running")


@pytest.fixture(autouse=True)
def secrets_of_one_test_alone(monkeypatch):
    """Forget what other tests noted: a password like ``secret`` would be taken out of this one's messages."""
    monkeypatch.setattr(secrets, "_noted", {})


@pytest.fixture(autouse=True)
def project_logger():
    """The project's logger, put back: what a test sets up writes to a standard error that closes after it."""
    logger = logging.getLogger("omniload")
    kept = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.propagate = kept[0], kept[2]
    logger.setLevel(kept[1])


@pytest.fixture
def leaves_nothing_behind():
    """Fail a test that ends with more threads of ours or more child processes than it began with."""
    threads = set(threading.enumerate())
    children = set(psutil.Process().children(recursive=True))
    yield
    stray = [
        t.name
        for t in threading.enumerate()
        if t not in threads and t.name.startswith("omniload-") and t.is_alive()
    ]
    left = set(psutil.Process().children(recursive=True)) - children
    # A process that was told to end may still be on its way out.
    _, alive = psutil.wait_procs(left, timeout=10)
    assert stray == []
    assert [process.name() for process in alive] == []


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among what stays: ten thousand tests and all modules, by each worker and ever again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Before xdist's own, which reads the groups of the tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keep tests that start processes or mounts in a few lanes, one test of each at a time.

    They wait much: five side by side fill the cores of a small machine. More of them at once would
    compete for memory and make each other late.
    """
    for item in items:
        marked = any(item.get_closest_marker(name) for name in ("ray", "fuse", "slow"))
        computes = any(item.path.is_relative_to(folder) for folder in COMPUTING) and not marked
        group = str(item.path.relative_to(TESTS)) if computes else _lane(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session):
    """Refuse to run where xdist did not see the lanes: tests would disturb each other now and then."""
    if not session.config.getoption("loadgroup", False):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(
                f"{item.nodeid} is in no lane: this pytest-xdist cannot group tests with pytest "
                f"{pytest.__version__}; install the versions that pyproject.toml names"
            )


def _lane(path):
    place = str(path.relative_to(TESTS))
    return next((lane for lane, words in LANES.items() if any(w in place for w in words)), REST)


def pytest_terminal_summary(terminalreporter, config):
    """Say how long each lane took: the run takes as long as the longest of them."""
    if config.getoption("dist", "no") != "loadgroup":
        return
    took_s = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            _, _, lane = report.nodeid.rpartition("@")
            took_s[lane if lane in {*LANES, REST} else COMPUTES] += report.duration
    said = ", ".join(f"{lane} {seconds:.0f} s" for lane, seconds in took_s.most_common())
    terminalreporter.write_line(f"lanes: {said}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Write what is no text, such as a file name of any bytes, as escapes: workers send reports as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_sessionfinish(session, exitstatus):
    """Fail the run on CI where a real partner (a mount, HDFS, S3) was not tested: a skip is not a pass."""
    if not os.environ.get("CI") or exitstatus != pytest.ExitCode.OK:
        return
    if hasattr(
        session.config, "workerinput"
    ):  # the process that started the workers says it for all
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", [])}
    if missed := sorted(reason for reason in skipped if "NOT TESTED" in reason):
        reporter.write_line(f"failed, because CI must not skip: {missed}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
