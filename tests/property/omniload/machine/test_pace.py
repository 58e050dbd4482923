"""Steps whose times an adversary chooses: the pace that is computed, and the readers under the swings."""

from itertools import cycle

from hypothesis import example, given
from hypothesis import strategies as st

from omniload.machine.readers import ReadBegun, ReadEnded, ReaderScaler, TimePassed
from omniload.machine.scaling.coming import Pace
from tests.support.examples import few

READ_S = 4.0
CLIMB_S = 260.0
"""Time to go from one reader to eight: a minute to notice, and half as many more after each half minute."""
HOUR = round(3600 / READ_S)
FULL = 0.9

step_times = st.sampled_from([0.002, 0.02, 0.1, 0.5, 2.0, 60.0, 600.0])


@given(
    st.lists(st.tuples(step_times, st.integers(1, 40)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 16]),
    st.data(),
)
def test_a_pace_lies_between_that_of_the_quickest_steps_and_that_of_the_slowest(runs, stride, data):
    pace, now_s, step = Pace(), 0.0, data.draw(st.integers(0, 1 << 30))
    pace.reach(step, now_s)
    for took_s, count in runs:
        for _ in range(count):
            now_s, step = now_s + took_s * stride, step + stride
            pace.reach(step, now_s)
            if data.draw(st.booleans()):  # repeated by any message
                pace.reach(step, now_s + took_s * stride * 0.9)
        if data.draw(st.booleans()):  # a planner took over that has not reached this step
            step, now_s = data.draw(st.integers(0, step)), now_s + 600.0
            pace.reach(step, now_s)

    times = [took_s for took_s, _ in runs]
    assert 0.999 / max(times) <= pace.steps_in(1.0) <= 1.001 / min(times)


class Job:
    """One source, whose reads take the share of time that its work requires of the present readers."""

    def __init__(self, readers=1):
        self.scaler, self.now_s = ReaderScaler(cores=16, most=8), 0.0
        self.readers, self.changes = readers, 0
        self.scaler.follow(0, readers, is_given=False)

    def read(self, work):
        """Read for a while with work that keeps ``work`` readers busy; return the share of time spent reading."""
        share, readers = min(1.0, work / self.readers), self.readers
        self.tell(ReadBegun(now_s=self.now_s, source=0))
        self.now_s += READ_S * share
        tokens = round(READ_S * share * readers * 1e6)
        ended = ReadEnded(
            now_s=self.now_s, source=0, busy_s=READ_S * share, tokens=tokens, readers=readers
        )
        self.tell(ended)
        self.now_s += READ_S * (1 - share)
        self.tell(TimePassed(now_s=self.now_s))
        return share

    def tell(self, event):
        for command in self.scaler.handle(event):
            self.readers, self.changes = command.readers, self.changes + 1


@few(6, soak=300)
@given(st.floats(1.0, 6.5), st.floats(0.0, 1.0), st.integers(70, 300), st.integers(50, 300))
@example(6.5, 0.0, 70, 50)
@example(5.0, 0.05, 100, 100)
def test_steps_that_are_quick_for_minutes_and_slow_for_minutes_have_the_readers_they_need_each_time(
    quick, slow, quick_reads, slow_reads
):
    """No needed reader is released: idle readers are cheaper than waiting ranks."""
    job = Job()

    for turn in range(30):
        shares = [job.read(quick) for _ in range(quick_reads)]
        climbed = shares[round(CLIMB_S / READ_S) :]
        assert all(share <= FULL for share in climbed), (turn, job.readers, job.now_s)
        for _ in range(slow_reads):
            job.read(slow)


@few(6, soak=300)
@given(st.floats(0.05, 6.0), st.integers(1, 8), st.integers(1, 300), st.floats(30.0, 600.0))
def test_a_trainer_that_pauses_for_an_evaluation_again_and_again_has_the_same_readers_after_an_hour(
    work, readers, every, pause_s
):
    job = Job(readers)

    def an_hour():
        for number in range(HOUR):
            job.read(work)
            if number % every == 0:
                job.now_s += pause_s
        return job.changes

    before = an_hour() and an_hour()

    assert an_hour() == before


@few(6, soak=300)
@given(st.floats(0.05, 6.0), st.integers(1, 8), st.integers(2, 8), st.floats(0.0, 0.2))
def test_of_steps_one_of_which_is_long_readers_follow_the_mean_and_rest(work, readers, of, idle):
    """As when gradients of several microbatches are summed: the work of all of them comes with the first."""
    job = Job(readers)
    works = cycle([work * of * (1 - idle), *[work * idle] * (of - 1)])

    def an_hour():
        for _ in range(HOUR):
            job.read(next(works))
        return job.changes

    before = an_hour() and an_hour()

    assert an_hour() <= before + 1
