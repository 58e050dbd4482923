"""The number of a source's readers follows the measurements, settles under a steady load, and does not oscillate."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from omniload.machine.readers import ReadBegun, ReadEnded, ReaderScaler, TimePassed
from omniload.machine.scaling.coming import Ahead, Coming
from tests.support.examples import few

EVERY_S = 4.0
REGAIN_S = 600.0
ALLOWED, MOST, CORES = 8, 8, 12


class Job:
    """Sources whose load the test decides, read by as many readers as the machine commands."""

    def __init__(self, readers_S, *, cores=CORES):
        self.scaler, self.now_s = ReaderScaler(cores=cores, most=MOST), 0.0
        self.readers_S, self.changes = (
            dict(enumerate(readers_S)),
            dict.fromkeys(range(len(readers_S)), 0),
        )
        for source, readers in self.readers_S.items():
            self.scaler.follow(source, readers, is_given=False)
        self.at_first = sum(readers - 1 for readers in readers_S)
        self.cores = cores

    def read(self, work_S, *, core=1.0, gain=1.0, opening=frozenset(), ahead=None):
        """Continue for a while: read data that takes one reader ``work_S`` of the time, at once."""
        shares = {}
        for source, work in enumerate(work_S):
            dividing = 1 if source in opening else self.readers_S[source]
            speed = core * dividing**gain
            shares[source] = min(1.0, work / speed), speed, dividing
            self.tell(ReadBegun(now_s=self.now_s, source=source))
        began_s = self.now_s
        for source, (share, speed, dividing) in sorted(shares.items(), key=lambda each: each[1]):
            took_s = EVERY_S * share
            self.now_s = began_s + took_s
            self.tell(
                ReadEnded(
                    now_s=self.now_s,
                    source=source,
                    busy_s=took_s * core,
                    tokens=round(took_s * speed * 1e6),
                    readers=dividing,
                )
            )
        self.now_s = began_s + EVERY_S
        self.tell(TimePassed(now_s=self.now_s, ahead=ahead))
        return [share for share, _, _ in shares.values()]

    def tell(self, event):
        for command in self.scaler.handle(event):
            assert command.readers != self.readers_S[command.source]
            self.changes[command.source] += 1
            self.readers_S[command.source] = command.readers


@st.composite
def outlooks(draw):
    """The outlooks of a planner, and some that no planner gives: steps that go back, unknown sources."""
    steps = sorted(draw(st.sets(st.integers(0, 2_000), min_size=1, max_size=8)))
    shares = st.tuples(*[st.sampled_from([0.0, 1e-9, 0.1, 0.5, 1.0])] * len(steps))
    coming = Coming(
        steps=tuple(steps),
        shares_S=draw(st.dictionaries(st.integers(0, 3), shares)),
        drawn_S=draw(st.dictionaries(st.integers(0, 3), st.floats(1e-6, 1))),
    )
    return Ahead(step=draw(st.integers(0, 2_000)), coming=draw(st.sampled_from([coming, None])))


works = st.one_of(st.just(0.0), st.floats(0, 12), st.floats(0.4, 2))


@given(st.data(), st.lists(st.integers(1, MOST), min_size=1, max_size=3))
def test_however_the_mix_swings_readers_stay_within_bounds_and_changes_within_the_allowance(
    data, readers_S
):
    job = Job(readers_S)
    several = st.lists(works, min_size=len(readers_S), max_size=len(readers_S))
    for _ in range(data.draw(st.integers(1, 10))):
        work_S = data.draw(several)
        core, gain = data.draw(st.sampled_from([1.0, 0.6, 0.3])), data.draw(st.floats(0, 1.2))
        opening = data.draw(st.sets(st.integers(0, 2)))
        outlook = data.draw(st.none() | outlooks())
        job.now_s += data.draw(st.sampled_from([0.0, 1.0, 3000.0]))
        for _ in range(data.draw(st.sampled_from([1, 9, 35, 150]))):
            job.read(work_S, core=core, gain=gain, opening=opening, ahead=outlook)
            assert all(1 <= readers <= MOST for readers in job.readers_S.values())
            further = sum(readers - 1 for readers in job.readers_S.values())
            assert further <= max(job.at_first, CORES - 1)

    assert all(changes <= ALLOWED + job.now_s / REGAIN_S for changes in job.changes.values())


steady = st.lists(st.floats(0, 6), min_size=1, max_size=3)


@few(20, soak=300)
@given(steady, st.integers(1, MOST), st.floats(0.5, 1))
@example([0.85], 1, 1.0)
@example([0.6 * 3], 2, 1.0)
@example([0.86 * 5], 5, 1.0)
def test_under_a_steady_load_readers_come_to_rest_within_an_hour(work_S, readers, gain):
    job = Job([readers] * len(work_S), cores=64)

    def an_hour():
        for _ in range(int(3600 / EVERY_S)):
            job.read(work_S, gain=gain)
        return sum(job.changes.values())

    before = an_hour()

    assert an_hour() == before


@few(20, soak=300)
@given(st.floats(0, 6), st.integers(1, MOST))
def test_readers_keep_up_where_more_of_them_would_and_none_is_idle(work, readers):
    job = Job([readers])

    for _ in range(int(1800 / EVERY_S)):
        (share,) = job.read([work])

    assert share <= 0.88  # seen as an average over half a minute
    # As many as would read six tenths of the time, or fewer if those already keep up.
    assert job.readers_S[0] <= max(1, math.ceil(work / 0.6 + 0.5))


@few(20, soak=300)
@given(st.floats(1, 9), st.integers(1, 60))
def test_a_mix_that_swings_as_fast_as_readers_follow_has_them_change_ever_more_seldom(
    work, half_period
):
    job = Job([1])

    for turn in range(int(6 * 3600 / EVERY_S)):
        job.read([work if turn // half_period % 2 else 0.0])

    assert job.changes[0] <= ALLOWED + 6 * 3600 / REGAIN_S


@few(20, soak=300)
@given(st.floats(0.1, 0.8), st.floats(1.5, 12), st.integers(30, 200))
def test_where_the_schedule_tells_of_a_stage_as_many_readers_as_keep_up_with_it_are_there_before(
    work, times, at
):
    job, step = Job([1], cores=64), 0
    coming = Coming(steps=(0, at - 1, at), shares_S={0: (0.05, 0.05, 0.05 * times)})

    for step in range(at):
        job.read([work], ahead=Ahead(step=step, coming=coming))
    before = job.readers_S[0]

    assert before >= min(MOST, math.ceil(work * times / 0.85 - 0.01))
    assert before <= min(MOST, math.ceil(work * times / 0.6 + 0.01))
    for step in range(at, at + 200):
        job.read([work * times], ahead=Ahead(step=step))
    assert job.readers_S[0] >= before - 1
