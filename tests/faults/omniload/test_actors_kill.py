"""Whoever opened a data plane is killed: no process, no folder and no shared memory stays, in either runtime."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from omniload.actors.reaper import PlaneFolder
from omniload.actors.reaper_process import MARKS, marks_of
from tests.support.every_process import every_process
from tests.support.plane.corpora import a_corpus
from tests.support.plane.two_hosts import begin_bare_node, head_of
from tests.support.trainer.run_lines import write_mix
from tests.support.warm_python import read_early

pytestmark = [
    pytest.mark.slow,
    pytest.mark.scripts_start_warm,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]

_LIMIT_S = 45.0
"""From the kill to the end of everything: a few seconds where nothing else runs.

Ray's own processes, which nobody ends, notice it after most of a minute.
"""
_LONG_S = 120
_OPENER = """
import signal, sys, tempfile
from pathlib import Path
from omniload.actors.ray import cluster as ray_cluster
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.plan.place_tree import ClientPlaceTree

# A shell has what it starts in the background ignore Ctrl-C, and all below it.
signal.signal(signal.SIGINT, signal.default_int_handler)
kind, stage = sys.argv[2:]
mix, base_dir = load_mix(Path(sys.argv[1]))
mix = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"kind": kind})})
if stage == "starting":
    start = ray_cluster.start_node
    def halfway(plan):
        node = start(plan)
        print("there", flush=True)
        signal.pause()
    ray_cluster.start_node = halfway
plane = open_plane(PlaneSpec(mix=mix, base_dir=base_dir, tree=ClientPlaceTree.of()))
Client(plane.handle(0)).next_batch()
print("there", flush=True)
signal.pause()
"""


def left_of(mark):
    return [process for process in every_process() if mark in marks_of(process)]


def is_there(process):
    """Whether a process has not ended, be it that nobody has asked for its exit code yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory_of(mark):
    """Return the files of shared memory that processes of a mark have mapped and that have a name."""
    maps = [Path(f"/proc/{p.pid}/maps").read_text(errors="replace") for p in left_of(mark)]
    words = {line.split(maxsplit=5)[-1] for text in maps for line in text.splitlines()}
    return [Path(word) for word in words if word.startswith("/dev/shm/") and "deleted" not in word]


