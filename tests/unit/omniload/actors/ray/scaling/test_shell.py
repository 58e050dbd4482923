"""The scaler's shell: its questions to roles, its events for the machine, and the results of changes."""

import logging
import threading
from dataclasses import replace
from itertools import chain, count, repeat
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.gate import Gate
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.scaling import shell
from omniload.actors.ray.scaling.mover import MoveUnderWayError
from omniload.actors.ray.scaling.shell import Scaling
from omniload.base.errors import StateError, UnavailableError
from omniload.machine.progress import Progress, Task
from omniload.machine.roster.members import Member
from omniload.machine.scaler import MergeLoader, MoveSources, SplitLoader
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import with_begun
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix
from tests.support.plane.given.fake_actors import Method

WHY = "loader-0 keeps 1.20 cores busy, or soon will"


class FakeMover:
    def __init__(self):
        self.done, self.error, self.cleaned = [], None, 0

    def split(self, sources, threads):
        if self.error is not None:
            raise self.error
        self.done.append(("split", sources))
        return "loader-7"

    def move(self, sources, role):
        self.done.append(("move", sources, role))

    def clean_up(self):
        self.cleaned += 1

    def retire(self, role):
        self.done.append(("retire", role))


class FakeScaler:
    """Returns one command of the script at each look, and ends the plane after the last."""

    def __init__(self, *script):
        self.script, self.seen, self.ended = list(script), [], threading.Event()

    def handle(self, seen):
        self.seen.append(seen)
        if not self.script:
            self.ended.set()
            return ()
        return (self.script.pop(0),)


def a_crew(work):
    mix = a_mix(mix={"stages": STAGES})
    beats = {
        "planner+1": Progress(
            name="planner+1",
            pid=1,
            beat_s=0.0,
            tasks=(Task(doing="waits", since_s=0.0, waits_for=("loader-0+2",)),),
            figures={"planned_step": 3.0},
        )
    }
    return SimpleNamespace(
        spec=SimpleNamespace(mix=mix, history=History(mix)),
        sources_of={"loader-0": (0, 1), "loader-1": ()},
        holders={"loader-0": Member("loader-0", 2), PLANNER: Member(PLANNER, 1)},
        actors={
            Member("loader-0", 2): SimpleNamespace(work=Method(work)),
            Member(PLANNER, 1): SimpleNamespace(filled=Method(lambda: {1: 0.25})),
        },
        board=SimpleNamespace(read=lambda: beats, post=lambda activity: lambda: None),
    )


STAGES = [
    {"from_step": 0, "weights": {"code": 3, "web": 1}},
    {"from_step": 9, "weights": {"code": 1, "web": 1}},
]


@pytest.fixture
def run(monkeypatch):
    """Run the shell over a script of commands until the last has been carried out."""

    def run(*script, work=dict, error=None, beats=None, crew=None):
        mover, scaler = FakeMover(), FakeScaler(*script)
        mover.error = error
        monkeypatch.setattr(shell, "answer_to", lambda answer, role, **_: answer())
        monkeypatch.setattr(shell, "Scaler", lambda **_: scaler)
        monkeypatch.setattr(shell, "_LOOK_S", 0.001)
        crew = crew or a_crew(work)
        crew.board.read = beats or crew.board.read
        scaling = Scaling(crew, mover, gate := Gate(), {}, None)
        assert scaler.ended.wait(60)
        scaling.close()
        # After its last look, because it would continue in another test.
        assert gate.close(10)
        return scaling, mover, scaler

    return run


