"""Groups of a run, summed up from its decisions."""

from dataclasses import asdict

import numpy as np
import pytest

from omniload.base.errors import IntegrityError, StateError
from omniload.mix.journal.groups import (
    GROUPS_NAME,
    Answers,
    BatchDecision,
    GroupJournal,
    RoundDecision,
    group_progress,
)

NAMES = ("code", "web")


def a_round(step, sources, verdicts):
    keys = [[source, step * 10 + i, 0] for i, source in enumerate(sources)]
    return RoundDecision(
        step=step,
        keys_N3=np.array(keys),
        verdicts_N=np.array(["krw".index(letter) for letter in verdicts], np.int8),
    )


def append(run, batch, *rounds, answers=None, groups=2):
    decision = BatchDecision(
        batch=batch,
        groups=groups,
        surplus="carry",
        rounds=rounds,
        digest="5f",
        answers=answers or {},
    )
    GroupJournal(run).append(decision)


def counts(*values):
    names = ("name", "drawn", "differing", "all_right", "all_wrong", "answers", "right")
    return dict(zip(names, values, strict=True))


def test_every_group_that_was_drawn_is_counted_once_with_its_source(tmp_path):
    append(
        tmp_path,
        3,
        a_round(7, [0, 1, 1], "krw"),
        a_round(8, [1, 1], "kk"),
        answers={1: Answers(8, 5)},
    )
    append(tmp_path, 4)  # enough waited
    append(
        tmp_path,
        5,
        a_round(9, [0, 0], "ww"),
        a_round(10, [1], "k"),
        answers={0: Answers(4, 0), 1: Answers(2, 1)},
    )

    found = group_progress(tmp_path, NAMES)

    assert (found.batches, found.next_batch, found.rounds, found.groups) == (3, 6, 4, 6)
    assert {name: asdict(each) for name, each in found.sources.items()} == {
        "code": counts("code", 3, 1, 0, 2, 4, 0),
        "web": counts("web", 5, 3, 1, 1, 10, 6),
    }


def test_a_run_without_groups_has_none(tmp_path):
    assert group_progress(tmp_path, NAMES) is None


def test_a_line_in_mid_write_is_not_there_yet_and_a_damaged_one_is_named(tmp_path):
    for batch in range(2):
        append(tmp_path, batch, a_round(batch, [0], "k"))
    path = tmp_path / GROUPS_NAME
    whole = path.read_bytes()

    path.write_bytes(whole[:-9])
    assert group_progress(tmp_path, NAMES).batches == 1
    path.write_bytes(whole.replace(b'"groups":2', b'"groups":3', 1))
    with pytest.raises(IntegrityError, match="jsonl:1: the line of a batch of groups is damaged"):
        group_progress(tmp_path, NAMES)


def test_lines_that_do_not_follow_or_are_of_other_sources_are_refused(tmp_path):
    for batch in range(3):
        append(tmp_path / "gap", batch)
    path = tmp_path / "gap" / GROUPS_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    append(tmp_path / "other", 0, a_round(0, [2], "k"))

    with pytest.raises(StateError, match="has batch 2 where batch 1 is due"):
        group_progress(tmp_path / "gap", NAMES)
    with pytest.raises(StateError, match="groups of source 2, and the run has 2 sources"):
        group_progress(tmp_path / "other", NAMES)
