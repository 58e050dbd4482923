"""The members that a plane of actors counts on while a source is added or a loader replaced, as roles are lost."""

import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError

from omniload.actors.address import PlaneAddress
from omniload.actors.gate import Gate
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray import changes
from omniload.actors.ray.changes import HandingOver, change_mix
from omniload.actors.ray.crew import Crew
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.scaling import opening
from omniload.actors.roles.first_look import as_it_is, require_samples
from omniload.base.errors import ConfigError, DefectError, IntegrityError, UnavailableError
from omniload.machine.loader_groups import LoaderShare
from omniload.machine.roster.members import Member
from omniload.mix.edits.answers import EditRequest, EditTaken
from omniload.mix.edits.edit import AddSource, SetWeights
from omniload.mix.edits.edits_file import read_history, write_history
from omniload.mix.edits.found import found_in
from omniload.mix.sources import ParquetSource
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix, some_facts
from tests.support.plane.given.fake_actors import Method

LOADERS = ("loader-0", "loader-1")
CODE, WEB, BOOKS, NEWS = some_facts([100, 101, 55, 66])
FOUND = {"books": BOOKS, "news": NEWS}


class FakePlanner:
    """A planner that takes changes up, refuses them, or is lost before or after it has kept one."""

    def __init__(self, spec):
        self.spec, self.error, self.keeps = spec, None, True
        self.history, self.change = Method(self.read), Method(self.changed)
        self.open = Method(lambda opening: opening)

    def read(self):
        return read_history(self.spec.run_dir, self.spec.mix)

    def changed(self, asked, beside):
        before = self.read()
        after = before.edited(asked.change, 4, found_in(asked.change, asked.facts))
        if self.keeps:
            write_history(self.spec.run_dir, after)
        if self.error is not None:
            raise self.error
        return EditTaken.of(before, after, 4, 2)


@pytest.fixture
def crew(tmp_path, monkeypatch):
    def answer_to(answer, _role, *, check):
        check()
        return answer()

    for module in (changes, opening):
        monkeypatch.setattr(module, "answer_to", answer_to)
        monkeypatch.setattr(module, "has_ended", lambda answer: False)
    monkeypatch.setattr(changes, "loss_of", lambda answer: None)
    tree = ClientPlaceTree.of(dp=1)
    spec = PlaneSpec(mix=a_mix(), base_dir=tmp_path, tree=tree, run_dir=tmp_path)
    address = PlaneAddress(
        cluster="127.0.0.2:1",
        namespace="n",
        dp_ranks_of={},
        board=tmp_path,
        batch_timeout_s=60.0,
    )
    shares = [
        LoaderShare(sources=(s,), busy=0.1, memory_bytes=1, reads=1, why="few")
        for s in range(len(LOADERS))
    ]
    crew = Crew(spec, shares, address, "node", SimpleNamespace())
    crew.holders = {role: Member(role) for role in (*LOADERS, PLANNER)}
    crew.facts = {0: CODE, 1: WEB}
    crew.actors = {Member(role): FakeLoader() for role in LOADERS}
    crew.actors[Member(PLANNER)] = FakePlanner(spec)
    return crew


class FakeLoader:
    def __init__(self, open_also=lambda number, mix, *_: FOUND[mix.names[number]]):
        self.open_also = Method(open_also)


def adding(name):
    source = ParquetSource(type="parquet", path=f"{name}/*.parquet", tokens="tokens")
    return EditRequest(id="0" * 32, change=AddSource(name=name, source=source, weight=1.0))


def serving(crew, source):
    return [role for role, sources in crew.sources_of.items() if source in sources]


def opening_of(crew):
    """Return the sources and links with which a planner that is started now would begin."""
    member = Member(PLANNER, 1)
    crew.actors[member] = FakePlanner(crew.spec)
    return crew.open_planner(member)()


def test_a_planner_that_is_lost_while_a_source_is_opened_is_followed_by_one_that_does_not_know_it(
    crew,
):
    meanwhile = []

    def open_also(number, mix):
        meanwhile.append(opening_of(crew))
        return FOUND[mix.names[number]]

    crew.actors[Member("loader-0")] = FakeLoader(open_also)
    change_mix(crew, Gate(), adding("books"))

    assert [list(opening.facts) for opening in meanwhile] == [[CODE, WEB]]
    assert list(opening_of(crew).facts) == [CODE, WEB, BOOKS]


