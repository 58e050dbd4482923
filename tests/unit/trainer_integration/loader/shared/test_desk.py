"""Who makes which batch, and who gets it."""

import pytest

from trainer_integration.loader.shared.desk import (
    Asked,
    Desk,
    Dropped,
    Ended,
    Give,
    Joined,
    Left,
    Made,
    Order,
    Release,
    Replace,
)
from trainer_integration.loader.shared.frames import Frame, Kind


def a_desk(*, ranks=2, workers=1, ahead=2):
    desk = Desk(workers, ahead, ranks)
    for rank in range(ranks):
        desk.handle(Joined(rank))
    return desk


def made(desk, job, *, worker=0, slots=()):
    return desk.handle(Made(worker, Frame(Kind.BATCH, job, b"made", slots)))


def given(commands):
    return [(each.rank, each.frame.number) for each in commands if isinstance(each, Give)]


def ordered(commands):
    return [(each.worker, each.frame.body) for each in commands if isinstance(each, Order)]


def test_a_batch_that_two_ranks_ask_for_is_ordered_once_and_given_to_both():
    desk = a_desk()

    assert ordered(desk.handle(Asked(0, 7, b"a"))) == [(0, b"a")]
    assert desk.handle(Asked(1, 9, b"a")) == []
    commands = made(desk, 0, slots=(3,))

    assert given(commands) == [(0, 7), (1, 9)]
    assert commands[-1] == Release((3,))


def test_a_rank_that_asks_later_gets_the_batch_that_is_kept():
    desk = a_desk()
    desk.handle(Asked(0, 0, b"a"))
    assert not [each for each in made(desk, 0, slots=(3,)) if isinstance(each, Release)]

    assert given(desk.handle(Asked(1, 0, b"a"))) == [(1, 0)]
    assert desk.made == 1


def test_one_rank_that_asks_twice_for_the_same_has_it_made_twice():
    desk = a_desk()
    desk.handle(Asked(0, 0, b"a"))
    made(desk, 0)

    assert ordered(desk.handle(Asked(0, 1, b"a"))) == [(0, b"a")]


def test_what_the_first_rank_is_given_is_kept_for_one_that_has_not_joined_yet():
    desk = Desk(1, 2, 2)
    desk.handle(Joined(0))
    desk.handle(Asked(0, 0, b"a"))
    made(desk, 0, slots=(3,))
    desk.handle(Joined(1))

    commands = desk.handle(Asked(1, 0, b"a"))
    assert given(commands) == [(1, 0)]
    assert commands[-1] == Release((3,))


def test_a_single_rank_keeps_nothing():
    desk = a_desk(ranks=1)
    desk.handle(Asked(0, 0, b"a"))

    assert made(desk, 0, slots=(1, 2))[-1] == Release((1, 2))


def test_ranks_that_never_ask_for_the_same_keep_nothing_in_the_end():
    desk, released = a_desk(), 0
    for number in range(200):
        desk.handle(Asked(number % 2, number, b"%d" % number))
        commands = made(desk, number, slots=(number,))
        released += sum(isinstance(each, Release) for each in commands)

    assert released == 200


def test_no_more_is_kept_than_ranks_may_lag_behind():
    desk, released = a_desk(ahead=2), 0
    for number in range(40):
        desk.handle(Asked(0, number, b"%d" % number))
        released += sum(isinstance(each, Release) for each in made(desk, number))

    assert released == 40 - 2 * (2 + 2)


def test_a_rank_far_ahead_does_not_keep_another_waiting():
    desk = a_desk()
    for task in range(6):
        desk.handle(Asked(0, task, b"a%d" % task))
    desk.handle(Asked(1, 0, b"b0"))

    # A worker has two batches at once; then it is the other rank's turn.
    assert ordered(made(desk, 0)) == [(0, b"b0")]
    assert ordered(made(desk, 1)) == [(0, b"a2")]


def test_what_is_dropped_before_a_worker_has_it_is_not_made():
    desk = a_desk()
    for task in range(4):
        desk.handle(Asked(0, task, b"a%d" % task))
    desk.handle(Dropped(0, 2))

    assert ordered(made(desk, 0)) == [(0, b"a3")]


def test_what_one_rank_drops_another_still_gets():
    desk = a_desk()
    desk.handle(Asked(0, 0, b"a"))
    desk.handle(Asked(1, 0, b"a"))
    desk.handle(Dropped(0, 0))

    assert given(made(desk, 0)) == [(1, 0)]


def test_a_rank_that_leaves_hands_on_what_others_wait_for():
    desk = a_desk()
    for task in range(4):
        desk.handle(Asked(0, task, b"a%d" % task))
    desk.handle(Asked(1, 5, b"a3"))
    desk.handle(Left(0))

    assert ordered(made(desk, 0)) == [(0, b"a3")]
    made(desk, 1)
    assert given(made(desk, 3)) == [(1, 5)]


def test_the_batch_of_a_worker_that_ends_is_told_and_its_next_is_made_by_another():
    desk = a_desk()
    desk.handle(Asked(0, 0, b"a"))
    desk.handle(Asked(1, 1, b"b"))

    lost, replaced, *rest = desk.handle(Ended(0, "killed"))

    assert lost == Give(0, Frame(Kind.LOST, 0, b"killed"))
    assert replaced == Replace(0)
    assert ordered(rest) == [(0, b"b")]


@pytest.mark.parametrize("workers", [1, 3])
def test_orders_go_to_the_worker_with_the_fewest(workers):
    desk = a_desk(workers=workers)
    commands = [each for task in range(9) for each in desk.handle(Asked(0, task, b"%d" % task))]

    assert [worker for worker, _ in ordered(commands)] == [*range(workers)] * 2
