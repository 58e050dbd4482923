"""A node and its directory of peers: lists that change, a directory that is away, late, broken or killed."""

import logging
import os
import signal
import sys

import pytest

from snapshot.image.peer_directory import group_of
from snapshot.image.peer_joining import JoinedPeers

ONE, TWO = "node1:7070", "node2:7070"


@pytest.fixture
def joining(request, caplog):
    """Start a node whose directory is a few lines of Python; ended at the end."""
    caplog.set_level(logging.INFO, "omniload")
    made = []

    def start(script, **changes):
        line = (sys.executable, "-c", f"import sys, json\nnode = json.loads(input())\n{script}")
        given = {"address": "auto", "name": ONE, "group": group_of(""), "blobs": ["sha256:a"]}
        made.append(JoinedPeers(**given | changes, line=line))
        return made[-1]

    yield start
    for each in made:
        each.close()


def says(**what):
    return f"print(json.dumps({what!r}), flush=True)\n"


UNTIL_THE_END = "sys.stdin.read()\n"


def test_the_directory_is_told_who_this_node_is_and_names_the_others(joining):
    script = "print(json.dumps({'members': [node['name'], node['address'], *node['blobs']]}), flush=True)\n"

    joined = joining(script + UNTIL_THE_END)

    assert joined.wait(20)
    assert joined.members() == (ONE, "auto", "sha256:a")


def test_a_list_that_changes_is_followed(joining, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = says(members=[ONE]) + f"open({str(gate)!r}).read()\n" + says(members=[ONE, TWO])
    joined = joining(script)
    assert joined.wait(20)
    assert joined.members() == (ONE,)

    gate.write_text("go")
    joined._reader.join(20)

    assert joined.members() == (ONE, TWO)


def test_a_directory_that_cannot_be_reached_costs_a_warning(joining, caplog):
    joined = joining(says(problem="ConnectionError: nobody there") + UNTIL_THE_END)

    assert joined.wait(20), "no start waits for longer than it takes to know"

    assert joined.members() == ()
    assert "ConnectionError: nobody there; going on with the registry" in caplog.text


def test_a_directory_that_is_late_is_not_waited_for(joining, caplog):
    joined = joining(UNTIL_THE_END)

    assert not joined.wait(0.01)

    assert "has not answered in 0 s" in caplog.text
    assert joined.members() == ()


def test_who_was_known_stays_known_when_the_directory_is_killed(joining, caplog):
    joined = joining(says(members=[ONE, TWO]) + UNTIL_THE_END)
    assert joined.wait(20)

    os.kill(joined._process.pid, signal.SIGKILL)
    joined._reader.join(20)

    assert joined.members() == (ONE, TWO)
    assert "has ended; 2 peers stay known" in caplog.text


def test_a_process_that_ends_before_it_answers_is_not_waited_for(joining, caplog):
    joined = joining("sys.exit(3)")

    assert joined.wait(20)

    assert "has ended; 0 peers stay known" in caplog.text


def test_what_libraries_print_in_between_is_passed_over(joining):
    noise = "print('2026 INFO a library starts')\nprint('[]')\nprint('7')\n"

    joined = joining(noise + says(members=[TWO]) + UNTIL_THE_END)

    assert joined.wait(20)
    assert joined.members() == (TWO,)


def test_closing_ends_the_process_and_leaves_no_warning(joining, caplog):
    joined = joining(says(members=[ONE]) + UNTIL_THE_END)
    assert joined.wait(20)

    joined.close()

    assert joined._process.returncode == 0
    assert not joined._reader.is_alive()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_process_that_does_not_end_is_killed(joining, monkeypatch):
    monkeypatch.setattr("snapshot.image.peer_joining._GONE_WITHIN_S", 0.2)
    joined = joining(says(members=[ONE]) + "import signal\nsignal.pause()\n")
    assert joined.wait(20)

    joined.close()

    assert joined._process.returncode == -signal.SIGKILL