def test_each_change_is_carried_out_counted_and_told_with_its_reason(run, caplog):
    scaling, mover, _ = run(
        SplitLoader(role="loader-0", sources=(1,), why=WHY),
        MoveSources(role="loader-0", sources=(0,), to="loader-1", why=WHY),
        MergeLoader(role="loader-1", sources=(0,), to="loader-0", why="both are idle"),
    )

    assert mover.done == [
        ("split", (1,)),
        ("move", (0,), "loader-1"),
        ("move", (0,), "loader-0"),
        ("retire", "loader-1"),
    ]
    assert scaling.activity.figures.read() == {"loaders": 2, "loader_changes_total": 3}
    assert f"loader-7 was added for 1 source of loader-0: {WHY}" in caplog.messages
    doing = scaling.activity.progress().tasks[0].doing
    assert doing.startswith("loader-0 took 1 source")
    assert doing.endswith(
        "which had no other and has ended, as both are idle; follows the load since"
    )


def test_a_change_that_cannot_be_is_told_and_the_plane_goes_on(run, caplog):
    split = SplitLoader(role="loader-0", sources=(1,), why=WHY)
    scaling, mover, scaler = run(split, split, error=StateError("other data than before"))

    assert mover.done == []
    assert len(scaler.seen) >= 3
    assert scaling.activity.figures.read()["loader_changes_total"] == 0
    assert "source loaders stay as they are: other data than before" in caplog.messages


def test_a_move_that_goes_on_after_its_limit_is_told_as_one_that_has_happened(run, caplog):
    split = SplitLoader(role="loader-0", sources=(1,), why=WHY)
    under_way = "1 source went to loader-7, and constructor-0 did not hear of it"
    scaling, mover, scaler = run(split, error=MoveUnderWayError(under_way))

    assert scaling.activity.figures.read()["loader_changes_total"] == 1
    assert f"{under_way}: {WHY}" in caplog.messages
    assert mover.cleaned >= len(scaler.seen)  # each look also cleans up after interrupted changes


def test_a_look_has_what_loaders_do_what_the_mix_will_be_and_whom_the_planner_waits_for(run):
    looks = iter(range(1, 1000))
    _, _, scaler = run(
        *[MoveSources(role="loader-0", sources=(0,), to="loader-1", why=WHY)] * 3,
        work=lambda: {0: (0.5, 1000 * next(looks))},
    )

    first, *_, last = scaler.seen
    assert first.sources_of == {"loader-0": (0, 1), "loader-1": ()}
    assert first.shares_S == pytest.approx({0: 0.75, 1: 0.25})
    assert first.waited == {"loader-0"}
    assert first.filled_S == {1: 0.25}
    assert first.busy_S == {}
    assert last.busy_S == {0: 0.0}  # it has read no more
    assert last.tokens_S[0] > 0


def test_a_stage_is_seen_ahead_also_where_a_step_takes_longer_than_from_look_to_look(
    run, monkeypatch
):
    now_s = count(0.0, 5.0)
    at = {"now_s": 0.0}

    def beats():
        at["now_s"] = next(now_s)
        step = 3 + at["now_s"] // 12
        planner = Progress(
            name="planner+1", pid=1, beat_s=0.0, tasks=(), figures={"planned_step": step}
        )
        return {"planner+1": planner}

    monkeypatch.setattr(shell, "time", SimpleNamespace(monotonic=lambda: at["now_s"]))
    move = MoveSources(role="loader-0", sources=(0,), to="loader-1", why=WHY)

    _, _, scaler = run(*[move] * 10, beats=beats)

    # Six steps before it are 72 s; the first two looks measure the time of a step.
    soon = [seen.soon_S[1] for seen in scaler.seen[:10]]
    assert soon == pytest.approx([0.25] * 3 + [0.5] * 7)


def test_a_run_that_goes_on_from_a_state_has_no_pace_before_its_planner_has_told_two_steps(run):
    """Earlier, all steps before the state seemed to be taken between two looks, and far stages seemed to come soon."""
    told = chain([{}, {}], repeat({"planned_step": 5_000.0}))
    planner = Progress(name="planner+1", pid=1, beat_s=0.0, tasks=())
    far = [STAGES[0], {"from_step": 9_000, "weights": {"code": 1, "web": 1}}]
    crew, mix = a_crew(dict), a_mix(mix={"stages": far})
    crew.spec = SimpleNamespace(mix=mix, history=History(mix))
    move = MoveSources(role="loader-0", sources=(0,), to="loader-1", why=WHY)

    _, _, scaler = run(
        *[move] * 5, crew=crew, beats=lambda: {"planner+1": replace(planner, figures=next(told))}
    )

    assert {seen.soon_S[1] for seen in scaler.seen[:5]} == {0.25}


