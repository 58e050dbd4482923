"""Rules for every test: what unit tests may touch, how properties are searched, what must not be left behind."""

import gc
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from omniload.base import secrets
from tests.lanes import LANES, lane_of
from tests.support.warm_python import WarmPython

# Programs that tests start load hundreds of modules each: compiled once, not by every one of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Read when gRPC is loaded: as snapshot.engines has it, also where a test loads gRPC first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

TESTS = Path(__file__).parent
UNIT = TESTS / "unit"
# The same examples in every run: a change is refused for what it does, never for what was drawn.
settings.register_profile(
    "same",
    deadline=None,  # the machine is shared: time says nothing about the code
    derandomize=True,
    max_examples=16,
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


@pytest.fixture(scope="session")
def warm_python():
    """A Python that has loaded what ranks need, for scripts of ranks; see ``tests/support/warm_python.py``."""
    with (
        tempfile.TemporaryDirectory(prefix="warm", dir="/tmp") as folder,
        WarmPython(Path(folder)) as python,
    ):
        yield python


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among what stays, ever again: thousands of tests and all modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Tests load libraries too: to look through all of them again and again took a tenth of the time.
        gc.set_threshold(*gc.get_threshold()[:2], 50)
        gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--lane", choices=LANES, help="collect the tests of one lane alone; see tests/lanes.py"
    )


def pytest_ignore_collect(collection_path, config):
    """Leave a module of another lane unread: importing all of them takes each lane ten seconds."""
    lane = config.getoption("lane")
    if lane and collection_path.name.startswith("test_") and lane_of(collection_path) != lane:
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Write what is no text, such as a file name of any bytes, as escapes: reports are UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_sessionfinish(session, exitstatus):
    """Fail the run on CI where a real partner (a mount, HDFS, S3) was not tested: a skip is not a pass."""
    if not os.environ.get("CI") or exitstatus != pytest.ExitCode.OK:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", [])}
    if missed := sorted(reason for reason in skipped if "NOT TESTED" in reason):
        reporter.write_line(f"failed, because CI must not skip: {missed}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
