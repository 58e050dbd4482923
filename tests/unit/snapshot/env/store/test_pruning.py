"""What a store may lose: packs that nothing has named for two graces, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from snapshot.env.store.pruning import Verdict, judged

NOW, GRACE = 1000, 100


def verdict(packs, marks=None, named=()):
    return judged(packs, marks or {}, set(named), now_ns=NOW, grace_ns=GRACE)


def test_a_pack_that_is_named_is_left_alone():
    assert verdict({"p": 0}, named=["p"]) == Verdict((), (), ())


def test_an_old_pack_that_nothing_names_is_condemned_first():
    assert verdict({"p": 0}) == Verdict((), ("p",), ())


def test_a_pack_that_was_just_written_may_be_of_a_save_under_way():
    assert verdict({"p": NOW - GRACE + 1}) == Verdict((), (), ())
    assert verdict({"p": NOW - GRACE}) == Verdict((), ("p",), ())


def test_a_condemned_pack_is_removed_a_grace_later():
    assert verdict({"p": 0}, {"p": NOW - GRACE + 1}) == Verdict((), (), ())
    assert verdict({"p": 0}, {"p": NOW - GRACE}) == Verdict(("p",), (), ())


def test_a_condemned_pack_that_is_named_again_is_pardoned():
    assert verdict({"p": 0}, {"p": 0}, named=["p"]) == Verdict((), (), ("p",))


def test_a_mark_whose_pack_is_gone_goes_too():
    assert verdict({}, {"p": NOW}) == Verdict((), (), ("p",))


NAMES = st.sampled_from("abcdef")
TIMES = st.dictionaries(NAMES, st.integers(0, NOW))


@given(TIMES, TIMES, st.sets(NAMES))
def test_nothing_that_is_named_or_new_is_ever_touched(packs, marks, named):
    removed, condemned, pardoned = verdict(packs, marks, named)

    assert not named & {*removed, *condemned}
    assert {*removed, *condemned} <= packs.keys()
    assert all(marks[pack] <= NOW - GRACE for pack in removed)
    assert all(packs[pack] <= NOW - GRACE for pack in condemned)
    assert not {*removed} & {*condemned} | {*pardoned} & {*removed, *condemned}
    assert {*pardoned} == {pack for pack in marks if pack in named or pack not in packs}


@given(TIMES, st.sets(NAMES))
def test_two_runs_a_grace_apart_leave_only_what_is_named(packs, named):
    first = judged(packs, {}, named, now_ns=2 * NOW, grace_ns=GRACE)
    marks = dict.fromkeys(first.condemned, 2 * NOW)
    second = judged(packs, marks, named, now_ns=2 * NOW + GRACE, grace_ns=GRACE)

    assert packs.keys() - {*second.removed} == packs.keys() & named
