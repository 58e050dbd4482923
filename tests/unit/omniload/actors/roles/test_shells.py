"""The shells of loader, constructor and client, without threads: their messages, and the ends of waits."""

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from omniload.actors.heartbeat_board import Activity
from omniload.actors.patience import taken_within
from omniload.actors.roles import constructor as constructor_module
from omniload.actors.roles import planner_events as planner_events_module
from omniload.actors.roles.constructor import ConstructorShell
from omniload.actors.roles.links import ConstructorLinks
from omniload.actors.roles.planner import PlannerShell
from omniload.base.clock import LONGEST_WAIT_S
from omniload.base.errors import (
    ConfigError,
    DefectError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.base.ragged import Ragged
from omniload.batch.microbatch import Batch
from omniload.batch.rows import build_rows
from omniload.client import Client
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import (
    ChangeAsked,
    ReleaseSteps,
    ResizeAsked,
    SamplesReported,
    ServeWorld,
    StepsTaken,
)
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.mix.edits.edit import SetWeights
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import Edition, RanksServed, World, WorldRank
from tests.support.plane.builders import a_mix, a_plan, a_planner, a_table, tokens_of

A = [0, 1, 0, 0, 5, 5]
LIMIT_S = 60.0
RANK = WorldRank(0)


def a_shell(fetch=None, activity=None, ranks=1, **changes):
    machine = DataConstructor(
        dp_ranks=list(range(ranks)), names=["web", "code"], row_length=8, **changes
    )
    own = ColumnRanges.of([SampleColumns(tokens=Ragged.of([tokens_of(0, 1, 0, 5)]))])
    activity = activity or Activity("constructor-0")
    return ConstructorShell(machine, fetch or (lambda requests: own), activity)


def test_a_step_that_was_built_is_taken():
    shell = a_shell()

    assert shell.build([a_plan([[A]], step=3)]) == 1
    assert (
        shell.take(3, RANK).microbatches[0].tokens_RT[0, :5].tolist()
        == tokens_of(0, 1, 0, 5).tolist()
    )


def test_a_constructor_rests_since_it_built_last_and_not_since_it_began():
    activity = Activity("constructor-0")
    shell = a_shell(activity=activity)
    (begun,) = activity.progress().tasks

    shell.build([a_plan([[A]], step=3)])

    (rests,) = activity.progress().tasks
    assert rests.doing == begun.doing
    assert rests.since_s > begun.since_s


def test_a_rank_takes_what_is_built_while_the_next_steps_are_laid_out():
    taken, rank = [], ThreadPoolExecutor(1)

    def rows(*what, **how):
        # In another thread: the lock may be taken twice by one.
        taking = rank.submit(lambda: shell.has(2) and shell.take(2, RANK).step)
        taken.extend(each.result() for each in wait([taking], LIMIT_S).done)
        return build_rows(*what, **how)

    shell = a_shell(rows=rows)

    shell.build([a_plan([[A]], step=2)])
    shell.build([a_plan([[A]], step=3)])
    rank.shutdown()

    assert taken == [False, 2]
    assert shell.has(3)


def test_what_is_laid_out_for_ranks_that_are_gone_by_then_is_dropped():
    def rows(*what, **how):
        shell.build([], RanksServed(generation=1, dp_ranks=(0,)))
        return build_rows(*what, **how)

    shell = a_shell(rows=rows)

    shell.build([a_plan([[A]], step=2)])

    assert not shell.has(2, generation=1)


def test_a_step_that_is_built_for_the_earlier_ranks_is_not_given_to_later_ones():
    shell, why = a_shell(), UnavailableError("the journal is full")
    shell.build([a_plan([[A]], step=2)])

    assert shell.has(2)
    assert shell.take_built(2, WorldRank(0, generation=1)) is None
    assert not shell.has(2, generation=1)
    shell.fail(why)  # before it hears of the next ranks
    with pytest.raises(UnavailableError) as caught:
        shell.take(2, WorldRank(0, generation=1))
    assert caught.value is why
    assert shell.take(2, RANK).step == 2


def test_a_step_is_fetched_once():
    asked = []

    def fetch(requests):
        asked.append(len(requests))
        return ColumnRanges.of([SampleColumns(tokens=Ragged.of([tokens_of(0, 1, 0, 5)]))])

    shell = a_shell(fetch)
    shell.build([a_plan([[A]])])
    shell.build([a_plan([[A]])])

    assert asked == [1]


def a_fetch_that_lacks(step, then):
    """Return a fetch whose loader lacks samples once; ``then`` happens meanwhile."""
    asked = []

    def fetch(requests):
        asked.append(requests)
        if len(asked) == 1:
            then()
            raise StateError("source 'web' holds positions 4 to 8, asked for 1 to 1")
        return ColumnRanges.of([SampleColumns(tokens=Ragged.of([tokens_of(0, step, 0, 5)]))])

    return fetch, asked


def test_a_step_that_every_rank_has_meanwhile_is_not_built_again():
    fetch, asked = a_fetch_that_lacks(1, lambda: shell.release(ReleaseSteps(step=4)))
    shell = a_shell(fetch)

    assert shell.build([a_plan([[A]], step=3)]) == 1
    assert len(asked) == 1
    assert not shell.has(3)


def test_samples_that_a_replaced_loader_lacks_are_asked_of_the_one_in_its_place():
    serving = ["loader-0"]
    fetch, asked = a_fetch_that_lacks(1, lambda: serving.append(serving.pop() + "+1"))
    machine = DataConstructor(dp_ranks=[0], names=["web", "code"], row_length=8)
    shell = ConstructorShell(machine, fetch, Activity("constructor-0"), lambda: tuple(serving))

    shell.build([a_plan([[A]], step=3)])

    assert shell.has(3)
    assert len(asked) == 2


def test_samples_that_nobody_holds_are_a_state_error(monkeypatch):
    monkeypatch.setattr(constructor_module, "_TOLD_WITHIN_S", 0.0)
    fetch, asked = a_fetch_that_lacks(1, lambda: None)

    with pytest.raises(StateError, match="holds positions 4 to 8"):
        a_shell(fetch).build([a_plan([[A]], step=3)])
    assert len(asked) == 1


def test_a_step_that_is_not_built_in_time_is_a_timeout():
    with pytest.raises(TimeoutError, match="step 4 was not built within 0"):
        a_shell().take(4, RANK, timeout_s=0)


def test_a_failure_reaches_whoever_waits_and_built_steps_are_still_served():
    shell = a_shell()
    shell.build([a_plan([[A]])])

    shell.fail(IntegrityError("bad record"))
    shell.fail(StateError("a later one"))

    assert shell.take(0, RANK).step == 0
    with pytest.raises(IntegrityError, match="bad record"):
        shell.take(1, RANK)


def test_the_end_of_the_data_is_no_batch():
    shell = a_shell()
    shell.build([a_plan([[A]])])

    shell.end(1)
    # As for a shard that was read ahead: the run has all its steps.
    shell.fail(IntegrityError("bad record"))

    assert shell.take(0, RANK).step == 0
    assert shell.take(1, RANK) is None
    assert shell.take(7, RANK) is None


def test_steps_at_hand_are_taken_together_up_to_as_many_as_asked_for():
    shell = a_shell()
    for step in range(3):
        shell.build([a_plan([[A]], step=step)])
    shell.end(3)

    assert [batch.step for batch in shell.take_several(0, 2, RANK)] == [0, 1]
    assert [batch.step for batch in shell.take_several(2, 2, RANK)] == [2]
    assert shell.take_several(3, 2, RANK) == ()


def test_what_is_lent_may_be_taken_back_until_it_is_confirmed():
    shell = a_shell()
    for step in range(3):
        shell.build([a_plan([[A]], step=step)])
    shell.end(3)

    batches, edition = shell.lend_several(0, 3, RANK, given=1)

    assert [batch.step for batch in batches] == [0, 1, 2]
    assert shell.confirm(1, edition)
    assert shell.fence((0, 1)) == 2
    assert not shell.confirm(2, edition)
    assert shell.take(1, RANK).step == 1, "it may be asked for anew"
    with pytest.raises(TimeoutError, match="step 2 was not built within 0 s"):
        shell.lend_several(2, 3, RANK, timeout_s=0)
    assert shell.lend_several(3, 3, RANK) == ((), edition)


def test_a_step_that_was_let_go_is_an_error_and_not_a_wait():
    shell = a_shell()
    shell.build([a_plan([[A]])])

    shell.release(ReleaseSteps(step=1))

    with pytest.raises(StateError, match="a rank takes steps in order, each once"):
        shell.take(0, RANK)


def test_what_all_ranks_tell_of_a_step_is_one_answer_to_the_planner(monkeypatch):
    monkeypatch.setattr(constructor_module, "_TOLD_TOGETHER_S", LIMIT_S)
    shell = a_shell(ranks=4)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shell.told, 0)
        shell.taken(3, RANK)
        heard, _ = asked.result(LIMIT_S)  # a planner that has heard nothing hears at once

        asked = pool.submit(shell.told, heard)
        for rank in (1, 2, 3):
            assert not asked.done()
            assert shell.taken(3, WorldRank(rank))

        assert asked.result(LIMIT_S) == (4, StepsTaken(steps={(rank, 0): 3 for rank in range(4)}))


