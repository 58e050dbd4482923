"""The rules of this folder hold: nothing sleeps, nothing connects."""

import socket
import time

import pytest


def test_sleeping_fails_a_unit_test():
    with pytest.raises(pytest.fail.Exception, match=r"a unit test called time\.sleep"):
        time.sleep(0)


def test_connecting_fails_a_unit_test():
    with (
        socket.socket() as client,
        pytest.raises(pytest.fail.Exception, match=r"called socket\.connect"),
    ):
        client.connect(("127.0.0.1", 9))
