"""Lines that ranks append: those of some steps, and the steps that ranks have reached."""

import os

from omniload.base import clock
from omniload.mix.journal.bounded import last_told, take_from
from omniload.mix.journal.losses import LossLog, SourceLoss, losses_of_step
from omniload.mix.journal.rewards import RewardLog


def written(folder, rank, steps, at_s=100.0):
    file = folder / f"rank-{rank}.jsonl"
    file.write_text("".join(f'{{"step":{step},"n":1}}\n' for step in steps))
    os.utime(file, (at_s, at_s))
    return file


def test_lines_of_steps_to_come_are_passed_over(tmp_path):
    written(tmp_path, 0, [3, 4, 5, 9, 4, 5])
    found = []

    behind = take_from(tmp_path, 4, found.append, 6)

    assert [int(line[8:9]) for line in found] == [4, 5, 4, 5]
    assert behind == 6
    assert take_from(tmp_path, 0, found.append) == 10


def test_ranks_are_where_their_last_lines_are_and_not_where_a_start_before_had_come(tmp_path):
    assert last_told(tmp_path, 0.0) is None
    written(tmp_path, 0, [8, 9, 3, 4])
    written(tmp_path, 1, [8, 9], at_s=50.0)
    with written(tmp_path, 2, [3, 5], at_s=100.0).open("a") as torn:
        torn.write('{"step":77')

    assert last_told(tmp_path, 0.0) == 9
    assert last_told(tmp_path, 60.0) == 5


def test_what_ranks_told_behind_a_clock_that_was_set_back_is_of_their_start(tmp_path, monkeypatch):
    losses, rewards = LossLog(tmp_path, 0), RewardLog(tmp_path, 0)
    told = SourceLoss(3.0, 2)
    losses.add_source(1, "web", told, None)
    rewards.add(1, {})
    began_s = clock.time.time()
    monkeypatch.setattr(clock.time, "time", lambda: began_s - 3_600)
    losses.add_source(4, "web", told, None)
    rewards.add(5, {})
    for path in tmp_path.rglob("*.jsonl"):
        os.utime(path, (began_s - 3_600, began_s - 3_600))

    folders = [tmp_path / name for name in ("losses", "rewards")]
    assert [last_told(folder, began_s) for folder in folders] == [4, 5]
    assert [last_told(folder, began_s + 60) for folder in folders] == [None, None]


def test_a_report_that_is_made_again_behind_a_clock_that_was_set_back_counts(tmp_path, monkeypatch):
    log, now_s = LossLog(tmp_path, 0), clock.time.time()
    for loss, clock_s in ((1.0, now_s), (2.0, now_s - 3_600)):
        monkeypatch.setattr(clock.time, "time", lambda clock_s=clock_s: clock_s)
        log.add_source(4, "web", SourceLoss(loss, 1), None)

    assert losses_of_step(tmp_path, 4).sources["web"].mean == 2.0
