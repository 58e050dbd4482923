"""The roles that a move of sources waits for, and the result of a move that takes too long."""

import threading
from concurrent.futures import Future
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.gate import Gate, Turn
from omniload.actors.ray.keeper import Keeper
from omniload.actors.ray.scaling import mover, opening
from omniload.actors.ray.scaling.mover import Mover, MoveUnderWayError
from omniload.actors.ray.shadows import Shadows
from omniload.base.errors import StateError, UnavailableError
from omniload.machine.roster.members import Member
from omniload.machine.roster.roster import Roster
from tests.support.plane.given.fake_actors import Method


class FakeCrew:
    """Two loaders and a constructor, which ask the loader that they were notified of."""

    def __init__(self):
        mix = SimpleNamespace(names=("web", "code"))
        self.spec = SimpleNamespace(history=SimpleNamespace(latest=mix))
        self.sources_of = {"loader-0": (0, 1), "loader-1": ()}
        self.holders = {role: Member(role) for role in self.sources_of}
        self.dp_ranks_of = {"constructor-0": (0,)}
        self.facts, self.coming = {0: "found", 1: "found"}, {}
        self.changing, self.changed = Turn(), threading.Condition()
        self.moved_at, self.noted_at, self.known = {}, {}, {0: 0, 1: 0}
        self.turns = count(1)
        self.dropped, self.said = [], []
        self.actors = {member: self.loader(member.role) for member in self.holders.values()}

    def loader(self, role):
        return SimpleNamespace(
            open_more=Method(lambda sources, _: {s: self.facts[s] for s in sources}),
            hand_over=Method(lambda _: self.said.append(f"{role} hands over")),
            drop=Method(lambda sources: self.dropped.append((role, *sources))),
        )

    def holding(self, role):
        def take_over(command, *, waits_s):
            assert 0 < waits_s <= 60
            self.said.append(f"{role} reads {command}")

        return SimpleNamespace(
            turns=Method(lambda sources: [self.known[s] for s in sources]),
            outstanding=Method(lambda sources: f"what is due of {sources}"),
            take_over=Method(take_over),
        )

    def move(self, sources, role):
        self.moved_at |= dict.fromkeys(sources, next(self.turns))
        self.sources_of = {
            name: tuple(s for s in each if s not in sources) + tuple(sources) * (name == role)
            for name, each in self.sources_of.items()
        }


class FakeKeeper:
    """A keeper that is as quick as the test says."""

    def __init__(self, crew):
        self.crew, self.late, self.retired = crew, [], []
        self.is_stuck = self.tells_nobody = False

    def move(self, sources, role):
        taken = Future()
        if self.is_stuck:
            self.late.append(taken)
            return taken
        taken.set_result(None)
        self.crew.move(sources, role)
        self.crew.noted_at |= dict.fromkeys(sources, next(self.crew.turns))
        if not self.tells_nobody:
            self.tell()
        return taken

    def tell(self):
        self.crew.known |= dict.fromkeys((0, 1), next(self.crew.turns))

    def retire(self, role):
        self.retired.append(role)


@pytest.fixture
def plane(monkeypatch):
    for module in (mover, opening):
        monkeypatch.setattr(module, "answer_to", lambda answer, name, **_: answer())
    monkeypatch.setattr(mover, "OPENING_S", 0.3)
    monkeypatch.setattr(mover, "_TURN_S", 0.05)
    crew = FakeCrew()
    keeper = FakeKeeper(crew)
    return crew, keeper, Mover(crew, keeper, Gate())


@pytest.mark.parametrize("ended", [False, True])
def test_a_shadow_is_passed_over_only_once_it_has_ended(plane, monkeypatch, ended):
    crew, _, moves = plane

    def silent(*_):
        raise UnavailableError("loader-1+1 gave no answer")

    shadow = SimpleNamespace(open_more=Method(silent), drop=Method(lambda _: None))
    crew.actors[Member("loader-1", 1)] = shadow
    monkeypatch.setattr(opening, "has_ended", lambda _: ended)

    if ended:
        moves.move([0], "loader-1")
    else:
        with pytest.raises(UnavailableError, match="gave no answer"):
            moves.move([0], "loader-1")

    assert crew.sources_of["loader-1"] == ((0,) if ended else ())
    assert crew.coming == {}


@pytest.mark.parametrize(("takes_s", "rounds"), [(0.1, 1), (0.6, 6), (4.2, 1)])
def test_a_loader_reads_what_it_is_to_serve_before_the_one_that_serves_it_hands_over(
    plane, monkeypatch, takes_s, rounds
):
    crew, _, moves = plane
    now_s = count(0.0, takes_s)
    monkeypatch.setattr(mover, "time", SimpleNamespace(monotonic=lambda: next(now_s)))

    moves.move([0], "loader-1")

    reads = ["loader-1 reads what is due of (0,)"] * rounds
    assert crew.said == [*reads, "loader-0 hands over"]