@pytest.mark.parametrize("change", [adding("books").change, SetWeights(weights={"web": 3.0})])
def test_a_change_that_the_planner_kept_before_it_was_lost_is_taken(crew, change):
    crew.actors[Member(PLANNER)].error = UnavailableError("the planner has died")

    taken = change_mix(crew, Gate(), EditRequest(id="0" * 32, change=change))

    assert taken.edit.change == change
    assert crew.spec.edits == (taken.edit,)
    assert serving(crew, 2) == (["loader-0"] if isinstance(change, AddSource) else [])


def test_a_source_that_is_refused_leaves_the_crew_as_it_was(crew):
    planner, before = crew.actors[Member(PLANNER)], (crew.spec, dict(crew.sources_of))
    planner.error, planner.keeps = ConfigError("the data has ended"), False

    with pytest.raises(ConfigError, match="has ended"):
        change_mix(crew, Gate(), adding("books"))

    assert (crew.spec, crew.sources_of) == before
    assert crew.facts == {0: CODE, 1: WEB}


def test_a_source_that_a_late_planner_may_still_keep_stays_served_until_another_takes_its_number(
    crew,
):
    planner = crew.actors[Member(PLANNER)]
    planner.error, planner.keeps = UnavailableError("gave no answer"), False
    with pytest.raises(UnavailableError, match="no answer"):
        change_mix(crew, Gate(), adding("books"))
    assert serving(crew, 2) == ["loader-0"]
    assert crew.facts[2] == BOOKS

    planner.error, planner.keeps = None, True
    change_mix(crew, Gate(), adding("news"))

    assert serving(crew, 2) == ["loader-0"]
    assert crew.facts[2] == NEWS
    assert crew.spec.history.latest.names == ("code", "web", "news")


def test_a_source_that_the_planner_has_taken_stays_served_though_the_edits_cannot_be_read(
    crew, monkeypatch
):
    def torn(*_):
        raise IntegrityError("edits.jsonl cannot be read")

    monkeypatch.setattr(changes, "read_history", torn)

    with pytest.raises(IntegrityError, match="cannot be read"):
        change_mix(crew, Gate(), adding("books"))

    assert crew.actors[Member(PLANNER)].read().latest.names == ("code", "web", "books")
    assert serving(crew, 2) == ["loader-0"]
    assert crew.spec.history.latest.names == ("code", "web", "books")
    assert crew.facts[2] == BOOKS


def test_a_source_that_is_added_is_looked_at_once(crew):
    asked = {}

    def loader(name):
        def open_also(number, mix, look=require_samples):
            asked[name] = look
            return FOUND[mix.names[number]]

        return FakeLoader(open_also)

    crew.actors[Member("loader-0")] = loader("holder")
    crew.actors[Member("loader-0", 1)] = loader("shadow")

    change_mix(crew, Gate(), adding("books"))

    assert asked == {"holder": require_samples, "shadow": as_it_is}


def test_a_plane_that_is_closed_waits_for_no_role_that_has_not_answered_a_change(crew):
    gate = Gate()

    def open_also(number, mix):
        gate.close(0.0)
        return FOUND[mix.names[number]]

    crew.actors[Member("loader-0")] = FakeLoader(open_also)
    shadow = crew.actors[Member("loader-0", 1)] = FakeLoader()
    shadow.open_also = Method(lambda *_: pytest.fail("it is asked, and not waited for"))

    with pytest.raises(UnavailableError, match="was closed"):
        change_mix(crew, gate, adding("books"))

    assert gate.close(0.0)
    assert crew.actors[Member(PLANNER)].read().edits == ()
    assert serving(crew, 2) == []


SET_WEB = EditRequest(id="0" * 32, change=SetWeights(weights={"web": 3.0}))
LOST = UnavailableError("it has died (ActorDiedError); start again from the last checkpoint")


def lost(*_):
    raise LOST


def lose_planner(crew):
    crew.actors[Member(PLANNER)].error, crew.actors[Member(PLANNER)].keeps = LOST, False


def lose_planner_before_it_is_asked(crew):
    crew.actors[Member(PLANNER)].history = Method(lost)


def lose_loader(crew):
    crew.actors[Member("loader-0")] = FakeLoader(lost)


