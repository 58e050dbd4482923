"""Virtual time: processes share cores as the kernel shares them."""

import pytest

from omniload.simulation.clock import Clock, Host, Lane


def a_host(cores=2.0):
    clock = Clock()
    return clock, Host(clock, cores=cores, network_bytes_per_s=1e6)


def run(clock):
    while clock.step():
        pass


def ended(clock, found, name):
    return lambda: found.append((name, pytest.approx(clock.now_s)))


def test_what_is_due_at_once_comes_in_the_order_it_was_asked_for():
    clock, found = Clock(), []
    for name in "abc":
        clock.after(1.0, lambda name=name: found.append(name))
    clock.after(0.5, lambda: found.append("first"))

    run(clock)

    assert found == ["first", "a", "b", "c"]


def test_two_threads_of_a_process_of_one_core_share_it():
    clock, host = a_host()
    process, found = host.process("loader", 1.0), []
    process.work(1.0, ended(clock, found, "short"))
    process.work(2.0, ended(clock, found, "long"))

    run(clock)

    assert found == [("short", 2.0), ("long", 3.0)]
    assert process.busy_s == pytest.approx(3.0)


def test_three_processes_on_two_cores_each_get_two_thirds():
    clock, host = a_host()
    found = []
    for name in "abc":
        host.process(name).work(2.0, ended(clock, found, name))

    run(clock)

    assert found == [("a", 3.0), ("b", 3.0), ("c", 3.0)]


def test_a_job_that_comes_later_slows_down_those_that_run():
    clock, host = a_host(cores=1.0)
    found = []
    host.process("a").work(2.0, ended(clock, found, "a"))
    clock.after(1.0, lambda: host.process("b").work(0.5, ended(clock, found, "b")))

    run(clock)

    assert found == [("b", 2.0), ("a", 2.5)]


def test_a_lane_takes_calls_in_order_as_its_threads_come_free():
    clock, host = a_host()
    lane, found = Lane(host.process("loader", 2.0), 2), []
    for number in range(4):
        lane.call(lambda number=number: (1.0, ended(clock, found, number)))

    run(clock)

    assert found == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]


def test_bytes_go_through_the_network_of_a_host_one_behind_the_other():
    clock, host = a_host()

    assert host.transfer_s(1_000_000) == pytest.approx(1.0)
    clock.after(0.5, lambda: None)
    run(clock)

    assert host.transfer_s(1_000_000) == pytest.approx(1.5)


def test_a_thread_that_is_kept_takes_no_call_until_it_is_let_go():
    clock, host = a_host()
    lane, found = Lane(host.process("loader"), 1), []

    def waits_for_another():
        lane.keep()
        clock.after(5.0, lane.let_go)

    lane.call(lambda: (1.0, waits_for_another))
    lane.call(lambda: (1.0, ended(clock, found, "next")))

    run(clock)

    assert found == [("next", 7.0)]


def test_cores_that_timers_of_a_process_take_are_missing_to_others_and_counted_as_its_own():
    clock, host = a_host(cores=1.0)
    at_rest, found = host.process("node", timers=0.5), []
    host.process("loader").work(1.0, ended(clock, found, "a"))

    run(clock)
    host.settle()

    assert found == [("a", 2.0)]
    assert at_rest.busy_s == pytest.approx(1.0)


def test_timers_leave_something_to_jobs_however_many_processes_have_some():
    clock, host = a_host(cores=1.0)
    many, found = [host.process("rank", timers=0.3) for _ in range(9)], []
    host.process("loader").work(0.05, ended(clock, found, "a"))

    run(clock)

    assert sum(each.timers for each in many) == pytest.approx(0.95)
    assert found == [("a", 1.0)]


def test_jobs_end_however_far_on_time_is():
    """From some hours on a float second has no picoseconds.

    Earlier, the rounding rest of a job was waited for and never passed.
    """
    clock, ended = Clock(), []
    host = Host(clock, cores=2.0, network_bytes_per_s=1e9)
    processes = [host.process("loader") for _ in range(5)]

    def begin():
        for number, process in enumerate(processes * 3, 1):
            process.work(number / 30, lambda: ended.append(clock.now_s))

    for at_s in (2e4 / 3, 1e5 / 3, 1e6 / 3, 1e8 / 3):
        clock.after(at_s, begin)
    events = 0
    while clock.step() and events < 10_000:
        events += 1

    assert len(ended) == 4 * len(processes) * 3
