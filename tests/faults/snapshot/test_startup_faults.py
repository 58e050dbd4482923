"""Writers that are killed, and many that write at once, leave a log that is read."""

import subprocess
import sys

import pytest

from snapshot.startup.attempts import attempts_of
from snapshot.startup.events import LOG_VARIABLE, stage
from snapshot.startup.reading import read_events

pytestmark = pytest.mark.scripts_start_warm

_HANG = """
import sys
from snapshot.startup.events import stage
with stage("image", {"OMNILOAD_STARTUP_LOG": sys.argv[1], "OMNILOAD_NODE": "a"}) as tally:
    tally.add("registry", 7)
    print("in the stage", flush=True)
    sys.stdin.read()
"""
_MANY = """
import sys
from snapshot.startup.events import stage
sys.stdin.read()
for _ in range(100):
    with stage("environment", {"OMNILOAD_STARTUP_LOG": sys.argv[1], "OMNILOAD_NODE": "a"}) as tally:
        tally.add("store", 1)
"""


def started(script, log):
    return subprocess.Popen(
        [sys.executable, "-c", script, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_stage_is_unfinished_and_the_next_one_whole(tmp_path):
    log = tmp_path / "a.jsonl"
    with started(_HANG, log) as process:
        assert process.stdout.readline() == "in the stage\n"
        process.kill()
    with log.open("rb+") as file:  # a kill within a write, as a full disk cuts it too
        file.seek(0, 2)
        file.write(b'{"version":1,"job":"","no')
    with stage("environment", {LOG_VARIABLE: str(log), "OMNILOAD_NODE": "a"}) as tally:
        tally.add("disk", 5)

    found = read_events([log])
    (attempt,) = attempts_of(found.events)

    image, environment = attempt.stages
    assert found.torn == 1
    assert (image.name, image.unfinished, dict(image.bytes)) == ("image", ("a",), {})
    assert (environment.unfinished, dict(environment.bytes)) == ((), {"disk": 5})


def test_processes_that_append_at_once_tear_no_line(tmp_path):
    log = tmp_path / "a.jsonl"
    writers = [started(_MANY, log) for _ in range(4)]
    for writer in writers:
        writer.stdin.close()
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    for writer in writers:
        writer.stdout.close()

    found = read_events([log])
    (attempt,) = attempts_of(found.events)

    assert (found.torn, attempt.strays, attempt.backward) == (0, 0, 0)
    assert len(attempt.stages[0].nodes[0].runs) == 400
    assert dict(attempt.bytes) == {"store": 400}
