"""What is known of a copy after a script of events, and which copies may stay: no disk is asked."""

from fusefs.cache.copy_state import CopyState, Ledger
from tests.support.fusefs.disk import a_version


class Files:
    """Descriptors of a copy: only their users are counted."""

    def __init__(self):
        self.users = 1

    def acquire(self):
        self.users += 1

    def release(self):
        self.users -= 1


def a_copy():
    return CopyState.empty(a_version(1, 3))


def known(copy):
    return [bool(c) for c in copy.checksums_U], copy.verified_U.tolist(), copy.damaged


def test_a_unit_that_was_stored_is_here_and_verified():
    copy = a_copy()
    copy.storing.add(1)

    copy.stored(1, 77)

    assert known(copy) == ([False, True, False], [False, True, False], set())
    assert copy.storing == set()


def test_a_unit_that_the_disk_refused_is_not_here_and_keeps_its_room():
    copy = a_copy()
    copy.storing.add(1)

    copy.stored(1, 0)

    assert known(copy) == ([False] * 3, [False] * 3, {1})
    assert copy.storing == set()


def test_a_unit_that_is_lost_is_not_here_until_it_is_stored_again():
    copy = a_copy()
    copy.stored(2, 77)

    copy.lost(2)

    assert known(copy) == ([False] * 3, [False] * 3, {2})


def test_what_is_cleared_has_neither_units_nor_room():
    copy = a_copy()
    copy.stored(0, 77)
    copy.lost(0)
    copy.stored(1, 78)
    copy.storing.add(2)

    copy.clear()

    assert known(copy) == ([False] * 3, [False] * 3, set())
    assert copy.storing == set()


def test_files_are_borrowed_until_they_are_retired_and_retired_once():
    copy = a_copy()
    assert copy.borrowed() is None
    copy.retire()
    copy.files = files = Files()

    assert copy.borrowed() is files
    assert files.users == 2
    copy.retire()
    copy.retire()

    assert (files.users, copy.borrowed()) == (1, None)


# The account


def test_no_room_is_made_where_it_would_not_be_enough():
    ledger = Ledger(10)
    ledger.charge("a", 4)
    ledger.charge("b", 4)
    ledger.pin("b")

    assert ledger.make_room("c", 7) is None
    assert "a" in ledger
    assert ledger.make_room("c", 6) == ["a"]
    assert ledger.used_bytes == 4


def test_a_copy_makes_no_room_for_itself():
    ledger = Ledger(10)
    ledger.charge("a", 8)

    assert ledger.make_room("a", 4) is None
    assert ledger.make_room("b", 4) == ["a"]


def test_a_pin_outlives_the_bytes_and_is_counted():
    ledger = Ledger(10)
    ledger.pin("a")
    ledger.pin("a")
    ledger.charge("a", 8)
    ledger.forget("a")
    ledger.charge("a", 6)
    ledger.unpin("a")

    assert ledger.make_room("b", 8) is None
    ledger.unpin("a")
    ledger.unpin("never")
    assert ledger.make_room("b", 8) == ["a"]
    assert ledger.size_of("a") == 0