@pytest.mark.parametrize("lost", ["planner", "loader-1"])
def test_a_move_goes_on_though_nothing_can_be_read_ahead_of_it(plane, monkeypatch, lost):
    crew, _, moves = plane

    def answer_to(answer, name, **_):
        found = answer()
        if name == lost and not isinstance(found, dict):
            raise UnavailableError(f"{name} has died")
        return found

    monkeypatch.setattr(mover, "answer_to", answer_to)

    moves.move([0], "loader-1")

    assert crew.sources_of == {"loader-0": (1,), "loader-1": (0,)}


def test_a_move_that_the_keeper_never_took_up_has_changed_nothing_and_never_will(plane):
    crew, keeper, moves = plane
    keeper.is_stuck = True

    with pytest.raises(UnavailableError, match="the beginning of a move to loader-1") as raised:
        moves.move([0], "loader-1")

    assert not isinstance(raised.value, MoveUnderWayError)
    assert keeper.late[0].cancelled()
    assert crew.sources_of["loader-0"] == (0, 1)
    assert crew.dropped == [("loader-1", 0)]  # the sources that it opened in vain


def test_a_move_of_which_a_constructor_has_not_heard_goes_on_and_is_cleaned_up_later(plane):
    crew, keeper, moves = plane
    keeper.tells_nobody = True

    with pytest.raises(MoveUnderWayError, match=r"2 sources went to loader-1, and .*constructor-0"):
        moves.move([0, 1], "loader-1")
    moves.clean_up()
    with pytest.raises(StateError, match="still answers for sources"):
        moves.retire("loader-0")

    assert crew.sources_of == {"loader-0": (), "loader-1": (0, 1)}
    assert crew.dropped == []
    keeper.tell()
    moves.retire("loader-0")
    assert crew.dropped == [("loader-0", 0, 1)]
    assert keeper.retired == ["loader-0"]


def test_a_move_and_an_end_that_an_edit_holds_up_are_refused_and_change_nothing(plane, monkeypatch):
    crew, keeper, moves = plane
    at_once = partial(crew.changing.taken, limit_s=0.0)

    with crew.changing.taken("another edit of the mix is carried out", "no"):
        monkeypatch.setattr(crew.changing, "taken", at_once)
        for change in (lambda: moves.move([0], "loader-1"), lambda: moves.retire("loader-1")):
            with pytest.raises(UnavailableError, match="stay as they are: another edit of the mix"):
                change()

    assert crew.sources_of == {"loader-0": (0, 1), "loader-1": ()}
    assert (crew.dropped, keeper.retired) == ([], [])


def test_what_is_to_be_dropped_waits_for_no_edit_and_is_dropped_at_the_next_look(plane):
    crew, keeper, moves = plane
    keeper.tells_nobody = True
    with pytest.raises(MoveUnderWayError):
        moves.move([0], "loader-1")
    keeper.tell()

    with crew.changing.taken("another edit of the mix is carried out", "no"):
        moves.clean_up()
        assert crew.dropped == []
    moves.clean_up()
    assert crew.dropped == [("loader-0", 0)]


def test_a_source_that_comes_back_is_kept_by_both_while_what_was_said_before_may_still_be_heard(
    plane,
):
    crew, keeper, moves = plane
    keeper.tells_nobody = True
    for role in ("loader-1", "loader-0"):  # constructors ask loader-0, but may hear of loader-1 yet
        with pytest.raises(MoveUnderWayError):
            moves.move([0], role)

    moves.clean_up()
    assert crew.dropped == []
    keeper.tell()
    moves.clean_up()
    assert crew.dropped == [("loader-1", 0)]


def test_a_source_that_came_back_while_it_was_awaited_is_not_dropped(plane):
    crew, keeper, moves = plane
    keeper.tells_nobody = True
    with pytest.raises(MoveUnderWayError):
        moves.move([0, 1], "loader-1")

    keeper.tells_nobody = False
    moves.move([1], "loader-0")

    assert crew.sources_of == {"loader-0": (1,), "loader-1": (0,)}
    assert sorted(crew.dropped) == [("loader-0", 0), ("loader-1", 1)]


def test_a_keeper_moves_nothing_that_was_given_up_before_it_came_to_it():
    moved = []
    crew = SimpleNamespace(move=lambda *move: moved.append(move), board=None)
    keeper = Keeper(crew, Roster(roles={}), Shadows(crew), Gate(), None)
    given_up, wanted = keeper.move([0], "loader-1"), keeper.move([1], "loader-1")

    assert given_up.cancel()
    keeper.retire("loader-9")
    crew.forget_loader = moved.append
    keeper.begin()
    keeper.close()

    assert moved == [((1,), "loader-1"), "loader-9"]
    assert wanted.done()
