"""When a mount whose daemon ended is mounted again."""

from fusefs.mounts.supervisor import (
    DaemonEnded,
    Finish,
    GiveUp,
    Lost,
    MountSupervisor,
    StartAgain,
    StartFailed,
)


def killed(ran_s=1.0):
    return DaemonEnded(code=-9, ran_s=ran_s)


def test_an_unmount_ends_the_watch():
    assert MountSupervisor().handle(DaemonEnded(code=0, ran_s=1.0)) == Finish()


def test_an_unmount_that_cost_data_ends_it_too_and_is_told():
    assert MountSupervisor().handle(DaemonEnded(code=5, ran_s=1.0)) == Lost()


def test_a_killed_daemon_is_started_at_once_the_first_time():
    assert MountSupervisor().handle(killed()) == StartAgain(after_s=0.0)


def test_the_waits_grow_to_their_limit():
    watch = MountSupervisor(most_attempts=10, longest_wait_s=4.0)

    waits = [watch.handle(killed()).after_s for _ in range(7)]

    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_it_gives_up_after_so_many_starts_that_did_not_last_and_says_why():
    watch = MountSupervisor(most_attempts=2)
    watch.handle(killed())
    watch.handle(StartFailed("the store does not answer"))

    command = watch.handle(StartFailed("the store does not answer"))

    assert isinstance(command, GiveUp)
    assert "2 starts in a row did not last" in command.message
    assert "the store does not answer" in command.message


def test_a_good_run_begins_the_count_anew():
    watch = MountSupervisor(most_attempts=1)
    watch.handle(killed())

    assert watch.handle(killed(ran_s=3600.0)) == StartAgain(after_s=0.0)
    assert isinstance(watch.handle(killed()), GiveUp)


def test_how_it_ended_is_told():
    watch = MountSupervisor(most_attempts=0)

    assert "killed by signal 9" in watch.handle(killed()).message
    assert "ended with 4" in watch.handle(DaemonEnded(code=4, ran_s=0.1)).message
