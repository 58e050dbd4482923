"""A policy moves the weights of a running job by the losses that its loop reports, and again after a resume."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import omniload
from omniload.actors.status_file import STATUS_NAME, read_status
from omniload.base.clock import FakeClock
from omniload.base.config import checked
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.commands.edits import pulse, steer
from omniload.commands.edits.steer import Steering
from omniload.mix.edits.edits_file import EDITS_NAME
from omniload.mix.schema.policies import SteeringConfig
from tests.support.plane.edits.mix_commands import a_mix_file, json_of, run_mix

HARD = "text"


@pytest.fixture
def mix_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = a_mix_file(tmp_path, rows=6, micro_rows=2)
    mix = yaml.safe_load(path.read_text())
    mix["runtime"]["prefetch_steps"] = 2
    path.write_text(yaml.safe_dump(mix))
    return path


def a_file(tmp_path, *, least=0.002, **policy):
    path = tmp_path / "steer.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "every": 6, "least": least, "policy": policy}))
    return path


def losses_of(loader, rows, hard):
    """Return a loss for labels of the hard source, and 1 for others."""
    number = loader.source_names.index(HARD)
    return np.where(rows.source_ids == number, hard, 1.0)


def taken(loader, count, found, hard=3.0):
    for _ in range(count):
        batch = loader.next_batch()
        found[batch.step] = [rows.tokens.copy() for rows in batch.microbatches]
        for rows in batch.microbatches:
            loader.observe(rows, losses_of(loader, rows, hard))


def test_decisions_are_edits_that_a_resume_makes_again(mix_path, tmp_path):
    run, found, again = tmp_path / "run", {}, {}
    file = a_file(tmp_path, type="loss", rate=1.0)
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 5, found)
        state = loader.state_dict()
        first = json_of("steer", run, file, "--once")
        taken(loader, 10, found, hard=5.0)
        second = json_of("steer", run, file, "--once")
        taken(loader, 10, found)

    assert first["losses"][HARD] == pytest.approx(3.0)
    assert {loss for name, loss in first["losses"].items() if name != HARD} == {1.0}
    assert second["losses"][HARD] == pytest.approx(5.0)  # since the first decision
    shares = [first["before"], first["after"], second["after"]]
    assert shares[0][HARD] < shares[1][HARD] < shares[2][HARD]
    moved = {n: s * np.exp(2.0 * (n == HARD)) for n, s in shares[0].items()}
    wanted = 0.9 * moved[HARD] / sum(moved.values()) + 0.1 * shares[0][HARD]
    assert shares[1][HARD] == pytest.approx(wanted)
    shown = json_of("show", run)
    assert [edit["step"] for edit in shown["edits"]] == [first["step"], second["step"]]

    with omniload.open(mix_path, run_dir=run, arrays="numpy", state=state) as loader:
        taken(loader, 20, again)
    assert all(
        np.array_equal(one, other)
        for step, rows in again.items()
        for one, other in zip(found[step], rows, strict=True)
    )
    assert len(again) == 20


@pytest.mark.parametrize("form", ["labels", "documents", "source"])
def test_every_form_of_losses_comes_to_one_decision_and_is_shown(mix_path, tmp_path, form):
    run, file = tmp_path / "run", a_file(tmp_path, type="loss", rate=1.0)
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        number = loader.source_names.index(HARD)
        for _ in range(5):
            batch = loader.next_batch()
            if form == "labels":
                loader.observe(batch, losses_of(loader, batch, 3.0))
            elif form == "documents":
                hard = [1.0 + 2.0 * (piece.source == number) for piece in batch.pieces()]
                loader.observe(document_losses=hard)
            else:
                for name in loader.source_names:
                    loader.observe(source=name, loss=1.0 + 2.0 * (name == HARD))
        said = json_of("steer", run, file, "--once")

    assert said["losses"] == {name: 1.0 + 2.0 * (name == HARD) for name in said["losses"]}
    moved = {n: s * np.exp(2.0 * (n == HARD)) for n, s in said["before"].items()}
    wanted = 0.9 * moved[HARD] / sum(moved.values()) + 0.1 * said["before"][HARD]
    assert said["after"][HARD] == pytest.approx(wanted)
    shown = json_of("show", run)["losses"]
    assert shown["step"] == 4
    assert {name: told["loss"] for name, told in shown["sources"].items()} == said["losses"]
    audited = json_of("audit", run, "--step", 4)["samples"]
    assert audited[0]["source"] == HARD
    assert audited[0]["loss"] == pytest.approx(3.0)
    assert audited[0]["loss_of"] == ("source" if form == "source" else "document")
    table = run_mix("show", run).output
    assert "losses are means of a label of step 4" in table
    assert "3.000" in table


@pytest.mark.parametrize("ahead", [2, 40])
def test_a_decision_is_due_every_so_many_steps(mix_path, tmp_path, ahead):
    """The count is of steps that ranks take, however far ahead the plans are."""
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=ahead) as loader:
        taken(loader, 1, {})
        steering = Steering(run=run, config=steered("loss"))
        steps = [steering.decided_at]
        for _ in range(30):
            taken(loader, 1, {})
            if (said := steering.look()) is not None:
                assert said["step"] == loader.next_step
                steps.append(said["step"])

    assert steps == [1, 7, 13, 19, 25, 31]


def steered(kind, **policy):
    return checked(
        {"version": 1, "every": 6, "policy": {"type": kind, **policy}}, SteeringConfig, name="steer"
    )


@pytest.mark.parametrize("kind", ["constant", "temperature"])
def test_a_decision_is_of_the_step_that_it_holds_from_however_far_plans_are_ahead(
    mix_path, tmp_path, kind
):
    """Earlier, a stage that begins within the planned steps was taken for the present stage."""
    mix, run = yaml.safe_load(mix_path.read_text()), tmp_path / "run"
    mix["mix"]["stages"] = [
        {"from_step": 0, "weights": {"ids": 1, HARD: 3}},
        {"from_step": 20, "weights": {"ids": 9, HARD: 1}},
    ]
    mix_path.write_text(yaml.safe_dump(mix))
    policy = {"start": 2.0, "end": 1.0, "to_step": 20} if kind == "temperature" else {}
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=40) as loader:
        taken(loader, 1, {})
        json_of("set", run, f"{HARD}=0.9")
        while json_of("show", run)["next_step"] <= 20:
            taken(loader, 1, {})
            assert loader.next_step < 20
        step = loader.next_step
        said = json_of("steer", run, a_file(tmp_path, type=kind, **policy), "--once")

    assert said["step"] == step
    temperature = 2.0 - step / 20 if policy else 1.0
    powers = [share ** (1 / temperature) for share in (0.25, 0.75)]
    assert said["after"][HARD] == pytest.approx(powers[1] / sum(powers))


def test_what_was_decided_before_a_run_went_back_is_not_decided_again(mix_path, tmp_path):
    """The resume makes those decisions again; repeated on top of them, the same losses would move shares twice."""
    run, steps = tmp_path / "run", []
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        state = loader.state_dict()
        steering = Steering(run=run, config=steered("loss"))
        while loader.next_step < 15:
            taken(loader, 1, {})
            steering.look()
    decided = [edit["step"] for edit in json_of("show", run)["edits"]]

    with omniload.open(mix_path, run_dir=run, arrays="numpy", state=state) as loader:
        taken(loader, 1, {})
        steering = Steering(run=run, config=steered("loss"))
        while loader.next_step < 20:
            taken(loader, 1, {}, hard=5.0)
            if (said := steering.look()) is not None:
                steps.append(said)

    assert decided == [6, 12]
    assert [said["step"] for said in steps] == [18]
    # Losses since the decision of step 12: in both attempts, and of no later step.
    assert steps[0]["losses"][HARD] == pytest.approx(13 / 3, abs=0.3)


def test_what_was_decided_before_is_not_decided_again_where_no_loop_reports_anything(
    mix_path, tmp_path
):
    """How far the run had been was told by losses and rewards alone: behind a resume a decision came too early."""
    run, config = tmp_path / "run", steered("temperature", start=5.0, end=1.0, to_step=40)
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        state = loader.state_dict()
        while loader.next_step < 5:
            loader.next_batch()
        held = json_of("set", run, f"{HARD}=0.9")["edit"]["step"]
        json_of("set", run, f"{HARD}=0.8", "--at", "100000")
        while loader.next_step < 15:
            loader.next_batch()

    begun = []
    for _ in range(
        2
    ):  # the second start finds the status of one that went no further than the edit
        with omniload.open(mix_path, run_dir=run, arrays="numpy", state=state) as loader:
            loader.next_batch()
            begun.append(Steering(run=run, config=config).decided_at)

    assert 5 <= held < 15
    assert begun == [held, held]


def test_a_decision_that_is_due_as_a_job_dies_waits_for_its_next_start(mix_path, tmp_path):
    """Earlier, it took effect after all planned steps, and no other decision was due until ranks came there."""
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 1, {})
        state, steering = loader.state_dict(), Steering(run=run, config=steered("loss"))
        taken(loader, 7, {})

    assert steering.look() is None
    # The status that a killed run leaves.
    status = read_status(run).model_copy(update={"has_ended": False})
    (run / STATUS_NAME).write_text(status.model_dump_json())
    with pytest.raises(UnavailableError, match=r"no data plane of .* is up, by its lock"):
        steering.look()

    assert json_of("show", run)["edits"] == []
    with omniload.open(mix_path, run_dir=run, arrays="numpy", state=state) as loader:
        while (said := steering.look()) is None:
            taken(loader, 1, {})
    assert said["step"] == 7


def test_steering_goes_on_until_the_run_has_ended(mix_path, tmp_path, monkeypatch):
    monkeypatch.setattr(steer, "_LOOK_S", 0.01)
    run, found = tmp_path / "run", []
    file = a_file(tmp_path, type="loss", rate=1.0)
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 1, {})
        beside = threading.Thread(target=lambda: found.append(run_mix("steer", run, file)))
        beside.start()
        until_s = time.monotonic() + 120
        while not (run / EDITS_NAME).exists():
            assert beside.is_alive()
            assert time.monotonic() < until_s
            taken(loader, 1, {})
    # Set only now, because a plane on a busy machine is sometimes silent for as long, and steering would end.
    monkeypatch.setattr(pulse, "_GONE_S", 3.0)
    beside.join(120)

    (result,) = found
    assert result.exit_code == 0
    assert "edit 1 of 4096, from step" in result.output
    assert "it was silent for 3 s; its weights stay" in result.output


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("age_s", [100.0, 2.5, -7200.0])
def test_a_run_that_has_ended_is_told_as_one(mix_path, tmp_path, monkeypatch, age_s, options):
    """The end is known from its status, which a clock that is ahead may have written."""
    monkeypatch.setattr(steer, "_LOOK_S", 0.01)
    monkeypatch.setattr(pulse, "_GONE_S", 3.0)
    monkeypatch.setattr(pulse, "UP_S", 1.0)
    run, clock, began_at = tmp_path / "run", FakeClock(), time.time()
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 2, {})
    status = read_status(run).model_copy(update={"written_at": began_at - age_s})
    (run / STATUS_NAME).write_text(status.model_dump_json())
    # Time passes only between looks, however busy the machine is.
    seconds = {"monotonic": clock.now_s, "sleep": clock.sleep}
    passing = SimpleNamespace(time=lambda: began_at + clock.now_s(), **seconds)
    monkeypatch.setattr(pulse, "time", passing)

    result = run_mix("steer", run, a_file(tmp_path, type="loss", rate=1.0), *options)

    assert isinstance(result.exception, StateError)
    assert "no data plane is up, and none was for 3 s; start the run" in str(result.exception)
    assert ("no data plane of" in result.stderr) == (age_s < 3)


def test_a_decision_for_a_run_that_has_ended_says_that_it_has(mix_path, tmp_path):
    run, file = tmp_path / "run", a_file(tmp_path, type="loss", rate=1.0)
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        loader.next_batch()
    planned = json_of("show", run)["next_step"]

    ended = run_mix("steer", run, file, "--once")
    status = read_status(run).model_copy(update={"has_ended": False, "written_at": 1e9})
    (run / STATUS_NAME).write_text(status.model_dump_json())
    killed = run_mix("steer", run, file, "--once")

    assert isinstance(ended.exception, StateError)
    assert f"the run has ended, before step {planned}, and no loss was reported from step 0" in str(
        ended.exception
    )
    assert "the run was killed, or was not heard of for" in str(killed.exception)
    with omniload.open(mix_path, run_dir=tmp_path / "other", arrays="numpy") as loader:
        taken(loader, 2, {})
    said = run_mix("steer", tmp_path / "other", file, "--once")
    assert "no data plane is up: it holds once the run goes on to step" in " ".join(
        said.output.split()
    )


def test_what_moves_nothing_is_no_edit(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 3, {})
        said = json_of("steer", run, a_file(tmp_path, type="constant", least=0), "--once")
        little = a_file(tmp_path, type="loss", rate=1.0, least=0.9)
        assert json_of("steer", run, little, "--once")["revision"] is None
        json_of("set", run, f"{HARD}=0.9")
        back = json_of("steer", run, a_file(tmp_path, type="constant"), "--once")

    assert said["revision"] is None
    assert back["revision"] == 2
    assert back["after"] == pytest.approx(said["before"])


def test_a_change_of_a_step_to_come_holds_up_no_decision(mix_path, tmp_path):
    """Weights of a later stage leave the present ones unchanged: present losses count, and a decision is due."""
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 5, {})
        json_of("set", run, f"{HARD}=0.9", "--at", "100000")

        said = json_of("steer", run, a_file(tmp_path, type="loss", rate=1.0), "--once")

    assert said["step"] < 100
    assert said["after"][HARD] > said["before"][HARD]


def test_a_reference_of_no_source_is_refused(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 2, {})
        file = a_file(tmp_path, type="loss", reference={"txt": 2.0})
        result = run_mix("steer", run, file, "--once")

    assert isinstance(result.exception, ConfigError)
    assert f"'txt' is not in the mix (did you mean '{HARD}'?)" in str(result.exception)


def test_a_policy_of_losses_waits_for_some(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        loader.next_batch()
        result = run_mix("steer", run, a_file(tmp_path, type="loss"), "--once")

    assert "no loss was reported from step 0 on; call loader.observe" in str(result.exception)


def test_a_policy_of_rewards_goes_by_those_that_the_loop_reports(mix_path, tmp_path):
    run, file = tmp_path / "run", a_file(tmp_path, type="reward", declared=0.2)
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        batch = loader.next_batch()
        none = run_mix("steer", run, file, "--once")
        number = loader.source_names.index(HARD)
        rewards = [[1, piece.key[0] == number] for piece in batch.pieces()]
        with pytest.raises(omniload.ConfigError, match=r"rewards have shape \[0\]"):
            loader.observe(batch, rewards=[])
        with pytest.raises(omniload.ConfigError, match="no losses, rewards or seconds"):
            loader.observe(batch)
        loader.observe(batch, rewards=rewards)
        said = json_of("steer", run, file, "--once")

    assert "no reward was reported from step 0 on" in str(none.exception)
    assert said["useful"].pop(HARD) == 0
    assert set(said["useful"].values()) == {1}
    assert said["after"][HARD] == pytest.approx(0.2 * said["before"][HARD])


@pytest.mark.parametrize("goes_by", ["loss", "reward"])
def test_a_bandit_is_steered_by_the_turns_of_the_folder_and_a_resume_makes_its_decisions_again(
    mix_path, tmp_path, goes_by
):
    run, found, again, said, states = tmp_path / "run", {}, {}, [], []
    file = a_file(tmp_path, least=0, type="odm", goes_by=goes_by, smoothing=0.5)
    worth = {}

    def take(loader, steps, kept):
        while loader.next_step < steps:
            batch = loader.next_batch()
            kept[batch.step] = batch.tokens.copy()
            for name in loader.source_names:
                worth[batch.step, name] = 1.0 + 4.0 * (name == HARD) + batch.step // 6
                loader.observe(source=name, **{goes_by: worth[batch.step, name]})

    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        names = loader.source_names
        none = run_mix("steer", run, file, "--once")
        for steps in (6, 12, 18):
            take(loader, steps, found)
            states.append(loader.state_dict())
            said.append(json_of("steer", run, file, "--once"))
        take(loader, 30, found)
    assert f"no {goes_by} was reported from step 0 on" in str(none.exception)

    # The algorithm of the paper, with turns of six steps; a decision is requested at the end of a turn.
    arms, estimates, explored = len(names), dict.fromkeys(names, 0.0), [1 / len(names)]
    edits = []  # first steps, and shares
    for turn, decided in enumerate(said, 1):
        shares = said[0]["before"]
        for step, after in edits:
            shares = after if step <= 6 * (turn - 1) else shares
        for name in names:
            mean = worth[6 * (turn - 1), name]
            estimates[name] = 0.5 * estimates[name] + 0.5 * mean / shares[name]
        explored.append(min(1 / arms, np.sqrt(np.log(arms) / (arms * turn))))
        powers = {name: np.exp(explored[-2] * found_) for name, found_ in estimates.items()}
        for name in names:
            due = (1 - arms * explored[-1]) * powers[name] / sum(powers.values()) + explored[-1]
            assert decided["after"][name] == pytest.approx(due, abs=1e-6)
        edits.append((decided["step"], decided["after"]))
    assert len({decided["after"][HARD] for decided in said}) > 1

    with omniload.open(mix_path, run_dir=run, arrays="numpy", state=states[0]) as loader:
        take(loader, 30, again)
    assert len(again) == 24
    assert all(np.array_equal(found[step], tokens) for step, tokens in again.items())


def test_a_largest_share_is_kept_to(mix_path, tmp_path):
    mix = yaml.safe_load(mix_path.read_text())
    mix["sources"][HARD]["max_fraction"] = 0.55
    mix_path.write_text(yaml.safe_dump(mix))
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        taken(loader, 4, {})
        said = json_of("steer", run, a_file(tmp_path, type="loss", rate=9), "--once")

    assert said["after"][HARD] == pytest.approx(0.55)
