"""Reads of any length under a virtual clock: their times change how far ahead a source is read, and no step."""

import heapq
from concurrent.futures import Future
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from omniload.actors.roles.links import LoaderLinks
from omniload.machine.messages import (
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    SamplesReported,
    Started,
    StepTaken,
    TakeOver,
)
from tests.support.examples import few
from tests.support.plane.builders import a_mix, a_planner, a_table

EPOCH = 997
ANSWER_S = 0.5
"""A loader answers after this time with the records that it has."""


class Job:
    """A trainer, a planner and a loader that reads each source in its own time; nothing else takes time."""

    name = "loader-0"

    def __init__(self, mix, took_s, step_s, measures=True):
        """Read record ``p`` of source ``s`` in ``took_s(s, p)``."""
        self.planner = a_planner(mix, epoch=[EPOCH] * len(mix.names))
        self.took_s, self.step_s, self.measures = took_s, step_s, measures
        self.links = LoaderLinks(lambda source: self, self.hear, self)
        self.time_s, self.coming, self.numbers = 0.0, [], count()
        self.digests, self.waits_s, self.asked_s, self.read_to = {}, [], 0.0, [0, 0]

    def now_s(self):
        return self.time_s

    def at(self, time_s, then):
        heapq.heappush(self.coming, (time_s, next(self.numbers), then))

    def carry(self, commands):
        for command in commands:
            match command:
                case PublishPlans(plans=plans):
                    self.digests |= {plan.step: plan.membership_digest() for plan in plans}
                case ReadAhead() | ReleaseSamples() | TakeOver():
                    self.links.tell(command)

    def release(self, command):
        pass

    def read_ahead(self, command):
        report, source, stop, took_s = Future(), command.source, command.start, 0.0
        while stop < command.stop and took_s < ANSWER_S:
            took_s, stop = took_s + self.took_s(source, stop), stop + 1
        self.read_to[source] = stop
        table = a_table([6] * (stop - command.start), start=command.start)
        told = SamplesReported(source=source, table=table, size_bytes=30 * len(table))
        self.at(self.time_s + took_s, lambda: report.set_result(told))
        return report

    def hear(self, told):
        took_steps = told.took_steps if self.measures else 0.0
        fields = {"source": told.source, "table": told.table, "size_bytes": told.size_bytes}
        self.carry(self.planner.handle(SamplesReported(**fields, took_steps=took_steps)))

    def train(self, steps):
        """Train on ``steps`` steps; return the wait for each."""
        self.carry(self.planner.handle(Started()))
        while len(self.waits_s) < steps:
            step = len(self.waits_s)
            if step in self.digests and self.asked_s <= self.time_s:
                self.waits_s.append(self.time_s - self.asked_s)
                self.asked_s = self.time_s + self.step_s
                self.at(self.asked_s, lambda: None)
                self.carry(self.planner.handle(StepTaken(step=step, dp_rank=0)))
                continue
            self.time_s, _, then = heapq.heappop(self.coming)
            then()
        return self.waits_s


def a_slow_record_now_and_then(source, position):
    return 0.12 if source == 1 and position % 400 == 250 else 1e-5


def a_quick_one(source, position):
    return 1e-5


MIX = a_mix(runtime={"prefetch_steps": 2})


def test_slow_records_of_a_source_hold_up_no_step_once_one_was_read():
    steps = 600
    fixed = Job(MIX, a_slow_record_now_and_then, 0.01, measures=False)
    job = Job(MIX, a_slow_record_now_and_then, 0.01)

    assert sum(wait_s > 0.03 for wait_s in fixed.train(steps)) > 10
    assert max(job.train(steps)[100:]) == 0.0
    assert job.digests.items() >= {step: fixed.digests[step] for step in range(steps)}.items()
    # The other source is read as far ahead as before, and this one no further than it needs.
    assert abs(job.read_to[0] - fixed.read_to[0]) < 100
    assert fixed.read_to[1] < job.read_to[1] < fixed.read_to[1] + 600


def test_a_source_that_is_slow_no_more_is_read_ahead_as_far_as_others_after_a_while():
    def slow_to_begin_with(source, position):
        return a_slow_record_now_and_then(source, position) if position < 1500 else 1e-5

    job, quick = Job(MIX, slow_to_begin_with, 0.01), Job(MIX, a_quick_one, 0.01)
    steps = 1700
    job.train(steps), quick.train(steps)

    assert abs(job.read_to[1] - quick.read_to[1]) < 100


latencies = st.lists(st.sampled_from([1e-6, 1e-4, 0.003, 0.02, 0.3, 4.0]), min_size=1, max_size=30)


@few(30, soak=1500)
@given(
    latencies,
    latencies,
    st.sampled_from([0.001, 0.01, 1.0]),
    st.sampled_from([2, 8]),
    st.sampled_from(["best_fit", "concat_and_split"]),
    st.sampled_from([None, "sample"]),
)
def test_steps_do_not_depend_on_what_reads_take(web, code, step_s, ahead, method, counted):
    mix = a_mix(
        weights={"web": 2.0, "code": 1.0},
        pack={"method": method},
        mix={"level": counted} if counted else {},
        runtime={"prefetch_steps": ahead},
        version=2,
    )
    steps = 40

    job = Job(mix, lambda s, p: (web, code)[s][p % len((web, code)[s])], step_s)
    quick = Job(mix, a_quick_one, step_s, measures=False)
    job.train(steps), quick.train(steps)

    assert [job.digests[step] for step in range(steps)] == [
        quick.digests[step] for step in range(steps)
    ]