@pytest.mark.parametrize(
    ("lose", "role"),
    [
        (lose_planner, PLANNER),
        (lose_planner_before_it_is_asked, PLANNER),
        (lose_loader, "loader-0"),
    ],
)
def test_a_change_that_a_lost_role_has_not_kept_is_refused_by_what_to_do_and_leaves_nothing(
    crew, monkeypatch, lose, role
):
    before = crew.spec, dict(crew.sources_of), dict(crew.facts)
    monkeypatch.setattr(changes, "has_ended", lambda answer: True)
    monkeypatch.setattr(changes, "loss_of", lambda answer: ActorDiedError())
    lose(crew)

    with pytest.raises(UnavailableError) as refused:
        change_mix(crew, Gate(), adding("books"))

    assert str(refused.value).startswith(
        f"the mix was not changed: {role} was lost during the change"
    )
    assert "checkpoint" not in str(refused.value)
    assert (crew.spec, crew.sources_of, crew.facts) == before


def test_a_source_that_no_planner_has_kept_is_opened_by_no_loader_once_a_later_change_is_known(
    crew,
):
    planner = crew.actors[Member(PLANNER)]
    planner.error, planner.keeps = UnavailableError("gave no answer"), False
    with pytest.raises(UnavailableError, match="no answer"):
        change_mix(crew, Gate(), adding("books"))
    planner.error, planner.keeps = None, True

    change_mix(crew, Gate(), SET_WEB)

    assert crew.spec.history.latest.names == ("code", "web")
    assert crew.opened_by("loader-0") == (0,)
    assert crew.facts == {0: CODE, 1: WEB}


@pytest.mark.parametrize("ended", [False, True])
def test_a_shadow_is_passed_over_only_once_it_has_ended(crew, monkeypatch, ended):
    def silent(number, mix, *_):
        raise UnavailableError("loader-0+1 gave no answer")

    monkeypatch.setattr(opening, "has_ended", lambda answer: ended)
    crew.actors[Member("loader-0", 1)] = FakeLoader(silent)

    if ended:
        change_mix(crew, Gate(), adding("books"))
    else:
        with pytest.raises(UnavailableError, match=r"loader-0\+1 gave no answer"):
            change_mix(crew, Gate(), adding("books"))

    assert serving(crew, 2) == (["loader-0"] if ended else [])


@pytest.mark.timeout(60)
def test_an_edit_that_a_move_holds_up_is_refused_with_its_name_and_not_taken_up_later(
    crew, monkeypatch
):
    at_once = partial(crew.changing.taken, limit_s=0.0)
    with crew.changing.taken("1 source ('web') move to loader-1", "no"):
        monkeypatch.setattr(crew.changing, "taken", at_once)
        with pytest.raises(UnavailableError, match=r"not changed: 1 source \('web'\) move to"):
            change_mix(crew, Gate(), adding("books"))

    assert serving(crew, 2) == []
    change_mix(crew, Gate(), adding("books"))
    assert serving(crew, 2) == ["loader-0"]


LEADS, NEXT = Member("loader-0", 1), Member("loader-0", 2)
PLANS, BUILDS = Member("planner"), Member("constructor-0")


class Hearer:
    """Hears of loaders; its answers are made by the test."""

    def __init__(self):
        self.heard, self.answers = [], []
        self.replace_loader = SimpleNamespace(remote=self._hear)
        self.replace_constructor = SimpleNamespace(remote=lambda *told: self._hear(told))

    def _hear(self, serving):
        self.heard.append(serving)
        self.answers.append(Future())
        return SimpleNamespace(future=lambda answer=self.answers[-1]: answer)


class CrewOfOne:
    """A planner and a constructor, and a loader of two sources that has just taken over."""

    def __init__(self):
        self.holders = {m.role: m for m in (LEADS, PLANS, BUILDS)}
        self.dp_ranks_of, self.sources_of = {"constructor-0": (0,)}, {"loader-0": (0, 1)}
        self.actors = {m: Hearer() for m in self.holders.values()}
        self.changed, self.noted, self.buried = threading.Condition(), [], []
        self.serving = {}

    def holding(self, role):
        return self.actors[self.holders[role]]

    def as_serving(self, member, sources):
        return SimpleNamespace(sources=tuple(sources), name=member.name)

    def note_serving(self, member, sources):
        self.noted.append((member, tuple(sources)))
        self.serving |= dict.fromkeys(sources, member)


@pytest.fixture
def handed_over():
    made = CrewOfOne()
    made.planner, made.constructor = made.actors[PLANS], made.actors[BUILDS]
    made.handing_over = HandingOver(made, lambda call: call())
    made.handing_over.to(LEADS)
    return made


