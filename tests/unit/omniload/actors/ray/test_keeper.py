"""The keeper's handling of members whose process becomes known only late."""

import queue
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.gate import Gate
from omniload.actors.ray.hosts.beside_ranks import Moves
from omniload.actors.ray.keeper import Keeper
from omniload.actors.ray.processes import Process
from omniload.actors.ray.release import Release
from omniload.actors.ray.shadows import Shadows
from omniload.base.errors import UnavailableError
from omniload.machine.messages import TakeOver
from omniload.machine.progress import Progress
from omniload.machine.roster.members import Member
from omniload.machine.roster.roster import Roster
from omniload.machine.status import SKIPPED
from tests.support.plane.builders import a_mix

FIRST = Member("loader-0")
LIMIT_S = 60.0


class Method:
    """A method of an actor, whose answers are the test's to make."""

    def __init__(self):
        self.asked = queue.Queue()

    def remote(self, *_):
        self.asked.put(answer := Future())
        return SimpleNamespace(future=lambda: answer)


class FakeCrew:
    """Actors that answer on command; the actions on their processes are recorded in order."""

    def __init__(self):
        self.done, self.buried = queue.Queue(), queue.Queue()
        self.ended = {}
        self.sources_of, self.dp_ranks_of, self.facts = {"loader-0": (0,)}, {}, {}
        self.spec = SimpleNamespace(history=SimpleNamespace(latest=a_mix()))
        self.actors = {FIRST: self.actor()}
        self.planner = SimpleNamespace(released_to=Method(), outstanding=Method())
        self.board = SimpleNamespace(read=dict)
        self.processes = SimpleNamespace(
            look=lambda _now_s, _later: None, beats=lambda _now_s: {}, stopped=frozenset
        )
        self.changed = threading.Condition()
        self.follows_ranks, self.moves = False, Moves("home")
        self.placing = SimpleNamespace(
            away=list,
            crowded=list,
            is_stranded=lambda _member: False,
            is_astray=lambda _member, _node: False,
            stands_ready=lambda _member: None,
        )

    def actor(self):
        return SimpleNamespace(
            stay=Method(), process=Method(), open=Method(), decode_ahead=Method()
        )

    def holding(self, _role):
        return self.planner

    def start(self, member):
        self.actors[member] = self.actor()
        self.done.put(("start", member))

    def open_loader(self, member):
        return self.actors[member].open.remote()

    def take_hold(self, member, process, ended):
        self.ended[member] = ended
        self.done.put(("hold", member))

    def end(self, member, *, is_replaced=False):
        self.done.put(("end", member))

    def bury(self, member):
        self.buried.put(member)


@pytest.fixture
def crew():
    made = FakeCrew()
    keeper = Keeper(made, Roster(roles={"loader-0": 0}), Shadows(made), Gate(), None)
    keeper.begin()
    yield made
    keeper.close()


def test_a_member_that_was_replaced_before_its_process_was_known_is_ended_by_that(crew):
    first = crew.actors[FIRST]
    first.stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("it gives no heartbeat"))
    assert [crew.done.get(timeout=LIMIT_S)[0] for _ in range(2)] == ["end", "start"]

    first.process.asked.get(timeout=LIMIT_S).set_result(Process(7, "here"))

    assert [crew.done.get(timeout=LIMIT_S) for _ in range(2)] == [("hold", FIRST), ("end", FIRST)]


def test_a_member_that_runs_another_release_is_replaced_and_said_to_do_so(crew, caplog):
    older = replace(Release.own(), code="0" * 16, place="/old on a")
    process = crew.actors[FIRST].process
    process.asked.get(timeout=LIMIT_S).set_result(Process(7, "here", release=older))

    found = [crew.done.get(timeout=LIMIT_S) for _ in range(3)]

    assert found == [("hold", FIRST), ("end", FIRST), ("start", Member("loader-0", 1))]
    said = (
        "loader-0 is replaced: loader-0 runs omniload 0.1.0 with code 0000000000000000 (/old on a)"
    )
    assert said in caplog.text


def test_a_constructor_that_follows_a_lost_one_is_at_home_also_where_a_move_came_too_late():
    made, first = FakeCrew(), Member("constructor-0")
    made.planner.nodes_of_ranks = Method()
    made.follows_ranks, made.dp_ranks_of, made.sources_of = True, {first.role: (0,)}, {}
    made.holders, made.actors = {first.role: first}, {first: made.actor()}
    start, placed = made.start, queue.Queue()
    made.start = lambda member: (start(member), placed.put(made.moves.place(member)))
    keeper = Keeper(made, Roster(roles={first.role: 0}), Shadows(made), Gate(), None)
    keeper.begin()

    made.actors[first].stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("killed"))
    assert placed.get(timeout=LIMIT_S) == "home"
    # While that one is started, ranks of the previous one are led elsewhere.
    made.planner.nodes_of_ranks.asked.get(timeout=LIMIT_S).set_result((1, ["away"]))
    made.planner.nodes_of_ranks.asked.get(timeout=LIMIT_S)  # it was heard
    second = Member(first.role, 1)
    made.actors[second].stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("killed"))

    assert placed.get(timeout=LIMIT_S) == "home"
    keeper.close()