def test_what_a_rank_tells_waits_for_a_late_one_no_longer_than_a_moment(monkeypatch):
    monkeypatch.setattr(constructor_module, "_TOLD_TOGETHER_S", 1e-3)
    shell = a_shell(ranks=2)
    shell.taken(3, RANK)

    assert shell.told(0) == (1, StepsTaken(steps={(0, 0): 3}))
    shell.taken(4, RANK)
    assert shell.told(1) == (2, StepsTaken(steps={(0, 0): 4}))


def test_a_planner_that_asks_where_nobody_tells_anything_is_answered_in_the_end(monkeypatch):
    monkeypatch.setattr(constructor_module, "_ASKED_AGAIN_S", 1e-3)
    monkeypatch.setattr(constructor_module, "_TOLD_TOGETHER_S", 1e-3)

    assert a_shell().told(0) == (0, StepsTaken(steps={}))


class FakeHandle:
    """A rank's handle over batches in memory."""

    def __init__(self, steps, first_step=0):
        self.first_step = first_step
        self.steps, self.told, self.closed, self.timeouts_s = steps, [], False, []

    def take(self, step, timeout_s=None):
        self.timeouts_s.append(timeout_s)
        if step not in self.steps:
            return None
        return Batch(step=step, microbatches=(), loss_tokens=0, imbalance=1.0, bound=1.0)

    def taken(self, step):
        self.told.append(step)

    def state_at(self, step):
        return {"step": step}

    def close(self):
        self.closed = True


