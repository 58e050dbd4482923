"""Forks of a rank, as a user's loop makes them: they end normally, and the plane belongs to their parent."""

import json
import sys

import pytest

import omniload
from tests.support.plane.corpora import a_mixed_corpus
from tests.support.programs import finished

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.scripts_start_warm,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]

STEPS, LIMIT_S = 6, 120
FORKING = f"""
import json, os, sys
import omniload

def forked(act):
    if (pid := os.fork()) == 0:
        act()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fail():
    raise KeyError("of a child")

def close():
    loader.close()
    sys.exit()

tokens, codes = [], []
with omniload.open(json.loads(sys.stdin.read()), runtime="ray", steps={STEPS}, arrays="numpy") as loader:
    for batch in loader:
        tokens.append(batch.tokens.tolist())
        if len(tokens) == 2:  # each leaves the block, and ends as Python does
            codes = [forked(act) for act in (lambda: sys.exit(3), fail, close)]
print(json.dumps([tokens, codes]))
"""


def test_forks_that_end_in_order_leave_the_plane_and_every_step_to_their_parent(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mix = a_mixed_corpus(tmp_path, rows=6, micro_rows=1)
    with omniload.open(mix, runtime="local", steps=STEPS, arrays="numpy") as loader:
        local = [batch.tokens.tolist() for batch in loader]

    done = finished(
        [sys.executable, "-c", FORKING],
        limit_s=LIMIT_S,
        input=mix.model_dump_json(exclude_unset=True),
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    tokens, codes = json.loads(done.stdout.splitlines()[-1])
    assert (tokens, codes) == (local, [3, 1, 0])
    assert "SIGSEGV" not in done.stderr
