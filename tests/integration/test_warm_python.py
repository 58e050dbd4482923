"""What is forked from a warm process is, as far as it can tell itself and others can, what is started for real."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.warm_python import WarmPopen, WarmPython, is_command, is_process

ROOT = str(Path(__file__).parents[2])
TOLD = """
import json, os, resource, sys, threading
def of(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return file.read().decode()
kept = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Threads", "Uid", "Gid", "Groups", "CapEff", "Name", "TracerPid")
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "variables": dict(os.environ),
    "standard input": sys.stdin.read(),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    "parent": os.getppid(),
    "session is mine": os.getsid(0) == os.getpid(),
    "group is mine": os.getpgid(0) == os.getpid(),
    "status": [line for line in of("status").splitlines() if line.startswith(kept)],
    "limits": of("limits"),
    "command line": of("cmdline"),
    "what it began with": of("environ"),
    "threads": [thread.name for thread in threading.enumerate()],
    "main": sys.modules["__main__"].__name__,
}), flush=True)
print("fault", file=sys.stderr)
"""


def warm(python):
    """Return what starts programs that are forked from this Python where they may be."""
    return partial(WarmPopen, python_of=lambda _: python)


@pytest.fixture(params=["for real", "warm"])
def started(request, warm_commands):
    return subprocess.Popen if request.param == "for real" else warm(warm_commands)


def told(started, code=TOLD, **given):
    """Start a program that tells about itself; return that, what it said beside, and how it ended."""
    files = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with started(
        [sys.executable, "-c", code, "a word", "é"], text=True, **files, **given
    ) as process:
        assert process.is_forked == (started is not subprocess.Popen)
        out, fault = process.communicate("what it is given", timeout=60)
    return json.loads(out), fault, process.returncode


@pytest.mark.parametrize("given", [{}, {"start_new_session": True}, {"process_group": 0}], ids=str)
def test_a_forked_program_is_what_one_that_is_started_for_real_is(warm_commands, tmp_path, given):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)  # and is closed all the same
    given |= {"pass_fds": [reading], "cwd": tmp_path, "env": os.environ | {"ONE": "of\nits own"}}
    try:
        for_real = told(subprocess.Popen, **given)
        forked = told(warm(warm_commands), **given)
    finally:
        os.close(reading)
        os.close(writing)

    assert forked[0] == for_real[0]
    assert forked[1:] == for_real[1:]
    assert for_real[0]["parent"] == os.getpid()
    assert reading in for_real[0]["files"]
    assert writing not in for_real[0]["files"]


@pytest.mark.parametrize(
    "folders", [{}, {"PYTHONPATH": ROOT}, {"PYTHONPATH": f"{ROOT}:{ROOT}"}], ids=str
)
def test_it_looks_for_modules_where_one_that_is_started_for_real_does(warm_commands, folders):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    forked, _, _ = told(warm(warm_commands), env=variables | folders)
    for_real, _, _ = told(subprocess.Popen, env=variables | folders)

    assert forked["path"] == for_real["path"]


def test_limits_are_those_of_who_starts_it(warm_commands):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        forked, _, _ = told(warm(warm_commands))
        for_real, _, _ = told(subprocess.Popen)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert forked["limits"] == for_real["limits"]
    assert str(soft - 1) in forked["limits"]


def test_signals_that_its_starter_blocks_are_blocked(warm_commands):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGQUIT])
    try:
        forked, _, _ = told(warm(warm_commands))
        for_real, _, _ = told(subprocess.Popen)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGQUIT])

    assert forked["status"] == for_real["status"]
    assert any(line.split() == ["SigBlk:", f"{1 << 2:016x}"] for line in forked["status"])


@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGXFSZ])
def test_signals_that_every_python_ignores_are_ignored_where_its_starter_handles_them(
    warm_commands, number
):
    kept = signal.signal(number, lambda *_: None)
    try:
        forked, _, _ = told(warm(warm_commands))
        for_real, _, _ = told(subprocess.Popen)
    finally:
        signal.signal(number, kept)

    assert forked["status"] == for_real["status"]


def test_temporary_files_of_a_fork_lie_where_its_variables_say(warm_python, tmp_path):
    words = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
    variables = os.environ | {"TMPDIR": str(tmp_path)}

    with warm(warm_python)(words, env=variables, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()

    assert process.is_forked
    assert said.strip() == str(tmp_path)


def test_what_is_read_as_hdfs_is_first_asked_for_reaches_a_fork(warm_commands):
    variables = os.environ | {"ARROW_LIBHDFS_DIR": "/of/hadoop"}

    forked, _, _ = told(warm(warm_commands), env=variables)

    assert forked["variables"]["ARROW_LIBHDFS_DIR"] == "/of/hadoop"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_signal_that_its_starter_ignores_is_heeded_by_one_that_is_started_for_real(
    warm_commands, number
):
    kept = signal.signal(number, signal.SIG_IGN)
    try:
        with warm(warm_commands)([sys.executable, "-c", ""]) as process:
            assert not process.is_forked
    finally:
        signal.signal(number, kept)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a word')", 1),
        ("raise ValueError", 1),
        ("import os; os._exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit, os; atexit.register(os._exit, 9)", 9),
        ("import os, threading; threading.Thread(target=lambda: os._exit(8)).start()", 8),
    ],
)
def test_its_end_is_told_as_any_other(started, ends, code):
    with started([sys.executable, "-c", ends], stderr=subprocess.DEVNULL) as process:
        assert process.wait(60) == code


def test_it_is_stopped_and_killed_as_any_other(started):
    words = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with started(words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.kill()

        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    "given",
    [
        {"env": {"PYTHONSAFEPATH": "1"}},
        {"umask": 0},
        {"preexec_fn": os.getpid},
        {"close_fds": False},
    ],
    ids=str,
)
def test_what_a_fork_could_not_heed_is_started_for_real(warm_commands, given):
    words = [sys.executable, "-c", ""]

    with warm(warm_commands)(words, **given) as process:
        assert not process.is_forked


def test_a_mask_that_would_be_inherited_is_too(warm_commands):
    before = os.umask(0o027)
    try:
        with warm(warm_commands)([sys.executable, "-c", ""]) as process:
            assert not process.is_forked
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ([sys.executable, "-m", "omniload", "mix", "check"], True),
        ([sys.executable, "-m", "fusefs.mounts.daemon", "9"], True),
        (["/usr/bin/env", "omniload"], False),
        ([sys.executable, "-c", "import omniload"], False),
        ([sys.executable, "-I", "-m", "omniload"], False),
        ([], False),
        ("omniload mix check", False),
    ],
)
def test_commands_and_daemons_of_ours_alone_are_forked(words, ours):
    assert is_command(words) == ours


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ([sys.executable, f"{ROOT}/tests/support/plane/processes/front_rank.py", "mix"], True),
        ([sys.executable, Path(ROOT, "tests/support/trainer/processes/image_rank.py")], True),
        (["python3", f"{ROOT}/tests/support/plane/processes/front_rank.py"], False),
        ([sys.executable, f"{ROOT}/tests/support/plane/ranks.py"], False),
        ([sys.executable], False),
    ],
)
def test_programs_that_lie_beside_what_tests_share_are_too(words, is_one):
    assert is_process(words) == is_one


@pytest.mark.timeout(180)
def test_the_warm_process_ends_though_one_that_was_forked_from_its_owner_lives_on():
    """As a worker of a loader that a test has left: it holds all pipes that its parent had."""
    with tempfile.TemporaryDirectory(prefix="warm", dir="/tmp") as folder:
        python = WarmPython(Path(folder), ("json",))
        lives_on = multiprocessing.get_context("fork").Process(target=signal.pause)
        lives_on.start()
        try:
            with python:
                assert psutil.pid_exists(python.pid)
            assert not psutil.pid_exists(python.pid)
        finally:
            lives_on.kill()
            lives_on.join()
