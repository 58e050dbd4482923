"""What a rank makes of Slurm's variables; jobs of several ranks are in the integration tests."""

import signal
import threading

import pytest

from trainer_integration.run import external_rank
from trainer_integration.run.external_rank import with_slurm_address

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

    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (first, "19321")


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