def test_a_client_hands_out_steps_in_order_until_the_data_ends():
    handle = FakeHandle(range(2, 5), first_step=2)

    with Client(handle) as client:
        steps = [batch.step for batch in client]

    assert steps == [2, 3, 4]
    assert handle.told == [2, 3, 4]
    assert handle.closed


def test_a_clients_timeout_is_passed_on_and_anything_but_seconds_above_0_is_refused():
    handle = FakeHandle(range(9))
    client = Client(handle)
    for wrong in (0, -1.0, float("nan"), float("inf"), "5s"):
        with pytest.raises(ConfigError, match="give seconds above 0, or None"):
            client.next_batch(timeout=wrong)

    assert client.next_batch(timeout=2.5).step == 0
    assert client.next_batch().step == 1
    assert client.next_batch(timeout=1e300).step == 2
    assert handle.timeouts_s == [2.5, None, LONGEST_WAIT_S]


def test_a_clients_state_is_that_of_the_batches_handed_out():
    client = Client(FakeHandle(range(9)))
    before = client.state_dict()
    client.next_batch()

    assert before == {"step": 0}
    assert client.state_dict() == {"step": 1}


def test_the_end_of_the_data_is_said_again_when_asked_again():
    client = Client(FakeHandle([]))

    assert client.next_batch() is None
    assert client.next_batch() is None
    assert client.next_step == 0


