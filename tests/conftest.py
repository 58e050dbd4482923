"""Rules for every test: what unit tests may touch, how properties are searched, what must not be left behind."""

import gc
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from multiprocessing import spawn
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from omniload.base import secrets
from tests.lanes import LANES, keep_those_of, lane_of
from tests.support.ids import refuse_long, short_id
from tests.support.trainer import fork_server
from tests.support.warm_python import (
    COMMANDS,
    RANKS,
    WORKERS,
    WarmPopen,
    WarmPython,
    is_command,
    is_for_workers,
    is_process,
    is_script,
)

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
THOROUGH_S = 1_800
"""Limit of a property with as many examples, on a machine with other work. An example that a limit ends is one that
failed, to hypothesis: it is told of as a flaw of what is tested."""


def _refused(name):
    def refuse(*_args, **_kwargs):
        pytest.fail(f"a unit test called {name}; compute only, or move the test to integration")

    return refuse


def _allow_computing_alone(patch):
    """Fail a unit test that sleeps, connects anywhere or starts Ray."""
    patch.setattr(time, "sleep", _refused("time.sleep"))
    patch.setattr(socket.socket, "connect", _refused("socket.connect"))
    if "ray" in sys.modules:
        patch.setattr(sys.modules["ray"], "init", _refused("ray.init"))


@pytest.fixture(autouse=True)
def rules(request):
    """What holds of every test; one fixture, for each takes a part of a thousandth of a second of thousands of tests.

    A unit test computes alone. What other tests noted as secrets is forgotten: a password like ``secret`` would be
    taken out of this one's messages. The project's logger is put back: what a test sets up writes to a standard error
    that closes after it.
    """
    logger, is_unit = logging.getLogger("omniload"), request.path.is_relative_to(UNIT)
    kept = logger.handlers[:], logger.level, logger.propagate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "_noted", {})
        if is_unit:
            _allow_computing_alone(patch)
        yield
    logger.handlers[:], logger.propagate = kept[0], kept[2]
    if logger.level != kept[1]:  # to set it forgets which loggers are asked, of all there are
        logger.setLevel(kept[1])
    if is_unit and "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.fail("a unit test left Ray running")


@pytest.fixture
def project_logger(rules):
    """The project's logger, which is put back."""
    return logging.getLogger("omniload")


@pytest.fixture
def leaves_nothing_behind():
    """Fail a test that ends with more threads of ours or more child processes than it began with."""
    threads = set(threading.enumerate())
    children = set(psutil.Process().children(recursive=True))
    yield
    began = set(threading.enumerate()) - threads
    stray = [t for t in began if t.name.startswith("omniload-")]
    left = set(psutil.Process().children(recursive=True)) - children - _WARM.processes()
    # What was told to end may still be on its way out: for more than ten seconds where twenty want a core.
    _, alive = psutil.wait_procs(left, timeout=60)
    for thread in stray:
        thread.join(60)
    assert [thread.name for thread in stray if thread.is_alive()] == []
    assert [str(process) for process in alive] == []


class WarmPythons:
    """Those of a session, each started when it is first asked for; see ``tests/support/warm_python.py``."""

    def __init__(self):
        self.for_real = self.with_scripts = False
        self._started = {}
        self._ended = ExitStack()

    def of(self, modules):
        """Return the one that has loaded these."""
        if modules not in self._started:
            # Below /tmp: the path of a socket is short.
            folder = tempfile.TemporaryDirectory(prefix="warm", dir="/tmp")
            # Ranks open planes, and so do scripts: many of them, each with workers of its own.
            workers = self.of(WORKERS) if modules in (RANKS, COMMANDS) else None
            python = WarmPython(Path(self._ended.enter_context(folder)), modules, workers)
            self._started[modules] = self._ended.enter_context(python)
        return self._started[modules]

    def for_words(self, words):
        """Return the one for a command of ours, or a script where the test says so, unless it asks for more."""
        if self.for_real:
            return None
        if is_for_workers(words):
            return self.of(WORKERS)
        if is_process(words):
            return self.of(RANKS)
        if self.with_scripts and is_script(words):
            return self.of(COMMANDS)
        if not is_command(words):
            return None
        return self.of(RANKS if "train" in words else COMMANDS)

    def processes(self):
        """Return those that stay."""
        return {psutil.Process(python.pid) for python in self._started.values()}

    def end(self):
        self._started.clear()
        self._ended.close()


_WARM = WarmPythons()


class _PopenOfTests(WarmPopen):
    def __init__(self, *given, **named):
        super().__init__(*given, python_of=_WARM.for_words, **named)


@pytest.fixture(scope="session", autouse=True)
def commands_start_warm():
    """Fork commands, daemons and the fork server, but for commands of tests marked ``started_for_real``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _PopenOfTests)
        patch.setattr(fork_server, "python", lambda: _WARM.of(RANKS).path)
        yield
    _WARM.end()


@pytest.fixture(scope="session")
def warm_python(commands_start_warm):
    """A Python that has loaded what ranks need, for scripts of ranks; see ``tests/support/warm_python.py``."""
    return _WARM.of(RANKS)


@pytest.fixture
def spawns_warm(warm_python):
    """Fork what ``multiprocessing`` spawns; give the path of the Python, for processes that spawn others."""
    kept = spawn.get_executable()
    spawn.set_executable(warm_python.path)
    yield warm_python.path
    spawn.set_executable(kept)


@pytest.fixture(scope="session")
def warm_commands(commands_start_warm):
    """A Python that has loaded what commands need; see ``tests/support/warm_python.py``."""
    return _WARM.of(COMMANDS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Know before the fixtures of a module what the first of its tests says."""
    _WARM.for_real = item.get_closest_marker("started_for_real") is not None
    _WARM.with_scripts = item.get_closest_marker("scripts_start_warm") is not None
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among what stays, ever again: thousands of tests and all modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Tests load libraries too: to look through all of them again and again took a tenth of the time. And what one
        # test makes is looked through a few times, not dozens of times.
        gc.set_threshold(10_000, 10, 50)
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


def pytest_make_parametrize_id(val):
    """Name no test by a whole text."""
    return short_id(val)


def pytest_collection_modifyitems(config, items):
    if lane := config.getoption("lane"):
        keep_those_of(lane, items)
    refuse_long(items)
    if settings.get_current_profile_name() == "thorough":
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(THOROUGH_S))


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
