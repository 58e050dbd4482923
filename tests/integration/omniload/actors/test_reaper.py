"""The reaper of a plane ends marked processes, gives up on those that cannot end, and removes the plane's folders."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from omniload.actors import reaper
from omniload.actors.reaper import PlaneFolder, Reaper, marked
from omniload.actors.reaper_process import MARKS, clean_up, end_all, marks_of
from omniload.base.errors import StateError
from omniload.base.linux.file_lock import FileLock, is_locked

_SLEEPER = "import signal; print('up', flush=True); signal.pause()"
_LONG_S = 60


class Clock:
    """A clock that advances only by waiting."""

    def __init__(self):
        self.now = 0.0
        self.waits = []

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def mark():
    return f"test-{secrets.token_hex(8)}"


def a_sleeper(*marks):
    process = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER],
        env={**os.environ, MARKS: ":".join(marks)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    return process


@contextmanager
def ending(*processes):
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_only_what_carries_the_mark_is_ended_whatever_other_marks_it_carries(mark):
    own, inner, outer = a_sleeper(mark), a_sleeper("job", mark), a_sleeper(mark, "plane")
    other = a_sleeper(f"{mark}-other")

    with ending(own, inner, outer, other):
        assert set(end_all(mark)) == {own.pid, inner.pid, outer.pid}
        assert [process.wait(_LONG_S) for process in (own, inner, outer)] == [-9, -9, -9]
        assert other.poll() is None


def test_a_mark_is_carried_by_what_is_started_under_it_alone(monkeypatch):
    monkeypatch.setenv(MARKS, "job")

    with marked("plane"):
        inside = os.environ[MARKS]
    monkeypatch.delenv(MARKS)
    with marked("alone"):
        alone = os.environ[MARKS]

    assert (inside, alone) == ("job:plane", "alone")
    assert MARKS not in os.environ


def test_a_process_that_is_gone_carries_no_mark():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(gone.pid)
    gone.wait()

    assert marks_of(process) == []


def test_a_process_with_the_number_of_one_that_was_seen_before_is_ended(mark, monkeypatch):
    def ended():
        raise psutil.NoSuchProcess(seen.pid)  # psutil's error when another process has the number

    sleeper = [sys.executable, "-c", _SLEEPER]
    env = os.environ | {MARKS: mark}
    with subprocess.Popen(sleeper, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        (seen,) = [each for each in psutil.process_iter() if each.pid == process.pid]
        monkeypatch.setattr(seen, "kill", ended)

        assert end_all(mark) == [process.pid]


def test_rounds_go_on_until_nothing_is_found_and_then_the_folders_go(tmp_path):
    clock, rounds = Clock(), [[1, 2], [2], []]
    (tmp_path / "ray" / "session").mkdir(parents=True)

    left = clean_up(
        lambda: rounds.pop(0),
        [tmp_path / "ray", tmp_path / "never-made"],
        clock=clock,
        wait=clock.wait,
    )

    assert (left, rounds, clock.waits) == ([], [], [0.05, 0.05])
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_cannot_end_is_waited_for_half_a_minute_and_named():
    clock = Clock()

    left = clean_up(lambda: [4711], clock=clock, wait=clock.wait)

    assert left == [4711]
    assert clock.now == pytest.approx(30.0, abs=0.06)


def test_a_reaper_ends_what_is_marked_when_it_is_closed(mark, tmp_path):
    reaper = Reaper(mark, [tmp_path / "ray"])
    (tmp_path / "ray").mkdir()
    process = a_sleeper(mark)

    with ending(process):
        reaper.close()

        assert process.wait(_LONG_S) == -9
    assert not (tmp_path / "ray").exists()
    assert not psutil.pid_exists(reaper.pid)


def test_a_reaper_that_is_killed_is_followed_by_another(mark):
    reaper = Reaper(mark)
    first = reaper.pid
    process = a_sleeper(mark)

    with ending(process):
        os.kill(first, signal.SIGKILL)
        while reaper.pid == first:
            assert reaper._thread.is_alive()
            reaper._thread.join(0.01)
        reaper.close()

        assert process.wait(_LONG_S) == -9


_OPENER = """
import os, signal, subprocess, sys
from omniload.actors.reaper import PlaneFolder, Reaper, marked
reaper = Reaper(sys.argv[1], [sys.argv[2]])
os.mkdir(sys.argv[2])
with marked(sys.argv[1]):
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
fork = os.fork()  # it holds the reaper's pipe, as what a trainer forks does
if fork:
    print(left.pid, reaper.pid, fork, flush=True)