def test_a_stage_that_waits_for_epochs_counts_once_the_planner_has_begun_it(run):
    waits = {"from_epochs": {"code": 1}, "weights": {"code": 1, "web": 3}}
    mix = a_mix(version=2, mix={"stages": [STAGES[0], waits]})
    state = replace(MixState.start(2), step=2, cursors_S=((10, 0, 0), (0, 0, 0)))
    begun = with_begun(History(mix), state, (10, 10))
    answers = iter([UnavailableError("planner+1 has died"), History(mix), begun])
    crew = a_crew(dict)
    crew.spec = SimpleNamespace(mix=mix, history=History(mix))

    def history():
        answer = next(answers)  # and is asked no more once none waits
        if isinstance(answer, Exception):
            raise answer
        return answer

    crew.actors[Member(PLANNER, 1)] = SimpleNamespace(
        history=Method(history), filled=Method(lambda: {1: 0.25})
    )
    move = MoveSources(role="loader-0", sources=(0,), to="loader-1", why=WHY)

    _, _, scaler = run(*[move] * 4, crew=crew)

    assert len(begun.edits) == 1
    assert [seen.shares_S[1] for seen in scaler.seen[:4]] == [0.25, 0.25, 0.75, 0.75]


def test_a_plane_that_is_closed_waits_for_a_look_in_which_the_planner_is_asked(monkeypatch):
    waits = {"from_epochs": {"code": 1}, "weights": {"code": 1, "web": 3}}
    crew, gate = a_crew(dict), Gate()
    crew.spec = a_mix(version=2, mix={"stages": [STAGES[0], waits]})
    crew.spec = SimpleNamespace(mix=crew.spec, history=History(crew.spec))
    monkeypatch.setattr(shell, "answer_to", lambda answer, role, **_: answer())
    monkeypatch.setattr(shell, "_LOOK_S", 0.001)
    asked, may_answer, closed = threading.Event(), threading.Event(), threading.Event()

    def history():
        asked.set()
        may_answer.wait(60)
        return crew.spec.history

    crew.actors[Member(PLANNER, 1)] = SimpleNamespace(
        history=Method(history), filled=Method(lambda: {1: 0.25})
    )
    scaling = Scaling(crew, FakeMover(), gate, {}, None)
    assert asked.wait(60)
    scaling.close()
    closing = threading.Thread(target=lambda: gate.close(60) and closed.set())
    closing.start()

    assert not closed.wait(0.05)
    may_answer.set()
    closing.join()
    assert closed.is_set()


def test_a_loader_that_is_lost_is_asked_again_later(run, caplog):
    def lost():
        raise UnavailableError("loader-0 has died")

    caplog.set_level(logging.DEBUG, "omniload")
    _, _, scaler = run(SplitLoader(role="loader-0", sources=(1,), why=WHY), work=lost)

    assert len(scaler.seen) >= 2
    assert "loader-0 does not say what it does: loader-0 has died" in caplog.messages


def test_an_answer_that_is_a_fault_ends_no_scaling_and_is_told_once(run, caplog):
    def at_fault():
        raise StateError("its index is of another source")

    split = SplitLoader(role="loader-0", sources=(1,), why=WHY)
    _, mover, scaler = run(split, split, work=at_fault)

    assert len(scaler.seen) >= 3
    assert mover.done == [("split", (1,))] * 2
    told = "source loaders are scaled without what loader-0 says: its index is of another source"
    assert caplog.messages.count(told) == 1
