"""The Supervisor: restarts the whole job, as often as allowed, and knows when not to."""

import pytest

from omniload.machine.job_restarts import (
    AskRanks,
    CheckpointCommitted,
    CheckpointDamaged,
    EndJob,
    RankExited,
    RanksStopped,
    Start,
    StartRanks,
    Stop,
    StopRanks,
    Succeed,
    Supervisor,
)


def a_supervisor(*events, num_ranks=2, max_restarts=1):
    supervisor = Supervisor(num_ranks=num_ranks, max_restarts=max_restarts)
    supervisor.handle(Start())
    for event in events:
        supervisor.handle(event)
    return supervisor


def exited(rank, code=0, attempt=0):
    return RankExited(rank=rank, attempt=attempt, code=code)


def test_it_starts_with_the_first_attempt():
    assert Supervisor(num_ranks=1, max_restarts=0).handle(Start()) == (StartRanks(attempt=0),)


def test_the_job_succeeds_when_every_rank_is_done():
    supervisor = a_supervisor()

    assert supervisor.handle(exited(1)) == ()
    assert supervisor.handle(exited(0)) == (Succeed(),)


def test_a_rank_that_reports_twice_is_counted_once():
    assert a_supervisor(exited(1)).handle(exited(1)) == ()


@pytest.mark.parametrize("code", [1, 3, -9])
def test_a_rank_that_dies_stops_all_and_then_starts_all(code):
    supervisor = a_supervisor()

    assert supervisor.handle(exited(1, code)) == (StopRanks(),)
    assert supervisor.handle(RanksStopped()) == (StartRanks(attempt=1),)


def test_ranks_done_before_a_restart_must_be_done_again():
    supervisor = a_supervisor(exited(0), exited(1, 1), RanksStopped())

    assert supervisor.handle(exited(1, attempt=1)) == ()
    assert supervisor.handle(exited(0, attempt=1)) == (Succeed(),)


def test_exits_while_the_others_are_being_stopped_are_no_news():
    supervisor = a_supervisor(exited(1, 1))

    assert supervisor.handle(exited(0, -15)) == ()
    assert supervisor.handle(RanksStopped()) == (StartRanks(attempt=1),)


def test_exits_of_an_earlier_attempt_are_no_news():
    supervisor = a_supervisor(exited(1, 1), RanksStopped())

    assert supervisor.handle(exited(0, 1, attempt=0)) == ()
    assert supervisor.attempt == 1


@pytest.mark.parametrize("code", [2, 5])
def test_a_fault_that_would_be_the_same_again_is_not_retried(code):
    supervisor = a_supervisor(exited(0, code), max_restarts=9)

    (end,) = supervisor.handle(RanksStopped())

    assert end == EndJob(
        reason=f"rank 0 ended with exit code {code}, which a restart would repeat", exit_code=code
    )


@pytest.mark.parametrize(
    ("code", "cause", "exit_code"), [(1, "exit code 1", 1), (-9, "signal 9", 3)]
)
def test_it_gives_up_after_the_restarts_allowed(code, cause, exit_code):
    supervisor = a_supervisor(exited(0, 1), RanksStopped(), exited(1, code, attempt=1))

    (end,) = supervisor.handle(RanksStopped())

    assert end.exit_code == exit_code
    assert end.reason == f"rank 1 ended with {cause} after 1 restart (max_restarts 1)"


def test_a_request_to_stop_lets_the_ranks_save_and_ends_the_job_as_interrupted():
    supervisor = a_supervisor()

    assert supervisor.handle(Stop()) == (AskRanks(),)
    assert supervisor.handle(exited(0)) == ()
    assert supervisor.handle(exited(1)) == (EndJob(reason="interrupted", exit_code=130),)


def test_a_second_request_to_stop_ends_the_ranks_at_once():
    supervisor = a_supervisor(Stop())

    assert supervisor.handle(Stop()) == (StopRanks(at_once=True),)
    assert supervisor.handle(RanksStopped()) == (EndJob(reason="interrupted", exit_code=130),)


