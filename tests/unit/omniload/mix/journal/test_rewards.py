"""Rewards of sources in the run's folder: sums of the steps asked for, whatever is damaged passed over."""

import pytest

from omniload.mix.journal.rewards import RewardLog, SourceRewards, rewards_by_source


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
