"""Lines that ranks append: those of some steps, and how far ranks say that they are."""

import os

from omniload.mix.journal.bounded import last_told, take_from


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