def test_a_planner_shell_that_never_started_closes():
    PlannerShell(a_planner(), lambda source: None, [], None, Activity("planner")).close()


class FakeLoader:
    """A loader that answers each read with the same outcome."""

    def __init__(self, error):
        self.error = error

    def read_ahead(self, command):
        answer = Future()
        answer.set_exception(self.error)
        return answer


class FakeConstructor:
    """A constructor that can or cannot be notified of a failure."""

    dp_ranks = (0,)

    def __init__(self, deaf=False):
        self.deaf, self.heard = deaf, []

    def told(self, served):
        """Ranks report to the planner themselves."""

    def fail(self, error):
        if self.deaf:
            raise RuntimeError("no such actor")
        self.heard.append(error)


def stopped(error, constructors):
    """Return a planner shell that ended with ``error``."""
    shell = PlannerShell(
        a_planner(), lambda source: FakeLoader(error), constructors, None, Activity("planner")
    )
    shell.check()
    shell.start()
    shell._thread.join()
    return shell


def test_a_failure_is_told_to_every_constructor_although_one_cannot_be_told(caplog):
    deaf, hearing = FakeConstructor(deaf=True), FakeConstructor()
    error = IntegrityError("bad record")

    stopped(error, [deaf, hearing]).close()

    assert hearing.heard == [error]
    assert "the data constructor of ranks (0,) cannot be notified" in caplog.text


def test_a_fault_of_the_project_is_told_as_one_with_the_role_that_has_it():
    constructor = FakeConstructor()

    stopped(ValueError("bad shape"), [constructor]).close()

    (heard,) = constructor.heard
    assert isinstance(heard, DefectError)
    assert "omniload itself in a source loader: ValueError: bad shape" in str(heard)


def test_a_planner_that_has_stopped_says_why_whenever_asked():
    shell = stopped(IntegrityError("bad record"), [])

    for _ in range(2):
        with pytest.raises(IntegrityError, match="bad record"):
            shell.check()
    shell.close()


class SilentLoader:
    """A loader that has not answered yet."""

    name = "loader-0"

    def read_ahead(self, command):
        return Future()


def an_edit(**weights):
    return ChangeAsked(change=SetWeights(weights=weights))


def a_planner_shell(run_dir, planner=None, journal=None):
    return PlannerShell(
        planner or a_planner(),
        lambda source: SilentLoader(),
        [],
        journal,
        Activity("planner"),
        run_dir,
    )


class TakenOverJournal:
    """The journal of a planner that is believed dead, and lives: another one has claimed it."""

    def wait_in(self, room):
        """It never waits."""

    def require_claim(self):
        raise StateError("another planner has taken the journal over")

    def close(self):
        """It holds nothing."""


def test_a_planner_whose_journal_was_taken_over_leaves_the_edits_of_the_next_one_alone(tmp_path):
    shell = a_planner_shell(tmp_path, journal=TakenOverJournal())
    shell.start()

    with pytest.raises(StateError, match="taken the journal over"):
        shell.change(an_edit(web=2.0)).result(LIMIT_S)
    shell.close()  # it waits for the thread, which records the cause of its end after that answer
    with pytest.raises(StateError, match="taken the journal over"):
        shell.change(an_edit(web=2.0))

    assert not list(tmp_path.iterdir())


def test_a_change_after_a_take_over_is_told_with_what_was_planned_before_it(tmp_path):
    known = replace(a_planner().state, step=4)
    shell = a_planner_shell(tmp_path, a_planner(known=[known]))
    shell.start()

    taken = shell.change(an_edit(web=2.0)).result(LIMIT_S)
    shell.close()

    assert (taken.edit.step, taken.planned) == (4, 4)


