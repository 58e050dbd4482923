"""The ranks of a run in its journal: found at its end, cut off with lost work, and distinguished from damage."""

import pytest

from omniload.base.errors import IntegrityError
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.lines import WORLD, line_of, sound_lines
from omniload.mix.journal.reading import read_journal, read_tail, read_worlds
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import World
from tests.support.plane.journals import NAMES, PRINT, a_journal, opened, records_between, states

FOUND = states(41)


def a_world(step, dp=3, generation=1):
    return World(tree=ClientPlaceTree.of(dp=dp), step=step, generation=generation).to_json()


def with_worlds(path, worlds, *, every=0, stop=40):
    """Write a journal in which ranks change before the given steps are recorded."""
    with opened(path, FOUND[0]) as journal:
        for record, after in zip(records_between(FOUND[: stop + 1]), FOUND[1:], strict=False):
            for world in worlds.get(record.step, ()):
                journal.append_world(world)
            journal.append(record.to_json(NAMES))
            if every and after.step % every == 0:
                journal.append_base(after.to_json(NAMES, PRINT), after.digest())
                if worlds:
                    journal.append_world(
                        [w for s in sorted(worlds) for w in worlds[s] if s <= record.step][-1]
                    )
    return path


def test_worlds_stand_between_records_and_change_none_of_them(tmp_path):
    path = with_worlds(tmp_path / "j", {5: [a_world(3)], 9: [a_world(9, dp=4, generation=2)]})
    plain = a_journal(tmp_path / "k", FOUND)

    assert read_journal(path) == read_journal(plain)
    assert [(w["step"], w["sizes"]["dp"]) for w in read_worlds(path)] == [(3, 3), (9, 4)]
    assert read_worlds(plain) == []
    assert read_tail(plain, 3).world is None


def test_the_end_of_a_journal_says_which_ranks_there_are_though_they_changed_long_before(tmp_path):
    path = with_worlds(tmp_path / "j", {0: [a_world(0)]}, every=10)

    tail = read_tail(path, 5)

    assert tail.first_step == 30
    assert tail.world == {"kind": WORLD, **a_world(0)}


def test_ranks_that_begin_in_lost_work_are_cut_off_with_it(tmp_path):
    path = with_worlds(tmp_path / "j", {30: [a_world(29)]})

    with opened(path, FOUND[20]) as journal:
        assert not journal.has_worlds

    assert read_worlds(path) == []


def test_ranks_that_are_noted_in_lost_work_and_trained_before_it_stay_noted(tmp_path):
    changes = {
        12: [a_world(9)],
        30: [a_world(18, dp=4, generation=2), a_world(29, dp=5, generation=3)],
    }
    path = with_worlds(tmp_path / "j", changes, every=16)

    with opened(path, FOUND[20]) as journal:
        assert journal.has_worlds
        journal.append_world(a_world(20, dp=2, generation=0))
        for record in records_between(FOUND[20:]):
            journal.append(record.to_json(NAMES))

    assert [(w["step"], w["sizes"]["dp"]) for w in read_worlds(path)] == [
        (9, 3),
        (9, 3),
        (18, 4),
        (20, 2),
    ]
    assert len(read_journal(path)[1]) == 40


def test_a_run_that_goes_on_behind_a_change_knows_that_there_was_one(tmp_path):
    path = with_worlds(tmp_path / "j", {10: [a_world(10)]})

    with opened(path, FOUND[20]) as journal:
        assert journal.has_worlds
        journal.append_world(a_world(20, dp=4, generation=0))

    assert [world["step"] for world in read_worlds(path)] == [10, 20]


def test_a_journal_that_is_not_durable_keeps_its_ranks_as_it_is_cut_down(tmp_path):
    path = tmp_path / "j"
    with opened(path, FOUND[0], durable=False) as journal:
        journal.append_world(a_world(0))
        for record, after in zip(records_between(FOUND), FOUND[1:], strict=True):
            journal.append(record.to_json(NAMES))
            if after.step % 10 == 0:
                journal.append_base(after.to_json(NAMES, PRINT), after.digest())
                journal.append_world(a_world(0))

    assert read_journal(path)[0]["step"] > 0
    assert read_tail(path, 5).world["sizes"]["dp"] == 3


@pytest.mark.parametrize("step", [-1, 41, None, "3"])
def test_ranks_that_begin_nowhere_are_told_with_their_line(tmp_path, step):
    path = a_journal(tmp_path / "j", FOUND)
    last = list(sound_lines(path))[-1]
    path.write_bytes(
        path.read_bytes() + bytes(line_of({"kind": WORLD, "step": step}, last.checksum))
    )

    with pytest.raises(IntegrityError, match=r"j:42: a note of step .* where step 40 is due"):
        read_journal(path)


def test_a_journal_with_ranks_is_taken_over_as_any_other(tmp_path):
    path = with_worlds(tmp_path / "j", {30: [a_world(28)]}, stop=35)
    before = path.read_bytes()

    with Journal.taken_over(path, read_tail(path, 6), 29) as journal:
        for record in records_between(FOUND[29:]):
            journal.append(record.to_json(NAMES))

    assert path.read_bytes().startswith(before)
    assert read_journal(path) == read_journal(a_journal(tmp_path / "k", FOUND))
