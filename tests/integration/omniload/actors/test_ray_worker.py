"""Processes of a node's workers, forked from a prepared one: with a fake Ray that only prints its identity."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from omniload.actors.ray.hosts import worker

FILES = {
    "ray/__init__.py": """
import numpy.random, os, threading
LOADED_IN, JOB = os.getpid(), os.environ.get("RAY_JOB_ID")
if os.environ.get("RAY_THREADS"):
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
    "loaded_for": ray.JOB, "words": sys.argv[2:], "number": os.environ["NUMBER"], "drawn": numpy.random.random(),
}).encode() + b"\\n")
told.recv(1)
""",
}
"""A fake Ray, by its files."""
WITHIN_S = 120


class Node:
    """A node whose workers are started as an opener and a raylet start them."""

    def __init__(self, folder):
        self.folder, self.started, self.held = folder, [], []
        self.opener, self.raylet = (
            subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)
        )
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "told"))
        self.listener.listen()
        self.listener.settimeout(WITHIN_S)
        with socket.socket(socket.AF_UNIX) as asked:
            asked.bind(worker.place_of(f"{folder}/raylet"))
            asked.listen()
            words = [worker.AHEAD, str(asked.fileno()), str(self.opener.pid)]
            self.ahead = subprocess.Popen(
                [sys.executable, worker.__file__, *words],
                env=os.environ | {"PYTHONPATH": str(folder)},
                pass_fds=[asked.fileno()],
                process_group=0,
            )
        self.started.append(self.ahead)

    def asked(self, number, **variables):
        """Start a process for a worker."""
        words = [f"--raylet-name={self.folder}/raylet", f"--number={number}"]
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "RAY_JOB_ID": "01000000",
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
        """Return the report of the next worker; the worker ends with the node."""
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
        for process in (self.opener, self.raylet):
            process.kill()
            process.communicate()
        for process in self.started:
            process.wait(WITHIN_S)
        self.listener.close()


@contextmanager
def a_node(folder):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    node = Node(folder)
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def node(tmp_path):
    with a_node(tmp_path) as node:
        yield node


@pytest.fixture(scope="module")
def lasting_node(tmp_path_factory):
    """One node for all tests that leave it unchanged."""
    with a_node(tmp_path_factory.mktemp("node")) as node:
        node.worker(0)
        yield node


def ended(pid):
    """Return whether a process that is no child of ours ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], WITHIN_S)[0])
    finally:
        os.close(descriptor)


def test_workers_are_forked_from_what_was_loaded_before_them_with_what_each_was_told(lasting_node):
    first_process, first = lasting_node.worker(1)
    second_process, second = lasting_node.worker(2, RAY_THREADS="of no matter by now")

    assert first["loaded_in"] == second["loaded_in"] == lasting_node.ahead.pid
    assert not {first["pid"], second["pid"]} & {first_process.pid, second_process.pid}
    assert (second["words"], second["number"]) == (["--number=2"], "2")
    assert [first_process.wait(WITHIN_S), second_process.wait(WITHIN_S)] == [0, 0]
    # A signal to the group that Ray started reaches the worker that acts for it.
    assert (first["group"], second["group"]) == (first_process.pid, second_process.pid)
    assert first["drawn"] != second["drawn"]
    # Ray gives such a worker to any job; a worker that was loaded for a job would belong to that job for ever.
    assert first["loaded_for"] == "ffffffff"


def test_processes_that_are_started_together_load_once(node):
    for number in range(6):
        node.asked(number)
    said = [node.told() for _ in range(6)]

    assert {each["loaded_in"] for each in said} == {node.ahead.pid}
    assert sorted(each["number"] for each in said) == [*"012345"]


def test_a_worker_that_is_killed_with_its_group_ends_no_other(lasting_node):
    _, first = lasting_node.worker(1)
    os.killpg(first["group"], signal.SIGKILL)
    assert ended(first["pid"])

    _, second = lasting_node.worker(2)

    assert second["loaded_in"] == lasting_node.ahead.pid


def test_what_forks_ends_with_the_opener(node):
    node.worker(1)
    node.opener.kill()

    assert node.ahead.wait(WITHIN_S) == 0


def test_where_nobody_answers_a_process_loads_by_itself(node):
    node.ahead.kill()
    node.ahead.wait(WITHIN_S)

    process, said = node.worker(1)

    assert said["loaded_in"] == said["pid"] == process.pid


def test_one_with_threads_forks_nobody(node):
    process, said = node.worker(1, RAY_THREADS="1")

    assert said["loaded_in"] == process.pid


def test_a_process_that_is_told_of_no_raylet_loads_by_itself_and_has_nothing_loaded(node):
    process, said = node.worker(1, RAY_RAYLET_PID="")
    _, second = node.worker(2)

    assert said["loaded_in"] == process.pid
    assert second["loaded_in"] == node.ahead.pid


@pytest.mark.parametrize("asked", [b"", b"\0\0\0\2{}", b"\0\0\0\x0c[1, {}, null]", b"\xff" * 9])
def test_who_asks_for_nothing_that_can_be_done_gets_no_answer_and_harms_nobody(lasting_node, asked):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WITHIN_S)
        stranger.connect(str(lasting_node.folder / "raylet.roles"))
        stranger.sendall(asked)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""

    _, second = lasting_node.worker(2)

    assert second["loaded_in"] == lasting_node.ahead.pid