def test_records_that_the_planner_skips_in_its_process_are_told_of_in_that_of_the_ranks(caplog):
    made, looked = FakeCrew(), queue.Queue()
    beat = Progress(name="planner", pid=7, beat_s=1.0, tasks=(), figures={f"{SKIPPED}web": 3.0})
    made.board = SimpleNamespace(read=lambda: looked.put(None) or {"planner": beat})
    keeper = Keeper(made, Roster(roles={"loader-0": 0}), Shadows(made), Gate(), None)
    keeper.begin()
    for _ in range(2):
        looked.get(timeout=LIMIT_S)
    keeper.close()

    told = [line for line in caplog.messages if line.startswith("source web: ")]
    assert len(told) == 1
    assert "3 times so far; reported again at 4" in told[0]


def test_whoever_shares_a_node_gets_another_one_started_elsewhere_and_ends_once_that_one_stands_by():
    made, opened = FakeCrew(), Future()
    opened.set_result({})
    made.open_loader = lambda _member: SimpleNamespace(future=lambda: opened)
    made.placing.crowded = lambda: [Member("loader-0", 1)]
    keeper = Keeper(made, Roster(roles={"loader-0": 1}), Shadows(made), Gate(), None)
    keeper.begin()
    done = [made.done.get(timeout=LIMIT_S) for _ in range(3)]
    keeper.close()

    assert [(what, member.number) for what, member in done] == [
        ("start", 1),
        ("start", 2),
        ("end", 1),
    ]


def test_a_loader_that_is_stranded_gives_its_sources_to_one_that_begins_where_it_was_to_be():
    made, opened = FakeCrew(), Future()
    opened.set_result({})
    made.open_loader = lambda _member: SimpleNamespace(future=lambda: opened)
    left = [[FIRST]]
    made.placing.crowded = lambda: left.pop() if left else []
    made.placing.is_stranded = lambda member: member == FIRST
    keeper = Keeper(made, Roster(roles={"loader-0": 0}), Shadows(made), Gate(), None)
    keeper.begin()
    done = [made.done.get(timeout=LIMIT_S) for _ in range(2)]
    keeper.close()

    assert done == [("start", Member("loader-0", 1)), ("end", FIRST)]


def test_a_plane_is_whole_once_its_shadow_has_at_hand_what_it_would_begin_with():
    made, opened = FakeCrew(), Future()
    opened.set_result({})
    made.open_loader = lambda _member: SimpleNamespace(future=lambda: opened)
    keeper = Keeper(made, Roster(roles={"loader-0": 1}), Shadows(made), Gate(), None)
    keeper.begin()
    made.planner.outstanding.asked.get(timeout=LIMIT_S).set_result(TakeOver(ranges={0: (3, 9)}))
    decoded = made.actors[Member("loader-0", 1)].decode_ahead.asked.get(timeout=LIMIT_S)
    before = keeper.is_whole()

    decoded.set_result(None)
    # It is handled in the keeper's thread, which asks the planner again a second later.
    made.planner.outstanding.asked.get(timeout=LIMIT_S)
    after = keeper.is_whole()
    keeper.close()

    assert (before, after) == (False, True)


def test_the_process_of_a_member_that_is_one_is_held(crew):
    crew.actors[FIRST].process.asked.get(timeout=LIMIT_S).set_result(Process(7, "here"))
    crew.actors[FIRST].stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("killed"))

    assert [crew.done.get(timeout=LIMIT_S) for _ in range(2)] == [("hold", FIRST), ("end", FIRST)]


def test_the_end_of_a_process_that_is_held_is_heard_from_the_kernel_before_ray_tells_of_it(crew):
    crew.actors[FIRST].process.asked.get(timeout=LIMIT_S).set_result(Process(7, "here"))
    assert crew.done.get(timeout=LIMIT_S) == ("hold", FIRST)

    crew.ended[FIRST]()

    assert [crew.done.get(timeout=LIMIT_S) for _ in range(2)] == [
        ("end", FIRST),
        ("start", Member("loader-0", 1)),
    ]
    # Ray reports the end later, and causes no second replacement.
    crew.actors[FIRST].stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("killed"))
    crew.actors[Member("loader-0", 1)].process.asked.get(timeout=LIMIT_S).set_result(
        Process(8, "here")
    )
    assert crew.done.get(timeout=LIMIT_S) == ("hold", Member("loader-0", 1))