class OneAnswer(FakeLoader):
    """A loader that answers its first read with samples for three steps, and the next one later."""

    def __init__(self):
        self.answers, self.is_asked_again = [Future(), Future()], threading.Event()
        table = replace(a_table([10] * 6), stop=256)
        self.answers[0].set_result(SamplesReported(source=0, table=table))

    def read_ahead(self, command):
        if len(self.answers) == 1:
            self.is_asked_again.set()
            return self.answers[0]
        return self.answers.pop(0)

    def release(self, command):
        """The release of steps does not matter here."""


class GivenTo(FakeConstructor):
    """A constructor that has given its ranks every step before one."""

    def __init__(self, step, *, answers=True):
        super().__init__()
        self.step, self.answers, self.editions = step, answers, []
        self.is_ahead = threading.Event()

    def fence(self, edition):
        fenced = Future()
        if self.answers:
            fenced.set_result(self.step)
        return fenced

    def build(self, plans, served, released_to):
        self.editions.append(served.edition)
        if any(plan.step == 2 for plan in plans):
            self.is_ahead.set()
        return Future()

    def release(self, command):
        """The release of steps does not matter here."""

    def end(self, step):
        """Nor does the end."""


def test_a_read_that_fails_once_every_step_is_planned_ends_nothing():
    ahead = {"pack": {"lookahead_rows": 0}, "runtime": {"prefetch_steps": 2}}
    mix, loader = a_mix(sources=["web"], rows=2, length=10, micro_rows=1, **ahead), OneAnswer()
    shell = PlannerShell(
        a_planner(mix, num_steps=3), lambda source: loader, [GivenTo(3)], None, Activity("planner")
    )
    shell.start()
    assert loader.is_asked_again.wait(LIMIT_S)
    shell.taken(0, RANK)

    for _ in range(2):  # before it fails, and afterwards: it continues, and answers
        with pytest.raises(ConfigError, match="all its steps are planned"):
            shell.change(an_edit(web=2.0)).result(LIMIT_S)
        if not loader.answers[0].done():
            loader.answers[0].set_exception(IntegrityError("bad record"))
    shell.check()
    shell.close()


def steps_ahead_of(constructor, num_steps=3):
    """Return the shell of a planner that has planned 3 steps for a rank that has taken none, with one constructor."""
    ahead = {"pack": {"lookahead_rows": 0}, "runtime": {"prefetch_steps": 3}}
    mix, loader = a_mix(sources=["web"], rows=2, length=10, micro_rows=1, **ahead), OneAnswer()
    planner = a_planner(mix, num_steps=num_steps)
    shell = PlannerShell(planner, lambda source: loader, [constructor], None, Activity("planner"))
    shell.start()
    assert constructor.is_ahead.wait(LIMIT_S)
    return shell


def test_a_change_holds_from_the_first_step_that_no_rank_was_given():
    constructor = GivenTo(1)
    shell = steps_ahead_of(constructor)

    taken = shell.change(an_edit(web=2.0)).result(LIMIT_S)
    shell.close()

    assert (taken.edit.step, taken.planned, taken.slowest) == (1, 1, 0)
    assert Edition(turn=1, since=1) in constructor.editions


def test_a_change_of_a_constructor_that_does_not_answer_holds_behind_what_is_planned(monkeypatch):
    monkeypatch.setattr(planner_events_module, "_FENCED_WITHIN_S", 1e-3)
    constructor = GivenTo(1, answers=False)
    shell = steps_ahead_of(constructor, num_steps=9)

    taken = shell.change(an_edit(web=2.0)).result(LIMIT_S)
    shell.close()

    assert (taken.edit.step, taken.planned) == (3, 3)
    assert constructor.editions[-1] == Edition(turn=1, since=3)


def test_withheld_steps_are_given_out_once_a_change_is_refused():
    constructor = GivenTo(1)
    shell = steps_ahead_of(constructor)

    with pytest.raises(ConfigError, match="books"):
        shell.change(an_edit(books=2.0)).result(LIMIT_S)
    shell.close()

    assert constructor.editions[-1] == Edition(turn=1, since=3)


