"""Signals that wait if they would interrupt an action half-way."""

import os
import signal
import subprocess
import sys
import threading
import traceback

import pytest

from omniload.base.concurrency import held_signals
from omniload.base.concurrency.held_signals import SignalsHeld, let_signals_in


@pytest.fixture(autouse=True)
def answers():
    """Use Python's own answer to Ctrl-C, as in a script that is started in a terminal."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_a_signal_is_answered_as_what_it_would_break_is_over():
    done = []

    def script():
        with SignalsHeld():
            ctrl_c()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        script()

    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_wait_lets_it_in_also_of_what_is_held_within():
    done = []

    def script():
        with SignalsHeld():
            with SignalsHeld():
                ctrl_c()
            done.append("before the wait")
            let_signals_in()
            done.append("behind it")

    with pytest.raises(KeyboardInterrupt):
        script()

    assert done == ["before the wait"]


def test_what_closes_for_a_signal_is_not_interrupted_by_the_next_one():
    done = []

    def script():
        with SignalsHeld():
            try:
                ctrl_c()
                let_signals_in()
            finally:
                ctrl_c()
                let_signals_in()
                done.append("closed")

    with pytest.raises(KeyboardInterrupt):
        script()

    assert done == ["closed"]
    with SignalsHeld():
        let_signals_in()  # both have been handled


def test_what_closes_as_ctrl_c_ends_a_script_says_nothing_of_a_second_one():
    done = []

    def script():
        try:
            ctrl_c()
        finally:
            with SignalsHeld(to_the_end=True):
                ctrl_c()
                let_signals_in()
                done.append("closed")

    with pytest.raises(KeyboardInterrupt) as first:
        script()
    assert done == ["closed"]
    assert first.value.__context__ is None

    def script():
        with SignalsHeld(to_the_end=True):
            ctrl_c()  # the first one of a script that closes by itself

    with pytest.raises(KeyboardInterrupt):
        script()


def test_a_wait_behind_one_that_goes_to_its_end_is_interrupted():
    done = []

    def script():
        with SignalsHeld():
            with SignalsHeld(to_the_end=True):
                ctrl_c()
                let_signals_in()
                done.append("to the end")
            let_signals_in()
            done.append("behind the wait")

    with pytest.raises(KeyboardInterrupt):
        script()

    assert done == ["to the end"]


def test_an_error_that_the_same_ctrl_c_has_brought_about_is_not_told_above_it():
    def script():
        with SignalsHeld():
            ctrl_c()
            raise RuntimeError("a role was interrupted too")

    with pytest.raises(KeyboardInterrupt) as raised:
        script()

    assert "a role was interrupted" not in "".join(traceback.format_exception(raised.value))


def test_an_answer_of_the_scripts_own_is_given_and_what_it_raises_comes():
    asked = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with SignalsHeld():
        signal.raise_signal(signal.SIGTERM)
        assert asked == []
        let_signals_in()
        assert asked == [signal.SIGTERM]

    def leave(*_):
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, leave)

    def script():
        with SignalsHeld():
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit, match="3"):
        script()
    assert signal.getsignal(signal.SIGTERM) is leave


@pytest.mark.parametrize("answer", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_without_an_answer_of_pythons_stays_as_it_is(answer):
    signal.signal(signal.SIGTERM, answer)
    with SignalsHeld():
        assert signal.getsignal(signal.SIGTERM) is answer


def test_another_thread_holds_nothing_and_is_not_let_in():
    def hold():
        with SignalsHeld():
            let_signals_in()
            inside.append(signal.getsignal(signal.SIGINT))

    inside = []
    beside = threading.Thread(target=hold)

    def script():
        with SignalsHeld():
            ctrl_c()
            beside.start()
            beside.join(60)
            assert len(inside) == 1

    with pytest.raises(KeyboardInterrupt):
        script()


def test_a_signal_that_waits_too_long_is_answered_where_the_main_thread_is(monkeypatch):
    monkeypatch.setattr(held_signals, "_LONGEST_S", 0.01)
    never = threading.Event()

    def script():
        with SignalsHeld(to_the_end=True):
            ctrl_c()
            never.wait(60)
            pytest.fail("the signal did not come")

    with pytest.raises(KeyboardInterrupt):
        script()


def test_what_is_left_in_place_passes_on_what_comes():
    with SignalsHeld():
        left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, left)

    with pytest.raises(KeyboardInterrupt):
        ctrl_c()

    def script():
        with SignalsHeld():
            ctrl_c()
            let_signals_in()

    with pytest.raises(KeyboardInterrupt):
        script()


FORKED = """
import ctypes, os, signal
from omniload.base.concurrency.held_signals import SignalsHeld
signal.signal(signal.SIGTERM, lambda *_: None)
if not (pid := os.fork()):
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python is not told, as by workers of torch
    with SignalsHeld():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
"""


def test_a_process_that_is_forked_keeps_the_answers_that_python_does_not_know():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120, env=dict(os.environ))
