"""Processes of a node's workers, forked from the first: with a Ray that only says what it is, and no cluster."""

import json
import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from omniload.actors.ray.hosts import worker

FILES = {
    "ray/__init__.py": """
import numpy.random, os, threading
LOADED_IN = os.getpid()
if os.environ.get("THREADS"):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
""",
    "ray/_private/__init__.py": "",
    "ray/_private/workers/__init__.py": "",
    "ray/_private/workers/default_worker.py": """
import json, numpy, os, ray, socket, sys
told = socket.socket(socket.AF_UNIX)
told.connect(os.environ["TOLD"])
told.sendall(json.dumps({
    "loaded_in": ray.LOADED_IN, "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(),
    "words": sys.argv[2:], "number": os.environ["NUMBER"], "drawn": numpy.random.random(),
}).encode() + b"\\n")
told.recv(1)
""",
}
"""A Ray, by its files."""
WITHIN_S = 30


class Node:
    """Where workers are started, as a raylet does."""

    def __init__(self, folder):
        self.folder, self.started, self.held = folder, [], []
        self.raylet = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "told"))
        self.listener.listen()
        self.listener.settimeout(WITHIN_S)

    def asked(self, number, **variables):
        """Start a process for a worker."""
        words = [f"--raylet-name={self.folder}/raylet", f"--number={number}"]
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "RAY_RAYLET_PID": str(self.raylet.pid),
            "TOLD": str(self.folder / "told"),
            "NUMBER": str(number),
        }
        process = subprocess.Popen(
            [sys.executable, worker.__file__, *words], env=environment | variables, process_group=0
        )
        self.started.append(process)
        return process

    def told(self):
        """Return what the next worker says of itself; it ends with the node."""
        connection, _ = self.listener.accept()
        self.held.append(connection)
        with connection.makefile() as words:
            return json.loads(words.readline())

    def worker(self, number, **variables):
        process = self.asked(number, **variables)
        return process, self.told()

    def close(self):
        for connection in self.held:
            connection.close()
        self.raylet.kill()
        self.raylet.communicate()
        for process in self.started:
            process.wait(WITHIN_S)
        self.listener.close()


@pytest.fixture
def node(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    node = Node(tmp_path)
    yield node
    node.close()


def ended(pid):
    """Tell whether a process that is no child of ours ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], WITHIN_S)[0])
    finally:
        os.close(descriptor)


def test_the_first_process_loads_and_those_behind_it_are_forked_with_what_each_was_told(node):
    first_process, first = node.worker(1)
    second_process, second = node.worker(2, THREADS="of no matter by now")

    assert first["loaded_in"] == first["pid"] == first_process.pid
    assert second["loaded_in"] == first["pid"]
    assert second["pid"] not in {first["pid"], second_process.pid}
    assert (second["words"], second["number"]) == (["--number=2"], "2")
    assert second_process.wait(WITHIN_S) == 0
    # A signal to the group that Ray started reaches the worker that stands in.
    assert (first["group"], second["group"]) == (first_process.pid, second_process.pid)
    assert first["drawn"] != second["drawn"]


def test_processes_that_are_started_together_load_once(node):
    for number in range(6):
        node.asked(number)
    said = [node.told() for _ in range(6)]

    assert len({each["loaded_in"] for each in said}) == 1
    assert sorted(each["number"] for each in said) == [*"012345"]


def test_a_worker_that_is_killed_with_its_group_ends_no_other(node):
    first_process, _ = node.worker(1)
    _, second = node.worker(2)
    os.killpg(first_process.pid, signal.SIGKILL)
    first_process.wait(WITHIN_S)
    os.killpg(second["group"], signal.SIGKILL)
    assert ended(second["pid"])

    _, third = node.worker(3)

    assert third["loaded_in"] == first_process.pid


def test_what_forks_ends_with_the_raylet(node):
    node.worker(1)
    _, second = node.worker(2)
    node.raylet.kill()

    assert ended(second["parent"])


def test_where_nobody_answers_a_process_loads_by_itself(node):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(node.folder / "raylet.roles"))
    left.close()

    process, said = node.worker(1)

    assert said["loaded_in"] == said["pid"] == process.pid


def test_a_process_with_threads_leaves_no_copy_of_itself(node):
    node.worker(1, THREADS="1")
    process, second = node.worker(2)

    assert second["loaded_in"] == process.pid


def test_a_process_that_is_told_of_no_raylet_loads_by_itself(node):
    node.worker(1)
    process, second = node.worker(2, RAY_RAYLET_PID="")

    assert second["loaded_in"] == process.pid


@pytest.mark.parametrize("asked", [b"", b"\0\0\0\2{}", b"\0\0\0\x0c[1, {}, null]", b"\xff" * 9])
def test_who_asks_for_nothing_that_can_be_done_gets_no_answer_and_harms_nobody(node, asked):
    node.worker(1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WITHIN_S)
        stranger.connect(str(node.folder / "raylet.roles"))
        stranger.sendall(asked)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""

    process, second = node.worker(2)

    assert second["loaded_in"] != process.pid
