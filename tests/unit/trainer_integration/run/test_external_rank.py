"""What rank 0 makes of what it meets, and of Slurm's variables; jobs of several ranks are in the integration tests."""

import json
import signal
import threading

import pytest

from omniload.base.errors import IntegrityError, StateError
from omniload.front.launch import launch_of
from tests.support.trainer.run_lines import a_step, an_event
from trainer_integration.run import external_rank, launch_plan
from trainer_integration.run.external_rank import with_slurm_address
from trainer_integration.run.run_log import EventLine, read_log

MIX = {
    "version": 1,
    "seed": 5,
    "sources": {"web": {"type": "text", "path": "*.txt"}},
    "tokenizer": {"type": "bytes"},
    "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
    "pack": {"length": 64},
    "batch": {"tokens": 128, "micro_tokens": 64},
}
TRAIN = {"version": 1, "mix": "mix.yaml", "steps": 9000, "parallel": {"dp": 2}}
STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7004321"}


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-004,9],login", "gpu003"),
        ("rack-2-gpu[12]", "rack-2-gpu12"),
        ("r[1-2]n[1-4]", "r1n1"),
        ("r[01-02]n[007,9-12]x,r3", "r01n007x"),
        ("node[1-2]-ib", "node1-ib"),
        ("node[3,5]-ib,login", "node3-ib"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_ranks_meet_on_the_first_host_of_the_step(listed, first):
    environment = STEP | {"SLURM_STEP_NODELIST": listed, "SLURM_JOB_NODELIST": "other"}

    with_slurm_address(environment)

    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (first, "24136")


def test_steps_of_one_job_and_jobs_of_one_host_meet_at_ports_of_their_own():
    ports = set()
    for job in range(7_004_321, 7_004_331):
        for step in range(16):
            environment = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            with_slurm_address(environment)
            ports.add(int(environment["MASTER_PORT"]))

    assert len(ports) == 160
    assert min(ports) >= 15_000
    assert max(ports) < 25_000


def test_an_address_that_is_given_stays():
    environment = STEP | {"SLURM_JOB_NODELIST": "gpu1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}

    with_slurm_address(environment)

    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("a", "5")


@pytest.mark.parametrize("other", [{"RANK": "0"} | STEP, {"SLURM_JOB_ID": "1"}])
def test_torchrun_within_slurm_and_a_shell_of_it_are_left_alone(other):
    environment = other | {"SLURM_JOB_NODELIST": "gpu1"}

    with_slurm_address(environment)

    assert "MASTER_ADDR" not in environment


def test_a_handler_of_c_code_gives_way_to_that_of_the_system(monkeypatch):
    """Python names a handler that it did not put in place ``None``, and takes no ``None``."""
    put = []

    def put_in_place(number, handler):
        if handler is None:
            raise TypeError("signal handler must be SIG_IGN, SIG_DFL, or a callable object")
        put.append((number, handler))

    monkeypatch.setattr(external_rank.signal, "signal", put_in_place)
    with external_rank._asked_by_signals(threading.Event()):
        put.clear()

    assert put == [(number, signal.SIG_DFL) for number in external_rank._ENDING_SIGNALS]


class Place:
    """Checkpoints that look whole."""

    location = "checkpoints"

    def __init__(self, *steps):
        self.held = list(steps)

    def steps(self):
        return tuple(self.held)

    def loader_state_of(self, step):
        return {"version": 1, "next_step": step}

    def set_aside(self, step):
        self.held.remove(step)
        return f"step-{step:08d}.aside"


class Meeting:
    """Keeps what rank 0 posts."""

    def __init__(self):
        self.posted = []

        self.awaited = []

    def post(self, _key, text):
        self.posted.append(json.loads(text))

    def read(self, key, _timeout_s):
        self.awaited.append(key)
        return "heard"


@pytest.fixture
def lead(tmp_path, monkeypatch):
    """Lead a start of a job that trains by ``train``; return rank 0's exit code, or raise what it does."""
    (tmp_path / "mix.yaml").write_text(json.dumps(MIX))
    (tmp_path / "train.yaml").write_text(json.dumps(TRAIN))

    def call(place, train, *, restarts=0, resume="latest", display=None, meeting=None):
        monkeypatch.setattr(launch_plan, "place_of", lambda _: place)
        monkeypatch.setattr(external_rank, "_train", lambda _spec, write, _begin: train(write))
        variables = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        asked = external_rank._Request(
            tmp_path / "train.yaml", launch_of(variables), resume, profile=None
        )
        return external_rank._lead(meeting or Meeting(), "job", asked, display)

    call.run = tmp_path / "run"
    return call


def events_in(run):
    return [(line.what, line.detail) for line in read_log(run) if isinstance(line, EventLine)]


def test_a_damaged_shard_of_data_leaves_every_checkpoint_in_its_place(lead):
    place = Place(1000, 1500, 2000)

    def train(_write):
        raise IntegrityError("web/7.parquet: 10 bytes are missing")

    for restarts in range(3):
        with pytest.raises(IntegrityError, match="web/7"):
            lead(place, train, restarts=restarts)

    assert place.steps() == (1000, 1500, 2000)
    cause = "rank 0: IntegrityError: web/7.parquet: 10 bytes are missing"
    assert events_in(lead.run)[-1] == ("exit", cause)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_the_last_stays(lead):
    place, began = Place(1000, 1500, 2000), []

    def train(write):
        step = place.steps()[-1]
        began.append(step)
        write(an_event("damaged", f"step {step}", step=step))
        raise IntegrityError(f"step {step}")

    for restarts in range(4):
        with pytest.raises(IntegrityError):
            lead(place, train, restarts=restarts)

    assert began == [2000, 1500, 1000, 1000]
    assert place.steps() == (1000,)
    assert [what for what, _ in events_in(lead.run)].count("set_aside") == 2


def test_a_damaged_checkpoint_that_was_asked_for_stays(lead):
    place = Place(1000, 2000)

    def train(write):
        write(an_event("damaged", "step 2000", step=2000))
        raise IntegrityError("step 2000")

    with pytest.raises(IntegrityError):
        lead(place, train, resume=2000)

    assert place.steps() == (1000, 2000)


def test_the_other_ranks_are_told_why_the_log_cannot_be_opened(lead, monkeypatch):
    def refused(*_args, **_named):
        raise StateError("writers.json: is not of this release")

    monkeypatch.setattr(external_rank, "open_writers", refused)
    meeting = Meeting()

    with pytest.raises(StateError):
        lead(Place(), lambda _: False, meeting=meeting)

    assert [note["failed"] for note in meeting.posted] == ["StateError"]
    assert meeting.awaited == ["job/heard/1"]  # rank 0 hosts what they read


def test_a_display_that_fails_ends_no_job(lead):
    class Unread:
        def expect(self, _steps, _mix):
            raise BrokenPipeError

        def observe(self, _job, _line):
            raise BrokenPipeError

    def train(write):
        write(a_step(0))
        return False

    assert lead(Place(), train, display=Unread()) == 0
    assert [line.kind for line in read_log(lead.run)] == ["event", "step", "event"]