signal.pause()
"""


def waits_for_its_opener(reaper):
    """Return whether a reaper sleeps, which it does after it has started to ignore these signals."""
    said = Path(f"/proc/{reaper.pid}/status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in said if line.startswith("SigIgn:"))
    return bool(ignored >> (signal.SIGTERM - 1) & 1) and reaper.status() == psutil.STATUS_SLEEPING


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_opener_that_is_killed_leaves_nothing_although_a_fork_of_it_lives(
    mark, tmp_path, number
):
    folder = tmp_path / "ray"
    opener = subprocess.Popen(
        [sys.executable, "-c", _OPENER, mark, str(folder)], stdout=subprocess.PIPE
    )
    pids = map(int, opener.stdout.readline().split())
    opener.stdout.close()
    left, reaper, fork = map(psutil.Process, pids)

    with ending(opener, fork):
        # A reaper that has not begun to wait notices by its parent's number that the opener is gone.
        while not waits_for_its_opener(reaper):
            os.sched_yield()
        opener.send_signal(number)
        opener.wait(_LONG_S)
        _, alive = psutil.wait_procs([left, reaper], timeout=_LONG_S)

    assert alive == []
    assert not folder.exists()


_HOLDER = """
import os, signal, sys, tempfile
from omniload.actors.reaper import PlaneFolder
tempfile.tempdir = sys.argv[1]
folder = PlaneFolder()
folder.make()
is_forked, forked = os.pipe()
fork = os.fork()  # as what a trainer forks does, it lives on
if fork:
    os.read(is_forked, 1)  # until it has left to its parent what that holds
    print(folder.path, fork, flush=True)
else:
    os.write(forked, b".")
signal.pause()
"""


@pytest.fixture
def a_left_folder(tmp_path, monkeypatch):
    """A folder of a plane whose opener was killed, without a reaper, while a fork of the opener lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    path, fork = holder.stdout.readline().split()
    holder.stdout.close()
    other = PlaneFolder()
    try:
        # While its opener lives, nothing removes it.
        other.make()
        assert Path(path).is_dir()
        holder.kill()
        holder.wait()
        yield Path(path)
    finally:
        os.kill(int(fork), signal.SIGKILL)
        other.remove()


def made_beside(folder):
    """Let another start make its folder; return whether the remaining one still exists."""
    other = PlaneFolder()
    other.make()
    assert other.path.is_dir()
    other.remove()
    assert not other.path.exists()
    return folder.exists()


def test_a_folder_whose_opener_and_reaper_were_killed_is_removed_by_the_next_start(a_left_folder):
    (a_left_folder / "session").mkdir()

    assert not made_beside(a_left_folder)


def test_a_left_folder_stays_while_a_process_has_a_file_open_below_it(a_left_folder):
    with (a_left_folder / "log").open("w"):
        assert made_beside(a_left_folder)

    assert not made_beside(a_left_folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
@pytest.mark.parametrize("name", ["", "opener"])
def test_a_folder_of_another_user_is_left_alone(a_left_folder, name):
    os.chown(a_left_folder / name, 65_534, -1)

    assert made_beside(a_left_folder)


def test_a_folder_of_another_host_is_left_alone_as_neither_its_locks_nor_its_processes_are_seen(
    a_left_folder, monkeypatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: "other")

    assert made_beside(a_left_folder)


_BEGINNER = """
import os, signal, sys, tempfile
from pathlib import Path
from omniload.actors import reaper
tempfile.tempdir = sys.argv[1]
def stay(*_):
    print("there", flush=True)
    signal.pause()
if sys.argv[2] == "made":
    reaper.FileLock = stay
else:
    Path.rename = stay
reaper.PlaneFolder().make()
"""


@pytest.mark.parametrize("until", ["made", "held"])
def test_a_folder_whose_opener_was_killed_as_it_made_it_is_removed_by_the_next_start_of_its_host(
    tmp_path, monkeypatch, until
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opener = subprocess.Popen(
        [sys.executable, "-c", _BEGINNER, str(tmp_path), until], stdout=subprocess.PIPE
    )

    with ending(opener):
        assert opener.stdout.readline() == b"there\n"
        opener.stdout.close()
        (begun,) = tmp_path.iterdir()
        # A start that finds the folder empty removes it, and the process that is about to lock it makes it again.
        if until == "held":
            assert made_beside(begun)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "other")
        assert made_beside(begun)
    assert not made_beside(begun)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "opener"])
def test_a_folder_that_another_start_takes_away_before_it_is_held_is_made_again(
    tmp_path, monkeypatch, name
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path]

    def held(path):
        if others:
            others.pop()
            lock = FileLock(path) if name else None
            shutil.rmtree(path.parent)
            return lock or FileLock(path)
        return FileLock(path)

    monkeypatch.setattr(reaper, "FileLock", held)
    folder = PlaneFolder()
    folder.make()

    assert others == []
    assert list(tmp_path.iterdir()) == [folder.path]
    assert is_locked(folder.path / "opener")
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_host_without_a_folder_for_temporary_files_is_told_with_those_that_were_tried(
    monkeypatch,
):
    def none_usable():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)

    with pytest.raises(StateError, match=r"\(No usable .* \['/tmp', '/'\]\); free space .* TMPDIR"):
        PlaneFolder()


def test_a_folder_that_says_nothing_of_its_opener_or_leads_elsewhere_is_left_alone(
    a_left_folder, tmp_path
):
    (a_left_folder / "opener").rename(a_left_folder / "begun")
    link = tmp_path / "omniload-ray-12345678"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "opener").touch()
    link.symlink_to(elsewhere)

    assert made_beside(a_left_folder)
    assert link.is_symlink()
    assert (elsewhere / "opener").exists()
