"""Ranks that train on the same rows, over torch's gloo in real processes."""

import json
import re
import subprocess

import pytest

from tests.house.modules import ROOT
from tests.support.ports import free_port

RANK = ROOT / "tests" / "support" / "trainer" / "processes" / "peer_rank.py"
LIMIT_S = 120


def two(warm_python, plan):
    """Run both ranks; return what each said."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [warm_python.path, RANK, str(rank), str(port), plan],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    if not any(out for out, _ in ended):
        pytest.fail(str([err[-1000:] for _, err in ended]))
    return [[json.loads(line) for line in out.splitlines()] for out, _ in ended]


def test_messages_come_whole_and_in_order_also_after_waits_longer_than_the_groups_limit(
    warm_python,
):
    _, taken = two(warm_python, "late")

    batches = [message for message in taken if "kind" in message]
    assert [message["tokens"] for message in batches] == [
        [1000 * k, 1000 * k * k] for k in range(6)
    ]
    assert [message["state"] for message in batches] == [
        "",
        '{"step": 1}',
        "",
        '{"step": 3}',
        "",
        '{"step": 5}',
    ]
    assert any("until a batch comes from rank 0" in m["message"] for m in taken if "error" in m)


def test_a_rank_that_fetches_and_dies_is_named_by_its_peer(warm_python):
    _, taken = two(warm_python, "killed")

    assert [message["step"] for message in taken[:-1]] == list(range(len(taken) - 1))
    assert taken[-1]["error"] == "UnavailableError"
    # Killed as it sends one, it has sent a part of that.
    lost = "a connection was lost before (the rest of )?a batch comes from rank 0"
    assert re.search(lost, taken[-1]["message"])
    assert "waited" not in taken[-1]["message"]


def test_a_peer_that_does_not_come_is_named(warm_python):
    (refused,), _ = two(warm_python, "absent")

    assert refused["error"] == "UnavailableError"
    assert "has not met ranks [0, 1]" in refused["message"]


def test_exchanges_meet_whatever_other_groups_a_rank_has_made_before(warm_python):
    found = two(warm_python, "exchange")

    for rank, said in enumerate(found):
        assert said == [
            {"rank": rank, "size": 2, "parts": [[0], [0, 0]]},
            {"rank": rank, "size": 2, "parts": [[1], [1, 1]]},
            {"rank": 0, "size": 1, "parts": [[2]]},
        ]