def test_ray_is_told_of_an_end_behind_all_that_the_end_calls_for():
    order = queue.Queue()
    made = FakeCrew()
    made.end = lambda member, **_: order.put(("end", member))
    made.bury = lambda member: order.put(("bury", member))
    made.start = lambda member: (
        made.actors.update({member: made.actor()}),
        order.put(("start", member)),
    )
    keeper = Keeper(made, Roster(roles={"loader-0": 0}), Shadows(made), Gate(), None)
    keeper.begin()
    made.actors[FIRST].stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("killed"))
    found = [order.get(timeout=LIMIT_S)[0] for _ in range(3)]
    keeper.close()

    assert found == ["end", "start", "bury"]


def test_a_member_whose_process_is_stopped_is_ended_and_replaced(crew):
    crew.actors[FIRST].process.asked.get(timeout=LIMIT_S).set_result(Process(7, "there", "node-b"))
    crew.processes.stopped = lambda: frozenset({FIRST.name})

    done = [crew.done.get(timeout=LIMIT_S) for _ in range(3)]

    assert done == [("hold", FIRST), ("end", FIRST), ("start", Member("loader-0", 1))]


def test_a_plane_that_is_given_up_is_told_to_all_that_live_and_to_whoever_opened_it():
    made, roles = FakeCrew(), ("loader-0", "planner", "constructor-0")
    made.dp_ranks_of = {"constructor-0": (0,)}
    told, started = queue.Queue(), queue.Queue()

    def an_actor(member):
        actor = made.actors[member] = made.actor()
        actor.begun = Method()
        actor.fail = SimpleNamespace(
            remote=lambda error: told.put((member, str(error))) or made.planner.released_to.remote()
        )
        started.put(member)

    def lose(role):
        last = max((m for m in made.actors if m.role == role), key=lambda m: m.number)
        made.actors[last].stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("killed"))

    made.start = an_actor
    for role in roles:
        an_actor(Member(role))
        started.get()
    keeper = Keeper(made, Roster(roles=dict.fromkeys(roles, 0)), Shadows(made), Gate(), None)
    keeper.begin()
    keeper.check()
    for role in (*roles, *["loader-0"] * 4):
        lose(role)
        started.get(timeout=LIMIT_S)
    lose("loader-0")

    # Holders of both are lost, and no member takes their place: the members that are starting are notified.
    heard = [told.get(timeout=LIMIT_S) for _ in range(2)]
    assert {member for member, _ in heard} == {Member("planner", 1), Member("constructor-0", 1)}
    assert all("loader-0 was lost 6 times" in why for _, why in heard)
    with pytest.raises(UnavailableError, match="loader-0 was lost 6 times"):
        keeper.check()
    keeper.close()


class ActorUnschedulableError(Exception):
    """A fake of Ray's error for an actor with affinity to a node that is gone."""


def test_a_role_whose_host_is_gone_is_told_as_that(crew, caplog):
    crew.actors[FIRST].stay.asked.get(timeout=LIMIT_S).set_exception(ActorUnschedulableError())
    crew.done.get(timeout=LIMIT_S)

    assert "the host that was chosen for it is gone, or cut off" in caplog.messages[0]


@pytest.mark.parametrize("is_by_the_loss", [False, True])
def test_ranks_hear_of_the_first_role_that_is_lost_after_a_fault_of_the_keeper(is_by_the_loss):
    made, told, looked = FakeCrew(), queue.Queue(), threading.Event()
    made.dp_ranks_of = {"constructor-0": (0,)}
    made.actors = {Member(role): made.actor() for role in ("loader-0", "planner", "constructor-0")}
    made.holders = {member.role: member for member in made.actors}
    for actor in made.actors.values():
        actor.fail = SimpleNamespace(
            remote=lambda error: told.put(str(error)) or made.planner.released_to.remote()
        )

    def fault(*_, **__):
        looked.set()
        raise ValueError("a fault")

    if is_by_the_loss:
        made.end = fault
        looked.set()
    else:
        made.board.read = fault
    roster = Roster(roles=dict.fromkeys(made.holders, 0))
    keeper = Keeper(made, roster, Shadows(made), Gate(), None)
    keeper.begin()
    assert looked.wait(LIMIT_S)
    keeper.check()

    made.actors[FIRST].stay.asked.get(timeout=LIMIT_S).set_exception(UnavailableError("killed"))

    for _ in ("planner", "constructor-0"):
        why = told.get(timeout=LIMIT_S)
        assert why.startswith("loader-0 was lost (its process has ended")
        assert "after a fault of the keeper" in why
    keeper.close()
    with pytest.raises(UnavailableError, match="after a fault of the keeper"):
        keeper.check()
