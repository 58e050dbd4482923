"""The machine between held reads and the bytes they wait for."""

import pytest

from snapshot.image.precontent import (
    AccessAsked,
    AllowAccess,
    CompleteFile,
    DenyAccess,
    Filler,
    FillRange,
    RangeFailed,
    RangeFilled,
    RangesAtHand,
    Stopped,
)

P = 4096
MIB = 1 << 20


def a_filler(*pages):
    return Filler(sizes=[count * P for count in pages or (8,)])


def asked(token, page, pages=1, file=0):
    return AccessAsked(token, file, page * P, pages * P)


def urgent(page, pages=1, file=0):
    return FillRange(file, page * P, pages * P, True)


def behind(page, pages=1, file=0):
    return FillRange(file, page * P, pages * P, False)


def here(page, pages=1, file=0):
    return RangeFilled(file, page * P, pages * P)


def failed(page, pages=1, file=0):
    return RangeFailed(file, page * P, pages * P)


def at_hand(page, pages=1, file=0):
    return RangesAtHand(file, ((page * P, pages * P),))


def test_a_read_of_a_hole_waits_until_it_is_filled():
    filler = a_filler()

    assert filler.handle(asked(7, 2, 2)) == (urgent(2, 2),)
    assert filler.handle(here(2, 2)) == (AllowAccess(7),)


def test_a_read_of_what_is_there_goes_on_at_once():
    filler = a_filler()
    filler.handle(asked(1, 2))
    filler.handle(here(2))

    assert filler.handle(asked(2, 2)) == (AllowAccess(2),)


def test_a_page_is_filled_once_however_many_ask():
    filler = a_filler()

    assert filler.handle(asked(1, 0, 4)) == (urgent(0, 4),)
    assert filler.handle(asked(2, 1, 2)) == ()
    assert filler.handle(asked(3, 2, 4)) == (urgent(4, 2),)
    assert filler.handle(here(0, 4)) == (AllowAccess(1), AllowAccess(2))
    assert filler.handle(here(4, 2)) == (AllowAccess(3),)


def test_only_what_is_missing_is_filled():
    filler = a_filler()
    filler.handle(asked(1, 2, 2))
    filler.handle(here(2, 2))

    assert filler.handle(asked(2, 0, 8)) == (urgent(0, 2), urgent(4, 4))
    assert filler.handle(here(0, 2)) == ()
    assert filler.handle(here(4, 4)) == (AllowAccess(2), CompleteFile(0))


def test_a_read_that_begins_and_ends_inside_pages_waits_for_all_of_them():
    filler = a_filler()

    assert filler.handle(AccessAsked(1, 0, P - 1, 2)) == (urgent(0, 2),)


def test_a_read_past_the_end_waits_for_nothing_that_is_not_there():
    filler = a_filler(2)

    assert filler.handle(AccessAsked(1, 0, P, 1 << 62)) == (urgent(1),)
    assert filler.handle(here(1)) == (AllowAccess(1),)
    assert filler.handle(AccessAsked(2, 0, 2 * P, P)) == (AllowAccess(2),)


def test_a_failure_ends_every_read_that_waits_for_it_and_no_other():
    filler = a_filler()
    filler.handle(asked(1, 0, 2))
    filler.handle(asked(2, 1, 3))
    filler.handle(asked(3, 6))

    assert filler.handle(failed(0, 2)) == (DenyAccess(1), DenyAccess(2))
    assert filler.handle(here(6)) == (AllowAccess(3),)


def test_what_failed_is_tried_again_for_the_next_reader():
    filler = a_filler()
    filler.handle(asked(1, 0, 2))
    filler.handle(failed(0, 2))

    assert filler.handle(asked(2, 0)) == (urgent(0),)


def test_what_came_before_a_failure_stays():
    filler = a_filler()
    filler.handle(asked(1, 0, 2))
    filler.handle(here(0, 1))
    filler.handle(failed(0, 2))

    assert filler.handle(asked(2, 0)) == (AllowAccess(2),)
    assert filler.left_bytes(0) == 7 * P