def test_constructors_are_told_once_the_planner_has_handed_over(handed_over):
    assert not handed_over.constructor.heard

    handed_over.planner.answers[0].set_result(None)

    assert [serving.sources for serving in handed_over.constructor.heard] == [(0, 1)]
    assert handed_over.noted == [(LEADS, (0, 1))]


def test_a_planner_that_is_late_is_told_again_and_constructors_after_that(handed_over):
    handed_over.planner.answers[0].set_exception(UnavailableError("its journal waits for a store"))
    # The repeat comes later, because the planner answers at once about a loader that has died too, 60 times a second.
    assert (len(handed_over.planner.heard), handed_over.constructor.heard) == (1, [])
    for _ in range(2):
        handed_over.handing_over.tell_again()
    assert (len(handed_over.planner.heard), handed_over.constructor.heard) == (2, [])

    handed_over.planner.answers[1].set_result(None)

    assert [serving.name for serving in handed_over.constructor.heard] == [LEADS.name]


@pytest.mark.parametrize(
    ("role", "held_by"), [("loader-0", NEXT), ("planner", Member("planner", 1))]
)
def test_of_roles_that_were_replaced_meanwhile_nothing_is_told_again(handed_over, role, held_by):
    handed_over.holders[role] = held_by

    handed_over.planner.answers[0].set_exception(UnavailableError("late"))
    handed_over.handing_over.tell_again()

    assert (len(handed_over.planner.heard), handed_over.constructor.heard) == (1, [])


def test_a_loader_that_has_ended_as_it_took_over_is_handed_nothing_again(handed_over):
    # It holds its role until another can: in an outage that one takes as long to open its sources.
    handed_over.buried.append(LEADS)

    handed_over.planner.answers[0].set_exception(UnavailableError("it has died"))
    handed_over.handing_over.tell_again()

    assert (len(handed_over.planner.heard), handed_over.constructor.heard) == (1, [])


def test_what_fails_at_once_is_not_tried_for_ever(handed_over):
    handed_over.planner.answers[0].set_exception(DefectError("a fault of omniload itself"))
    handed_over.handing_over.tell_again()

    assert (len(handed_over.planner.heard), handed_over.constructor.heard) == (1, [])


PASSING = [ActorUnavailableError("its host was cut off", None), ObjectLostError("0" * 56, None, "")]
"""Errors after which a call is lost, and the actor is not replaced."""


@pytest.mark.parametrize("loss", PASSING)
def test_a_planner_that_may_live_is_told_again_who_serves_and_one_that_has_ended_is_not(
    handed_over, loss
):
    handed_over.planner.answers[0].set_exception(loss)
    handed_over.handing_over.tell_again()
    handed_over.planner.answers[1].set_exception(ActorDiedError())
    handed_over.handing_over.tell_again()

    assert (len(handed_over.planner.heard), handed_over.constructor.heard) == (2, [])


@pytest.mark.parametrize("loss", PASSING)
def test_a_constructor_that_did_not_hear_which_loader_serves_is_told_again(handed_over, loss):
    handed_over.planner.answers[0].set_result(None)
    handed_over.constructor.answers[0].set_exception(loss)
    # The repeat comes later, because the answer about a constructor that is cut off is as quick.
    assert len(handed_over.constructor.heard) == 1

    handed_over.handing_over.tell_again()
    handed_over.constructor.answers[1].set_result(None)
    handed_over.handing_over.tell_again()

    assert [serving.sources for serving in handed_over.constructor.heard] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("who", ["its own role", "the sources"])
def test_a_constructor_is_told_nothing_again_that_holds_no_more(handed_over, who):
    handed_over.planner.answers[0].set_result(None)
    handed_over.constructor.answers[0].set_exception(PASSING[0])
    if who == "its own role":
        handed_over.holders["constructor-0"] = Member("constructor-0", 1)
    else:
        handed_over.serving = dict.fromkeys((0, 1), NEXT)

    handed_over.handing_over.tell_again()

    assert len(handed_over.constructor.heard) == 1


@pytest.mark.parametrize("loss", PASSING)
def test_a_planner_that_did_not_hear_of_a_constructor_is_told_again(handed_over, loss):
    handed_over.handing_over.to(BUILDS)
    handed_over.planner.answers[-1].set_exception(loss)

    handed_over.handing_over.tell_again()

    told = [each for each in handed_over.planner.heard if isinstance(each, tuple)]
    assert told == [(0, handed_over.constructor, 0)] * 2
