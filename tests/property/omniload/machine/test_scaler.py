"""Loaders follow the load, come to rest under a steady one, and are not moved to and fro by any other."""

from hypothesis import example, given
from hypothesis import strategies as st

from omniload.machine.scaler import LoadersSeen, MergeLoader, Scaler, SplitLoader
from tests.support.examples import few

EVERY_S = 20.0
REGAIN_S = 600.0
MOST = 6


class Plane:
    """Loaders that do what they are told, and sources whose loads the test decides."""

    def __init__(self, num_sources, *, least=1, most=MOST):
        self.scaler = Scaler(least=least, most=most, cost_S={})
        self.sources_of = {"loader-0": tuple(range(num_sources))}
        self.now_s, self.changes, self.next = 0.0, 0, 1

    def look(self, loads, *, soon=None, waited=frozenset()):
        shares = dict.fromkeys(range(len(loads)), 1 / len(loads))
        seen = LoadersSeen(
            now_s=self.now_s,
            sources_of=self.sources_of,
            busy_S=dict(enumerate(loads)),
            tokens_S=dict.fromkeys(shares, 1000.0),
            shares_S=shares,
            soon_S=shares if soon is None else soon,
            waited=waited,
        )
        self.now_s += EVERY_S
        commands = self.scaler.handle(seen)
        for command in commands:
            self.carry(command)
        return commands

    def carry(self, command):
        self.changes += 1
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


@given(st.data(), st.integers(1, 8), st.integers(1, 3))
def test_however_the_mix_swings_changes_stay_within_the_allowance(data, num_sources, least):
    plane = Plane(num_sources, least=least)
    several = st.lists(loads, min_size=num_sources, max_size=num_sources)
    for _ in range(data.draw(st.integers(1, 12))):
        now, soon = data.draw(several), data.draw(st.none() | several)
        ahead = None if soon is None else {s: share / 3 for s, share in enumerate(soon)}
        for _ in range(data.draw(st.sampled_from([1, 4, 15, 60]))):
            roles = list(plane.sources_of)
            waited = frozenset(roles[:1]) if data.draw(st.booleans()) else frozenset()
            plane.look(now, soon=ahead, waited=waited)
            served = sorted(s for each in plane.sources_of.values() for s in each)
            assert served == list(range(num_sources))
            assert all(plane.sources_of.values())
            assert 1 <= len(plane.sources_of) <= MOST

    assert plane.changes <= MOST + plane.now_s / REGAIN_S


@few(12, soak=200)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=8), st.booleans())
@example([0.5, 0.5, 0.125], True)  # two loaders passed the last one to and fro
def test_under_a_steady_load_loaders_come_to_rest(steady, is_waited):
    plane = Plane(len(steady))

    def an_hour():
        for _ in range(int(3600 / EVERY_S)):
            plane.look(steady, waited=frozenset(plane.sources_of) if is_waited else frozenset())
        return plane.changes

    for _ in range(2):
        before = an_hour()

    assert an_hour() == before


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
