"""A caller that changes a plane waits until it is admitted, with a limit, and names the one it waits for."""

import threading

import pytest

from omniload.actors.gate import Gate, Turn
from omniload.base.errors import UnavailableError


def test_one_that_waits_too_long_is_told_what_is_under_way_and_has_its_turn_after_it():
    turn = Turn()

    with (
        turn.taken("loader-1 ends", "nothing moves"),
        pytest.raises(UnavailableError, match=r"nothing moves: loader-1 ends, .* within 0 s"),
    ):
        turn.taken("2 sources move", "nothing moves", limit_s=0.0).__enter__()

    with turn.taken("2 sources move", "nothing moves", limit_s=0.0):
        pass


def test_one_that_waits_leaves_a_plane_that_is_closed_meanwhile():
    turn, gate = Turn(), Gate()
    waits = threading.Event()

    def check():
        waits.set()
        gate.check()

    def close():
        waits.wait()
        gate.close(0.0)

    closes = threading.Thread(target=close)
    closes.start()
    with (
        turn.taken("loader-1 ends", "nothing moves"),
        pytest.raises(UnavailableError, match="was closed"),
    ):
        turn.taken("2 sources move", "nothing moves", check=check).__enter__()
    closes.join()


def test_a_change_that_fails_holds_up_no_other():
    turn = Turn()

    with pytest.raises(ZeroDivisionError), turn.taken("loader-1 ends", "nothing moves"):
        raise ZeroDivisionError

    with turn.taken("2 sources move", "nothing moves", limit_s=0.0):
        pass