def test_changes_that_are_asked_for_at_once_are_taken_up_one_after_the_other():
    shell = steps_ahead_of(GivenTo(2))

    answers = [shell.change(an_edit(web=float(weight))) for weight in (2, 3, 4)]
    edits = [answer.result(LIMIT_S).edit for answer in answers]
    shell.close()

    assert [(edit.revision, edit.step) for edit in edits] == [(1, 2), (2, 2), (3, 2)]


class TellingConstructor(FakeConstructor):
    """A constructor that answers the planner's questions about its ranks when the test says so."""

    def __init__(self, *dp_ranks):
        super().__init__()
        self.dp_ranks = dp_ranks
        self.asked, self.built, self.failed = (queue.SimpleQueue() for _ in range(3))
        self.answered = None

    def told(self, served):
        if self.answered is not None and not self.answered.done():
            return None
        self.answered = Future()
        self.asked.put(self.answered)
        return self.answered

    def build(self, plans, served, released_to):
        self.built.put([plan.step for plan in plans])
        return self.told(served) or Future()

    def fail(self, error):
        self.failed.put(error)

    def release(self, command):
        """The release of steps does not matter here."""

    def end(self, step):
        """Nor does the end."""


def test_constructors_are_asked_what_ranks_tell_with_the_next_plans_or_at_once_without_any():
    ahead = {"pack": {"lookahead_rows": 0}, "runtime": {"prefetch_steps": 2}}
    mix = a_mix(sources=["web"], rows=2, length=10, micro_rows=1, **ahead)
    constructors = [TellingConstructor(0), TellingConstructor(1)]
    shell = PlannerShell(
        a_planner(mix, dp=2, num_steps=3),
        lambda source: OneAnswer(),
        constructors,
        None,
        Activity("planner"),
    )
    shell.start()
    asked = [each.asked.get(timeout=LIMIT_S) for each in constructors]
    assert [constructors[0].built.get(timeout=LIMIT_S) for _ in range(2)] == [[0], [1]]

    asked[0].set_result(StepsTaken(steps={}))
    asked[0] = constructors[0].asked.get(timeout=LIMIT_S)
    asked[0].set_result(StepsTaken(steps={(0, 0): 0}, is_whole=True))
    asked[1].set_result(StepsTaken(steps={(1, 0): 0}, is_whole=True))

    assert [each.built.get(timeout=LIMIT_S) for each in constructors] == [[2], [0]]
    # No plan waited for a report of the first constructor while the other had not reported.
    asked = [each.asked.get(timeout=LIMIT_S) for each in constructors]
    assert all(each.asked.empty() for each in constructors)
    asked[0].set_result(StepsTaken(steps={(0, 0): 1}, is_whole=True))
    asked[1].set_result(StepsTaken(steps={(1, 0): 1}, is_whole=True))
    asked = [each.asked.get(timeout=LIMIT_S) for each in constructors]  # every step is planned
    shell.replace_constructor(0, lambda: setattr(constructors[0], "answered", None))
    asked.append(constructors[0].asked.get(timeout=LIMIT_S))  # of the one that has its place
    asked[2].cancel()
    asked[0].set_exception(ValueError("its own"))
    assert isinstance(constructors[1].failed.get(timeout=LIMIT_S), DefectError)
    shell.close()


def test_a_failure_to_build_for_ranks_that_are_gone_is_dropped_and_the_question_put_again():
    constructor, answers = TellingConstructor(0), []
    links = ConstructorLinks([constructor], lambda _, done: answers.append(done), print)
    world = World(tree=ClientPlaceTree.of(dp=1), generation=1)
    links.listen()

    links.tell(ServeWorld(world=world, windows=()))
    constructor.asked.get_nowait().set_exception(StateError("its samples are gone as well"))
    assert answers == []
    constructor.asked.get_nowait().set_exception(IntegrityError("bad record"))

    assert isinstance(answers[0].exception(), IntegrityError)


