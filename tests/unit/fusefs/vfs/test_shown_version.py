"""Where the name of an open file leads: before its path is looked at, and by what was found there."""

from dataclasses import replace

import pytest

from fusefs.tree.freshness import Shown
from fusefs.vfs.shown_version import Leads, Seen, after, before

BODY, VERSION = object(), object()
CLEAN = Seen(BODY, "f", VERSION, num_readers=1)


def test_the_path_of_a_file_that_rests_is_looked_at():
    assert before(CLEAN) is None


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"is_replaced": True}, Leads.ELSEWHERE),
        ({"is_replaced": True, "path": None, "version": None}, Leads.ELSEWHERE),
        ({"version": None}, Leads.HERE),
        ({"path": None}, Leads.HERE),
        ({"is_leaving": True}, Leads.HERE),
    ],
)
def test_nothing_is_asked_of_a_file_that_was_replaced_or_is_being_changed(changes, where):
    assert before(replace(CLEAN, **changes)) is where


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"body": object()},
        {"body": None, "path": None, "version": None},
        {"path": "g"},
        {"num_moves": 1},
        {"version": object()},
        {"is_leaving": True},
    ],
)
@pytest.mark.parametrize("shown", list(Shown))
def test_an_answer_of_another_state_of_things_decides_nothing(meanwhile, shown):
    assert after(CLEAN, replace(CLEAN, **meanwhile), shown) is None


@pytest.mark.parametrize("shown", list(Shown))
def test_a_file_that_was_written_to_meanwhile_stays_whatever_its_path_shows(shown):
    now = replace(CLEAN, version=None, is_changed=True, is_leaving=True)

    assert after(CLEAN, now, shown) is Leads.HERE


@pytest.mark.parametrize(
    ("shown", "now", "where"),
    [
        (Shown.SAME, CLEAN, Leads.HERE),
        (Shown.ANOTHER, CLEAN, Leads.ELSEWHERE),
        (Shown.NOTHING, CLEAN, Leads.ELSEWHERE),
        (Shown.ANOTHER, replace(CLEAN, num_readers=0), Leads.ANEW),
        (Shown.ANOTHER, replace(CLEAN, num_readers=0, passes_through=True), Leads.ELSEWHERE),
    ],
)
def test_an_answer_of_now_is_a_place_of_the_table(shown, now, where):
    assert after(CLEAN, now, shown) is where
