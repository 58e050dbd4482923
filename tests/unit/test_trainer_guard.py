"""The guard of a job: ends what carries its mark, gives up on what cannot end, removes Ray's folder."""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainer_integration.guard import MARK, Guard, clean_up, end_all, ray_folder_in

_SLEEPER = "import signal; print('up', flush=True); signal.pause()"


class Clock:
    """Seconds that pass only by waiting."""

    def __init__(self):
        self.now = 0.0
        self.waits = []

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def job():
    return f"test-{secrets.token_hex(8)}"


def a_sleeper(job, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER, *arguments],
        env={**os.environ, MARK: job},
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    return process


def test_only_what_carries_the_mark_is_ended(job):
    marked, other = a_sleeper(job), a_sleeper(job + "-other")
    try:
        assert end_all(job) == [marked.pid]
        assert marked.wait() == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_folder_of_the_jobs_ray_is_found_and_removed(job):
    folder = Path(tempfile.mkdtemp(prefix="omniload-ray-"))
    (folder / "session").mkdir()
    ray = a_sleeper(job, f"--session-dir={folder}/session/logs")

    def end(folders):
        found = end_all(job, folders)
        ray.wait()
        return found

    assert clean_up(end, wait=lambda _seconds: None) == []
    assert not folder.exists()


@pytest.mark.parametrize(
    "argument", ["", "/", "--temp-dir=/home/omniload-ray-x", "omniload-ray-x", "{tmp}/other-x"]
)
def test_a_folder_of_somebody_else_is_not_taken_for_the_jobs(argument):
    assert ray_folder_in(["raylet", argument.format(tmp=tempfile.gettempdir())]) is None


def test_the_folder_ends_where_its_name_ends():
    parent = tempfile.gettempdir()

    found = ray_folder_in([f"{parent}/omniload-ray-a_1/../../etc"])

    assert found == Path(parent) / "omniload-ray-a_1"


def test_rounds_go_on_until_nothing_is_found():
    clock, rounds = Clock(), [[1, 2], [2], []]

    assert clean_up(lambda _folders: rounds.pop(0), clock=clock, wait=clock.wait) == []

    assert rounds == []
    assert clock.waits == [0.05, 0.05]


def test_a_process_that_cannot_end_is_waited_for_half_a_minute_and_named():
    clock = Clock()

    left = clean_up(lambda _folders: [4711], clock=clock, wait=clock.wait)

    assert left == [4711]
    assert clock.now == pytest.approx(30.0, abs=0.06)


def test_a_guard_ends_the_job_when_it_is_closed(job):
    guard = Guard(job)
    marked = a_sleeper(job)

    guard.close()

    assert marked.wait() == -9