def test_files_do_not_answer_for_each_other():
    filler = a_filler(4, 4)

    assert filler.handle(asked(1, 0, file=1)) == (urgent(0, file=1),)
    assert filler.handle(here(0, file=0)) == ()
    assert filler.handle(failed(0, file=0)) == ()
    assert filler.handle(here(0, file=1)) == (AllowAccess(1),)


def test_what_is_at_hand_goes_one_range_after_the_other():
    filler = a_filler(1024)

    assert filler.handle(at_hand(0, 600)) == (behind(0, 256),)
    assert filler.handle(at_hand(900, 4)) == ()
    assert filler.handle(here(0, 256)) == (behind(256, 256),)
    assert filler.handle(here(256, 256)) == (behind(512, 88),)
    assert filler.handle(here(512, 88)) == (behind(900, 4),)
    assert filler.handle(here(900, 4)) == ()


def test_a_range_at_hand_with_edges_inside_pages_loses_the_edges():
    filler = a_filler()

    assert filler.handle(RangesAtHand(0, ((100, 2 * P), (5 * P, P - 1)))) == (behind(1),)
    assert filler.handle(here(1)) == ()


def test_what_is_here_or_coming_is_not_filled_from_behind():
    filler = a_filler()
    filler.handle(asked(1, 0, 3))
    filler.handle(here(0, 3))
    filler.handle(asked(2, 4))

    assert filler.handle(at_hand(0, 8)) == (behind(3),)
    assert filler.handle(here(3)) == (behind(5, 3),)


def test_a_reader_does_not_wait_for_what_is_queued_behind():
    filler = a_filler(1024)
    filler.handle(at_hand(0, 1024))

    assert filler.handle(asked(1, 700)) == (urgent(700),)
    assert filler.handle(here(700)) == (AllowAccess(1),)


def test_a_reader_of_a_range_that_comes_from_behind_waits_for_it():
    filler = a_filler()
    filler.handle(at_hand(0, 8))

    assert filler.handle(asked(1, 2)) == ()
    assert filler.handle(here(0, 8)) == (AllowAccess(1), CompleteFile(0))


def test_a_failure_behind_goes_on_with_the_next_and_ends_who_waits():
    filler = a_filler(1024)
    filler.handle(at_hand(0, 512))
    filler.handle(asked(1, 10))

    assert filler.handle(failed(0, 256)) == (DenyAccess(1), behind(256, 256))


def test_a_file_is_complete_when_its_last_page_is():
    filler = a_filler(3)

    filler.handle(here(0, 2))
    assert filler.holes(0) == ((2 * P, P),)
    assert filler.handle(here(2)) == (CompleteFile(0),)
    assert filler.left_bytes(0) == 0
    assert filler.holes(0) == ()


def test_holes_are_what_is_left():
    filler = a_filler()
    filler.handle(here(1, 2))
    filler.handle(here(5))

    assert filler.holes(0) == ((0, P), (3 * P, 2 * P), (6 * P, 2 * P))


def test_the_end_denies_who_waits_and_who_comes():
    filler = a_filler()
    filler.handle(here(5))
    filler.handle(asked(1, 0))
    filler.handle(asked(2, 3))

    assert filler.handle(Stopped()) == (DenyAccess(1), DenyAccess(2))
    assert filler.handle(asked(3, 0)) == (DenyAccess(3),)
    assert filler.handle(asked(4, 5)) == (AllowAccess(4),)
    assert filler.handle(at_hand(0, 8)) == ()


def test_what_arrives_after_the_end_starts_nothing():
    filler = a_filler(1024)
    filler.handle(at_hand(0, 1024))
    filler.handle(Stopped())

    assert filler.handle(here(0, 256)) == ()


def test_sizes_that_are_no_whole_pages_are_refused():
    with pytest.raises(ValueError, match="4097"):
        Filler(sizes=[P, P + 1])


def test_a_file_of_many_gigabytes_is_queued_without_being_looked_at_whole_each_time():
    filler = a_filler(4 << 18)

    assert filler.handle(at_hand(0, 4 << 18)) == (behind(0, MIB // P),)
    assert filler.handle(here(0, MIB // P)) == (behind(MIB // P, MIB // P),)