class Opener:
    """A process that opens a plane, with a mark and a folder for temporary files of its own."""

    def __init__(self, folder, kind, stage):
        write_mix(folder / "mix.yaml", a_corpus(folder))
        self.mark = f"test-{secrets.token_hex(8)}"
        # Not below the test's folder: the paths of Ray's sockets must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="ok-"))
        # A small one: what Ray's agents write over it reaches the mark, wherever it stands.
        kept = ("PATH", "HOME", "PYTHONPATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= read_early(os.environ)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OPENER, str(folder / "mix.yaml"), kind, stage],
            env={**environment, MARKS: self.mark, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == b"there\n"
        self.memory = shared_memory_of(self.mark)
        # By their parents: Ray's agents write their titles over their environment, and the mark in it.
        self.started = psutil.Process(self.process.pid).children(recursive=True)

    def seconds_until_gone(self):
        return seconds_until(
            lambda: (
                not left_of(self.mark)
                and not any(map(is_there, self.started))
                and not any(self.temporary.iterdir())
                and not any(map(Path.exists, self.memory))
            )
        )


@contextmanager
def an_opener(folder, kind, stage="open"):
    opener = Opener(folder, kind, stage)
    try:
        yield opener
    finally:
        opener.process.kill()
        opener.process.wait()
        opener.process.stdout.close()
        shutil.rmtree(opener.temporary, ignore_errors=True)


def seconds_until(done):
    """Return how long it takes until ``done``; what is not done after two minutes never is."""
    began_s = time.monotonic()
    while not done():
        assert time.monotonic() - began_s < _LONG_S, "it stays"
        time.sleep(0.05)
    return time.monotonic() - began_s


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_nothing_stays_after_the_opener_is_killed(tmp_path, kind):
    with an_opener(tmp_path, kind) as opener:
        found = len(left_of(opener.mark))
        opener.process.kill()

        took_s = opener.seconds_until_gone()

    assert (found > 5) == (kind == "ray")
    assert took_s < _LIMIT_S


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_of_a_start_that_is_broken_off(tmp_path, number):
    with an_opener(tmp_path, "ray", "starting") as opener:
        opener.process.send_signal(number)

        took_s = opener.seconds_until_gone()
        assert opener.process.wait(_LONG_S) != 0

    assert took_s < _LIMIT_S


@pytest.mark.ray
def test_nothing_stays_although_the_reaper_is_killed_before_the_opener(tmp_path):
    with an_opener(tmp_path, "ray") as opener:
        process = psutil.Process(opener.process.pid)
        (reaper,) = reapers_of(process)
        reaper.kill()
        seconds_until(lambda: [g for g in reapers_of(process) if g != reaper])
        opener.process.kill()

        took_s = opener.seconds_until_gone()

    assert took_s < _LIMIT_S


@pytest.mark.ray
def test_the_next_start_removes_what_an_opener_leaves_that_is_killed_together_with_its_reaper(
    tmp_path, monkeypatch
):
    with an_opener(tmp_path, "ray") as opener:
        monkeypatch.setattr(tempfile, "tempdir", str(opener.temporary))
        (left,) = opener.temporary.iterdir()
        (reaper,) = reapers_of(psutil.Process(opener.process.pid))
        reaper.suspend()  # it must not be the quicker one
        opener.process.kill()
        reaper.kill()
        folder = PlaneFolder()

        def next_start():
            folder.make()
            folder.remove()
            return not left.exists()

        next_start()
        assert left.exists()  # Ray's processes have files open there yet
        for process in filter(is_there, opener.started):
            with suppress(psutil.Error):
                process.kill()

        seconds_until(next_start)


def reapers_of(opener):
    found = []
    for process in opener.children():
        with suppress(psutil.Error):  # it is ending
            if any(word.endswith("reaper_process.py") for word in process.cmdline()):
                found.append(process)
    return found


_SERVER = """
import sys, omniload
with omniload.serve(sys.argv[1], address=sys.argv[2]) as plane:
    plane.wait()
"""
_RANK = """
import sys, omniload
from omniload.base.errors import UnavailableError
try:
    with omniload.join(sys.argv[1], rank=0, world_size=1, arrays="numpy") as loader:
        for step, _ in enumerate(loader):
            if step == 3:
                print("there", flush=True)
except UnavailableError as error:
    print(error, flush=True)
"""


def test_a_rank_of_a_served_plane_is_told_that_its_server_was_killed(tmp_path):
    write_mix(tmp_path / "mix.yaml", a_corpus(tmp_path))
    at = str(tmp_path / "plane")
    server = subprocess.Popen([sys.executable, "-c", _SERVER, str(tmp_path / "mix.yaml"), at])
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, at], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert rank.stdout.readline() == "there\n"
        server.kill()
        killed_s = time.monotonic()
        said, faults = rank.communicate(timeout=_LONG_S)
        took_s = time.monotonic() - killed_s
    finally:
        for process in (server, rank):
            process.kill()
            process.wait()

    # By the kernel, or by what Ray's own connection says first.
    assert re.search("the process that opened the data plane|Ray has ended on this host", said), (
        faults
    )
    assert took_s < _LIMIT_S


_OPENS = """
import sys, omniload
from omniload.base.errors import UnavailableError
try:
    keywords = dict(word.split("=") for word in sys.argv[2:])
    with omniload.open(sys.argv[1], runtime="ray", arrays="numpy", **keywords) as loader:
        for step, _ in enumerate(loader):
            if step == 3:
                print("there", flush=True)
except UnavailableError as error:
    print(error, flush=True)
"""


@contextmanager
def running(*words, **pipes):
    with subprocess.Popen([sys.executable, "-c", *map(str, words)], text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_service(process, name):
    """Kill a server of the Ray that a process has started."""
    children = psutil.Process(process.pid).children()
    next(child for child in children if child.name() == name).kill()


@pytest.mark.ray
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_served_plane_whose_ray_loses_a_server_ends_and_its_ranks_are_told(tmp_path, name):
    write_mix(tmp_path / "mix.yaml", a_corpus(tmp_path))
    at = tmp_path / "plane"
    piped = subprocess.PIPE

    with (
        running(_SERVER, tmp_path / "mix.yaml", at, stderr=piped) as server,
        running(_RANK, at, stdout=piped, stderr=piped) as rank,
    ):
        assert rank.stdout.readline() == "there\n"
        kill_service(server, name)
        _, faults_of_server = server.communicate(timeout=_LONG_S)
        said, faults = rank.communicate(timeout=_LONG_S)

    assert f"Ray's {name} ended with -9, and the data plane with it" in faults_of_server
    assert re.search("the process that opened the data plane|Ray has ended on this host", said), (
        faults
    )


@pytest.mark.ray
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_rank_that_opened_a_plane_is_told_that_its_ray_lost_a_server(tmp_path, name):
    write_mix(tmp_path / "mix.yaml", a_corpus(tmp_path))
    piped = subprocess.PIPE

    with running(_OPENS, tmp_path / "mix.yaml", stdout=piped, stderr=piped) as rank:
        assert rank.stdout.readline() == "there\n"
        kill_service(rank, name)
        said, faults = rank.communicate(timeout=_LONG_S)

    assert f"Ray's {name} ended with -9, and the data plane with it" in said, faults


@pytest.mark.ray
def test_a_rank_joins_a_ray_of_others_by_its_users_token_and_is_told_that_its_raylet_was_killed(
    tmp_path, monkeypatch
):
    write_mix(tmp_path / "mix.yaml", a_corpus(tmp_path))
    # As ``ray start`` and any ``ray.init()`` use it by themselves.
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("5e" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    given = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token.read_text()}
    with tempfile.TemporaryDirectory(prefix="ok-") as folder:
        node = begin_bare_node("", folder=Path(folder) / "ray", env=given)
        try:
            place = f"runtime_address={head_of(node)}"
            words = [_OPENS, tmp_path / "mix.yaml", place]
            with running(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
                assert rank.stdout.readline() == "there\n"
                kill_service(node, "raylet")
                said, faults = rank.communicate(timeout=_LONG_S)
        finally:
            node.communicate(timeout=_LONG_S)

    assert "Ray has ended on this host: its raylet, process" in said, faults


_OPENS_AND_CATCHES_NOTHING = """
import sys, omniload
loader = omniload.open(sys.argv[1], runtime="ray", arrays="numpy")
for step, _ in enumerate(loader):
    if step == 3:
        print("there", flush=True)
"""


@pytest.mark.ray
def test_a_rank_that_catches_no_error_prints_it_and_ends_though_the_head_of_its_ray_was_killed(
    tmp_path,
):
    write_mix(tmp_path / "mix.yaml", a_corpus(tmp_path))
    piped = subprocess.PIPE

    with running(
        _OPENS_AND_CATCHES_NOTHING, tmp_path / "mix.yaml", stdout=piped, stderr=piped
    ) as rank:
        assert rank.stdout.readline() == "there\n"
        kill_service(rank, "gcs_server")
        _, faults = rank.communicate(timeout=_LONG_S)

    # Ray's own hook tells the head first, and Ray ends the process after a minute of that, without a word.
    assert "UnavailableError: Ray's gcs_server ended with -9" in faults
    assert rank.returncode == 1


_ENDS = """
import os, signal, sys, omniload
loader = omniload.open(sys.argv[1], runtime="ray", arrays="numpy")
for step, _ in enumerate(loader):
    if step == 3:
        HOW
"""


@pytest.mark.ray
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("break", ""),
        ("raise RuntimeError('mine')", "RuntimeError: mine"),
        ("os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt"),
    ],
    ids=["ends", "fails", "interrupted"],
)
def test_a_process_that_ends_without_closing_its_plane_ends_it_and_starts_no_other_ray(
    tmp_path, how, said
):
    write_mix(tmp_path / "mix.yaml", a_corpus(tmp_path))
    script = _ENDS.replace("HOW", how)

    # Where Ray has what it starts of its own accord, at a call of a process that has left it.
    env = os.environ | {"RAY_TMPDIR": str(tmp_path / "rays")}
    with running(script, tmp_path / "mix.yaml", stderr=subprocess.PIPE, env=env) as process:
        _, faults = process.communicate(timeout=_LONG_S)

    assert said in faults
    assert "is replaced" not in faults
    assert not (tmp_path / "rays").exists()
