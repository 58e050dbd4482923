"""The number of loaders follows the load, settles under a steady load, and does not oscillate under any other."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from omniload.machine.scaler import LoadersSeen, MergeLoader, Scaler, SplitLoader
from tests.support.examples import few

EVERY_S = 20.0
REGAIN_S, SETTLE_S = 600.0, 30.0
MOST = 6


class Plane:
    """Loaders that obey commands, and sources whose loads the test decides."""

    def __init__(self, num_sources, *, least=1, most=MOST):
        self.scaler = Scaler(least=least, most=most, cost_S={})
        self.sources_of = {"loader-0": tuple(range(num_sources))}
        self.now_s, self.changed_s, self.next = 0.0, [], 1

    def look(self, loads, *, soon=None, waited=frozenset(), filled=None):
        shares = dict.fromkeys(range(len(loads)), 1 / len(loads))
        seen = LoadersSeen(
            now_s=self.now_s,
            sources_of=self.sources_of,
            busy_S=dict(enumerate(loads)),
            tokens_S=dict.fromkeys(shares, 1000.0),
            shares_S=shares,
            soon_S=shares if soon is None else soon,
            waited=waited,
            filled_S=filled,
        )
        self.now_s += EVERY_S
        commands = self.scaler.handle(seen)
        for command in commands:
            self.carry(command)
        return commands

    def carry(self, command):
        self.changed_s.append(self.now_s)
        assert command.sources, "nothing would move"
        left = tuple(s for s in self.sources_of[command.role] if s not in command.sources)
        assert len(left) + len(command.sources) == len(self.sources_of[command.role])
        if isinstance(command, SplitLoader):
            to, self.next = f"loader-{self.next}", self.next + 1
            self.sources_of[to] = ()
        else:
            to = command.to
        assert to != command.role
        self.sources_of[to] += command.sources
        self.sources_of[command.role] = left
        if isinstance(command, MergeLoader):
            assert not left
            del self.sources_of[command.role]


loads = st.one_of(st.just(0.0), st.floats(0, 3), st.floats(0, 0.2))
fills = st.dictionaries(st.integers(0, 7), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))


@given(st.data(), st.integers(1, 8), st.integers(1, 3))
def test_however_mix_and_occupancy_swing_changes_stay_within_the_allowance_in_any_time(
    data, num_sources, least
):
    plane = Plane(num_sources, least=least)
    several = st.lists(loads, min_size=num_sources, max_size=num_sources)
    for _ in range(data.draw(st.integers(1, 12))):
        now, soon = data.draw(several), data.draw(st.none() | several)
        filled = data.draw(st.none() | fills)
        ahead = None if soon is None else {s: share / 3 for s, share in enumerate(soon)}
        for _ in range(data.draw(st.sampled_from([1, 4, 15, 60]))):
            roles = list(plane.sources_of)
            waited = frozenset(roles[:1]) if data.draw(st.booleans()) else frozenset()
            plane.look(now, soon=ahead, waited=waited, filled=filled)
            served = sorted(s for each in plane.sources_of.values() for s in each)
            assert served == list(range(num_sources))
            assert all(plane.sources_of.values())
            assert 1 <= len(plane.sources_of) <= MOST

    at_s = plane.changed_s
    assert all(b - a >= SETTLE_S for a, b in pairwise(at_s))
    for first in range(len(at_s)):
        for last in range(first, len(at_s)):
            assert last - first + 1 <= MOST + (at_s[last] - at_s[first]) / REGAIN_S + 1e-9


@few(12, soak=200)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=8), st.booleans())
@example([0.5, 0.5, 0.125], True)  # earlier, two loaders passed the last source back and forth
def test_under_a_steady_load_loaders_come_to_rest(steady, is_waited):
    plane = Plane(len(steady))

    def an_hour():
        for _ in range(int(3600 / EVERY_S)):
            plane.look(steady, waited=frozenset(plane.sources_of) if is_waited else frozenset())
        return len(plane.changed_s)

    for _ in range(2):
        before = an_hour()

    assert an_hour() == before


HOURS_TO_REST = 4
READS_AT_ONCE = 4
"""Concurrent reads of a loader: further reads from stores wait for these."""


@few(12, soak=200)
@given(
    st.lists(st.floats(0, 2), min_size=2, max_size=16),
    st.sampled_from([1.0, 0.3]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
@example([1.0] * 8, 1.0, 0.0)
@example([1.0] * 16, 0.3, 0.0)  # a store that is equally slow for twice as many reads
def test_sources_that_wait_for_a_store_come_to_rest_wherever_they_were_moved(
    waits, gives, still_there
):
    """The load is steady except for the effect of changes: read-ahead is as full as the loaders allow."""
    plane = Plane(len(waits))

    def filled():
        of_store = 1.0 if gives == 1.0 else gives * len(waits) / max(1.0, sum(waits))
        return {
            s: still_there * min(1.0, of_store)
            for each in plane.sources_of.values()
            if sum(waits[s] for s in each) > READS_AT_ONCE or of_store < 1
            for s in each
        }

    def an_hour():
        for _ in range(int(3600 / EVERY_S)):
            plane.look([0.01] * len(waits), filled=filled())
        return len(plane.changed_s)

    # The first change comes, and another one after an hour in which it has kept them full.
    for _ in range(HOURS_TO_REST):
        before = an_hour()

    assert an_hour() == before
    if gives == 1.0 and still_there == 0.0 and max(waits) <= 1 and len(waits) <= 12:
        # No read waits for another if enough loaders are allowed.
        assert not any(
            sum(waits[s] for s in each) > READS_AT_ONCE for each in plane.sources_of.values()
        )


@few(12, soak=200)
@given(st.lists(st.floats(0.15, 0.35), min_size=2, max_size=8))
def test_no_loader_stays_over_while_others_could_be_added(steady):
    plane = Plane(len(steady), most=8)

    for _ in range(int(7200 / EVERY_S)):
        plane.look(steady)

    assert max(sum(steady[s] for s in each) for each in plane.sources_of.values()) <= 0.86


@few(12, soak=200)
@given(st.lists(st.floats(0, 0.04), min_size=2, max_size=8))
def test_loaders_of_little_work_become_one(steady):
    plane = Plane(len(steady))
    for s in range(1, len(steady)):
        plane.sources_of[f"loader-{s}"] = (s,)
    plane.sources_of["loader-0"] = (0,)
    plane.next = len(steady)

    for _ in range(int(3 * 3600 / EVERY_S)):
        plane.look(steady)

    assert len(plane.sources_of) == 1
