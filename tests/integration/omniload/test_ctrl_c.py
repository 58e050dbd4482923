"""A training script whose data plane runs on a Ray of its own, and that a user interrupts."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time

import psutil
import pytest

import omniload

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MIX = """
version: 1
seed: 1
tokenizer: {type: bytes}
sources: {web: {type: jsonl, path: web.jsonl}}
mix: {stages: [{weights: {web: 1}}], stop: never}
pack: {length: 128}
batch: {tokens: 512, micro_tokens: 256}
"""
TRAIN = """\
import json, os, signal, sys, threading
import omniload, ray
from omniload.actors.ray import cluster, crew
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background

def ctrl_c_in(owner, name):
    call = getattr(owner, name)
    def interrupted(*words, **named):
        signal.raise_signal(signal.SIGINT)
        setattr(owner, name, call)
        return call(*words, **named)
    setattr(owner, name, interrupted)

if "opening" in sys.argv:
    ctrl_c_in(crew.Crew, "start")
if "closing" in sys.argv:
    ctrl_c_in(cluster.PrivateCluster, "close")
if "connecting" in sys.argv:
    leaves, init, wait_for_head = threading.Event(), ray.init, cluster.wait_for_head

    def waited_for(limit_s):
        if limit_s:
            leaves.set()
        return wait_for_head(limit_s)

    def connected_late(**named):
        signal.raise_signal(signal.SIGINT)
        leaves.wait(60)
        return init(**named)

    cluster.wait_for_head, ray.init = waited_for, connected_late
state = json.load(open("state")) if os.path.exists("state") else None
with omniload.open("mix.yaml", arrays="numpy", runtime="ray", run_dir="run", state=state) as loader:
    for batch in loader:
        with open("state.new", "w") as kept:
            json.dump(loader.state_dict(), kept)
        os.replace("state.new", "state")
        print(batch.step, batch.tokens.tolist(), flush=True)
"""
LIMIT_S = 120


@pytest.fixture
def folder(tmp_path):
    texts = [json.dumps({"text": f"document {i} " * (i % 7 + 1)}) for i in range(400)]
    (tmp_path / "web.jsonl").write_text("\n".join(texts))
    (tmp_path / "mix.yaml").write_text(MIX)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


class Script:
    """``python train.py`` in a terminal, as the leader of a process group."""

    def __init__(self, folder, *words):
        self.mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, "train.py", *words],
            cwd=folder,
            env={**os.environ, "TEST_OF_CTRL_C": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # otherwise later lines would be read into a buffer and lost
            start_new_session=True,
        )
        self.steps = []

    def take(self, count):
        """Read steps."""
        while count:
            self.steps.append(self.process.stdout.readline().decode())
            assert self.steps[-1], self.process.communicate(timeout=LIMIT_S)
            count -= 1

    def end(self):
        """Wait until it and all that it started have ended; return its exit code and its output."""
        told, said = self.process.communicate(timeout=LIMIT_S)
        # It may be interrupted within a line, whose rest is then never printed.
        whole, _, _ = told.decode().rpartition("\n")
        self.steps += [f"{line}\n" for line in whole.splitlines()]
        until_s = time.monotonic() + LIMIT_S
        while left := self.left():
            assert time.monotonic() < until_s, left
        return self.process.returncode, said.decode()

    def left(self):
        found = []
        for process in psutil.process_iter():
            try:
                is_its = os.getsid(process.pid) == self.process.pid
                if is_its or process.environ().get("TEST_OF_CTRL_C") == self.mark:
                    found.append(process)
            except (psutil.Error, OSError):
                pass
        return found


def steps_of(folder, count):
    """Return the first steps of an uninterrupted run."""
    with omniload.open(folder / "mix.yaml", arrays="numpy", runtime="local") as loader:
        batches = [loader.next_batch(timeout=LIMIT_S) for _ in range(count)]
    return [f"{batch.step} {batch.tokens.tolist()}\n" for batch in batches]


def resumed(folder, count):
    """Return the steps of a run that resumes from the last saved state."""
    again = Script(folder)
    again.take(count)
    again.process.send_signal(signal.SIGINT)
    again.end()
    return again.steps


@pytest.mark.parametrize("words", [(), ("closing",)], ids=["once", "again as it closes"])
def test_ctrl_c_ends_a_loop_with_all_that_it_started_and_a_resume_has_the_next_steps(folder, words):
    script = Script(folder, *words)
    script.take(3)
    os.killpg(script.process.pid, signal.SIGINT)
    code, said = script.end()

    assert code == -signal.SIGINT, said
    assert said.count("Traceback") == 1, said
    assert said.endswith("\nKeyboardInterrupt\n"), said
    # A step that was in progress when the process ended may be saved but not reported.
    kept = json.loads((folder / "state").read_text())["step"]
    assert kept - len(script.steps) in {0, 1}
    wanted = steps_of(folder, kept + 3)
    assert script.steps == wanted[: len(script.steps)]
    assert resumed(folder, 3)[:3] == wanted[kept:]


@pytest.mark.parametrize("words", ["opening", "connecting"])
def test_ctrl_c_as_it_opens_ends_all_that_it_started(folder, words):
    code, said = Script(folder, words).end()

    assert code == -signal.SIGINT, said
    assert said.startswith("Traceback"), said
    assert said.count("Traceback") == 1, said
    assert said.endswith("\nKeyboardInterrupt\n"), said


def test_sigterm_ends_it_at_once_with_all_that_it_started(folder):
    script = Script(folder)
    script.take(3)
    os.killpg(script.process.pid, signal.SIGTERM)
    code, _ = script.end()

    assert code == -signal.SIGTERM
    kept = json.loads((folder / "state").read_text())["step"]
    assert resumed(folder, 3)[:3] == steps_of(folder, kept + 3)[kept:]