@pytest.mark.parametrize("code", [1, 5, -10])
def test_a_rank_that_fails_while_it_saves_is_not_restarted(code):
    supervisor = a_supervisor(Stop(), max_restarts=9)

    assert supervisor.handle(exited(1, code)) == (StopRanks(),)
    assert supervisor.handle(RanksStopped()) == (EndJob(reason="interrupted", exit_code=130),)


def test_a_request_to_stop_wins_over_a_restart_under_way():
    supervisor = a_supervisor(exited(1, 1), Stop())

    assert supervisor.handle(RanksStopped()) == (EndJob(reason="interrupted", exit_code=130),)


def test_ranks_that_stopped_unasked_are_no_news():
    assert a_supervisor().handle(RanksStopped()) == ()


def test_a_checkpoint_makes_room_for_as_many_restarts_again():
    supervisor = a_supervisor(
        exited(0, 1), RanksStopped(), CheckpointCommitted(attempt=1), exited(0, 1, attempt=1)
    )

    assert supervisor.handle(RanksStopped()) == (StartRanks(attempt=2),)


def test_a_checkpoint_of_an_earlier_attempt_makes_no_room():
    supervisor = a_supervisor(
        exited(0, 1), RanksStopped(), CheckpointCommitted(attempt=0), exited(0, 1, attempt=1)
    )

    (end,) = supervisor.handle(RanksStopped())

    assert isinstance(end, EndJob)


@pytest.mark.parametrize("codes", [(1, 5, 4), (1, 2, 5), (4, 5, 1), (-6, 5, 2)])
def test_the_gravest_exit_decides_whichever_came_first(codes):
    supervisor = a_supervisor(
        *(exited(rank, code) for rank, code in enumerate(codes)), num_ranks=3, max_restarts=9
    )

    (end,) = supervisor.handle(RanksStopped())

    assert end.exit_code == 5


def test_exits_of_one_gravity_are_told_by_the_first():
    supervisor = a_supervisor(exited(1, 4), exited(0, 4))

    (end,) = supervisor.handle(RanksStopped())

    assert end.reason.startswith("rank 1 ended with exit code 4")


def test_a_grave_exit_after_a_request_to_stop_leaves_the_job_interrupted():
    supervisor = a_supervisor(Stop(), exited(0, 5))

    assert supervisor.handle(RanksStopped()) == (EndJob(reason="interrupted", exit_code=130),)


def test_a_rank_that_is_done_while_the_others_are_stopped_does_not_end_the_job():
    supervisor = a_supervisor(exited(0), exited(1, 1))

    assert supervisor.handle(exited(1, 0)) == ()
    assert supervisor.handle(RanksStopped()) == (StartRanks(attempt=1),)


@pytest.mark.parametrize("first", [5, 3, -9])
def test_a_damaged_checkpoint_is_fallen_back_from_without_counting_a_restart(first):
    supervisor = a_supervisor(CheckpointDamaged(attempt=0), max_restarts=0)

    assert supervisor.handle(exited(0, 5)) == (StopRanks(),)
    assert supervisor.handle(exited(1, 5)) == ()
    assert supervisor.handle(RanksStopped()) == (StartRanks(attempt=1),)
    assert supervisor.restarts == 0
    supervisor.handle(exited(0, first, attempt=1))
    (ending,) = supervisor.handle(RanksStopped())
    assert isinstance(ending, EndJob), "the next attempt is allowed nothing more"


def test_a_peer_that_dies_of_the_rank_that_found_the_damage_does_not_end_the_job():
    supervisor = a_supervisor(max_restarts=0)

    assert supervisor.handle(exited(1, 1)) == (StopRanks(),)
    assert supervisor.handle(CheckpointDamaged(attempt=0)) == ()
    assert supervisor.handle(exited(0, 5)) == ()
    assert supervisor.handle(RanksStopped()) == (StartRanks(attempt=1),)


def test_damage_of_an_earlier_attempt_does_not_excuse_a_later_one():
    supervisor = a_supervisor(exited(0, 1), RanksStopped(), CheckpointDamaged(attempt=0))

    supervisor.handle(exited(0, 5, attempt=1))
    (ending,) = supervisor.handle(RanksStopped())

    assert ending.exit_code == 5
