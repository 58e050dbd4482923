"""Rewards of sources in the run's folder: sums of the steps asked for, whatever is damaged passed over."""

import pytest

from omniload.mix.journal.rewards import (
    RewardLog,
    SourceRewards,
    rewards_by_source,
    rewards_by_turn,
)


def some(groups, kept, *, right=3):
    return SourceRewards(groups=groups, kept=kept, answers=groups * 4, right=right)


def test_what_ranks_report_is_summed_by_source_from_a_step_on(tmp_path):
    first, second = RewardLog(tmp_path, 0), RewardLog(tmp_path, 1)
    first.add(4, {"web": some(9, 9)})
    first.add(5, {"code": some(2, 1), "web": some(3, 0)})
    second.add(6, {"web": some(4, 2)})

    found, stop = rewards_by_source(tmp_path, 5)

    assert found == {"code": some(2, 1), "web": some(7, 2, right=6)}
    assert stop == 7


def test_words_on_a_source_are_summed_beside_groups_and_by_turns(tmp_path):
    log = RewardLog(tmp_path, 0)
    for step in (4, 5, 9):
        log.add(step, {"web": SourceRewards(reward=0.5 * step, labels=step)})
    log.add(5, {"web": some(3, 1)})

    both = SourceRewards(groups=3, kept=1, answers=12, right=3, reward=4.5, labels=9)
    last = SourceRewards(reward=4.5, labels=9)
    assert rewards_by_turn(tmp_path, 4, 3) == {0: {"web": both}, 1: {"web": last}}
    assert rewards_by_turn(tmp_path, 5, 9)[0]["web"].labels == 14


def test_without_reports_there_is_nothing(tmp_path):
    assert rewards_by_source(tmp_path, 3) == ({}, 3)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step":5,"names":["web"],"groups":[1]}\n',
        b'{"step":5,"names":["web"],"groups":[1],"kept":[2],"answers":[4],"right":[1]}\n',
        b'{"step":5,"names":["web"],"groups":[1],"kept":[1],"answers":[4],"right":[-1]}\n',
        b'{"step":5,"names":["web"],"groups":[1,2],"kept":[1],"answers":[4],"right":[1]}\n',
        b'{"step":5,"names":["a","b"],"groups":[1,"x"],"kept":[1,1],"answers":[4,4],"right":[1,1]}\n',
        b'{"step":5,"names":["a"],"groups":[0],"kept":[0],"answers":[0],"right":[0],"labels":[-4],"reward":[1.0]}\n',
        b'{"step":5,"names":["a"],"groups":[0],"kept":[0],"answers":[0],"right":[0],"labels":[4],"reward":[null]}\n',
        b'{"step":5,"na\n',
        b"text\n",
    ],
)
def test_a_damaged_line_is_passed_over_whole(tmp_path, line, caplog):
    RewardLog(tmp_path, 0).add(5, {"web": some(2, 1)})
    path = tmp_path / "rewards" / "rank-0.jsonl"
    path.write_bytes(line + path.read_bytes() + b'{"step":6,"names":["we')

    assert rewards_by_source(tmp_path, 0) == ({"web": some(2, 1)}, 6)
    assert ("passed over" in caplog.text) == line.startswith(b"{")
