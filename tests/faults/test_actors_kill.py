"""Whoever opened a data plane is killed: no process, no folder and no shared memory stays, in either runtime."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from omniload.actors.guard import MARKS, marks_of
from tests.support.corpora import a_corpus
from tests.support.run_lines import write_mix

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing_behind")]

_LIMIT_S = 10.0
"""What the project promises, from the kill to the end of everything."""
_LONG_S = 120
_OPENER = """
import signal, sys, tempfile
from pathlib import Path
from omniload.actors import ray_cluster
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.plan.place_tree import ClientPlaceTree

kind, stage = sys.argv[2:]
mix, base_dir = load_mix(Path(sys.argv[1]))
mix = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"kind": kind})})
if stage == "starting":
    start = ray_cluster.start_node
    def halfway(**words):
        node = start(**words)
        print("there", flush=True)
        signal.pause()
    ray_cluster.start_node = halfway
plane = open_plane(PlaneSpec(mix=mix, base_dir=base_dir, tree=ClientPlaceTree.of()))
Client(plane.handle(0)).next_batch()
print("there", flush=True)
signal.pause()
"""


def left_of(mark):
    return [process for process in psutil.process_iter() if mark in marks_of(process)]


def places():
    """Return what lies where Ray keeps its files."""
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return {path for folder in folders for path in folder.iterdir() if "ray" in path.name.lower()}


@contextmanager
def an_opener(folder, kind, stage="open"):
    write_mix(folder / "mix.yaml", a_corpus(folder))
    mark = f"test-{secrets.token_hex(8)}"
    process = subprocess.Popen(
        [sys.executable, "-c", _OPENER, str(folder / "mix.yaml"), kind, stage],
        env={**os.environ, MARKS: mark},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"there\n"
        yield process, mark
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def seconds_until(done):
    """Return how long it takes until ``done``; a minute is never enough for what is not done then."""
    began_s = time.monotonic()
    while not done():
        assert time.monotonic() - began_s < 60, "it stays"
        time.sleep(0.05)
    return time.monotonic() - began_s


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_nothing_stays_after_the_opener_is_killed(tmp_path, kind):
    before = places()
    with an_opener(tmp_path, kind) as (process, mark):
        found = len(left_of(mark))
        process.kill()

        took_s = seconds_until(lambda: not left_of(mark) and places() <= before)

    assert (found > 5) == (kind == "ray")
    assert took_s < _LIMIT_S


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_of_a_start_that_is_broken_off(tmp_path, number):
    before = places()
    with an_opener(tmp_path, "ray", "starting") as (process, mark):
        process.send_signal(number)

        took_s = seconds_until(lambda: not left_of(mark) and places() <= before)
        assert process.wait(_LONG_S) != 0

    assert took_s < _LIMIT_S


@pytest.mark.ray
def test_nothing_stays_although_the_guard_is_killed_before_the_opener(tmp_path):
    before = places()
    with an_opener(tmp_path, "ray") as (process, mark):
        opener = psutil.Process(process.pid)
        (guard,) = guards_of(opener)
        guard.kill()
        seconds_until(lambda: [g for g in guards_of(opener) if g != guard])
        process.kill()

        took_s = seconds_until(lambda: not left_of(mark) and places() <= before)

    assert took_s < _LIMIT_S


def guards_of(opener):
    return [p for p in opener.children() if any(w.endswith("guard.py") for w in p.cmdline())]