def test_a_constructor_whose_answer_the_planner_has_yet_to_hear_is_not_asked_again():
    constructor = TellingConstructor(0)
    links = ConstructorLinks([constructor], lambda _, __: None, print)
    links.listen()
    constructor.asked.get_nowait().set_result(StepsTaken(steps={(0, 0): 0}))

    links.listen()
    assert constructor.asked.empty()
    links.heard(0)
    links.listen()

    assert not constructor.asked.empty()


class ClaimedJournal:
    """A journal that a planner continues, and whose store names its owner, or does not."""

    def __init__(self, answer):
        self.answer = answer

    def wait_in(self, room):
        """It is never full."""

    def require_claim(self):
        if self.answer is not None:
            raise self.answer

    def close(self):
        """Nothing is held."""


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        (None, "rank dp=0 has taken step 9"),
        (StateError("another planner has taken the journal over"), "another planner"),
        (UnavailableError("the store does not answer"), "rank dp=0 has taken step 9"),
        (OSError("the store is gone"), "rank dp=0 has taken step 9"),
    ],
)
def test_a_step_that_nobody_planned_is_told_unless_the_next_planner_may_have_planned_it(
    claim, told
):
    planner, constructor = a_planner(life=1), TellingConstructor(0)
    shell = PlannerShell(
        planner,
        lambda source: SilentLoader(),
        [constructor],
        ClaimedJournal(claim),
        Activity("planner"),
    )
    shell.start()

    shell.taken(9, RANK)

    assert told in str(constructor.failed.get(timeout=LIMIT_S))
    with pytest.raises(OmniloadError, match=told):
        shell.check()
    shell.close()


def test_a_change_that_cannot_be_kept_is_answered_with_the_cause(tmp_path):
    (tmp_path / "run").write_text("a file, not a folder")
    shell = a_planner_shell(tmp_path / "run")
    asked = [shell.change(an_edit(web=2.0)), shell.change(an_edit(web=3.0))]
    shell.start()

    for answer in asked:
        with pytest.raises(OmniloadError, match="the run's edits"):
            answer.result(LIMIT_S)
    with pytest.raises(OmniloadError, match="the run's edits"):
        shell.change(an_edit(web=4.0))
    shell.close()


def test_a_change_that_a_planner_no_longer_takes_up_is_answered():
    failing, stopping = a_planner_shell(None), a_planner_shell(None)
    failing.fail(IntegrityError("bad record"))
    late = failing.change(an_edit(web=2.0))
    failing.start()
    stopping.start()
    stopping.close()

    with pytest.raises(IntegrityError, match="bad record"):
        late.result(LIMIT_S)
    with pytest.raises(UnavailableError, match="was closed"):
        stopping.change(an_edit(web=2.0)).result(LIMIT_S)


def test_a_change_that_a_planner_did_not_come_to_in_time_is_withdrawn(tmp_path):
    shell = a_planner_shell(tmp_path)
    late = shell.change(an_edit(web=2.0))

    with pytest.raises(UnavailableError, match="within 0 s"):
        taken_within(late, 0.0)
    shell.start()
    taken = taken_within(shell.change(an_edit(web=3.0)), LIMIT_S)
    shell.close()

    assert taken.edit.revision == 1
    assert taken.edit.change.weights == {"web": 3.0}


def test_a_change_that_a_planner_has_begun_with_and_not_ended_is_no_fault_of_ours():
    begun = Future()
    begun.set_running_or_notify_cancel()

    with pytest.raises(UnavailableError, match=r"has begun .* may still finish: see what it"):
        taken_within(begun, 0.0)


def test_other_ranks_that_a_planner_did_not_come_to_in_time_are_withdrawn(tmp_path):
    shell = a_planner_shell(tmp_path)
    late = shell.resize(ResizeAsked(dp=2, step=0))

    with pytest.raises(UnavailableError, match="within 0 s, so the request is withdrawn"):
        taken_within(late, 0.0, what="other ranks")
    shell.start()
    with pytest.raises(ConfigError, match="the ranks of this plane stay as they are"):
        taken_within(shell.resize(ResizeAsked(dp=3, step=0)), LIMIT_S)  # it answers
    shell.close()
