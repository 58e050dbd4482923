"""A store that fails by script: a call of a method, given by its number, meets a fault."""

from threading import Lock

from omniload.base.errors import UnavailableError


def Outage(what):  # noqa: N802 -- reads as the error it makes
    return UnavailableError(f"{what}: scripted outage")


class FaultyStore:
    """Fails the n-th call of a method, counting from 1.

    Args:
        store: The store that answers otherwise.
        faults: Maps ``(method, n)`` to a function from the call's first argument to an error.
        carry_out: Whether a failing call is carried out before its answer is lost.
    """

    def __init__(self, store, faults, *, carry_out=False):
        self._store = store
        self._faults = dict(faults)
        self._carry_out = carry_out
        self._calls, self._counting = {}, Lock()

    def __getattr__(self, name):
        inner = getattr(self._store, name)
        if not callable(inner):
            return inner

        def call(*arguments):
            with self._counting:  # each call gets its number, even with many threads
                self._calls[name] = number = self._calls.get(name, 0) + 1
            fault = self._faults.pop((name, number), None)
            if fault is None:
                return inner(*arguments)
            if self._carry_out:
                inner(*arguments)
            raise fault(f"{name}({arguments[0] if arguments else ''!r})")

        return call

    def assert_all_faults_fired(self):
        assert not self._faults, f"faults that no call reached: {sorted(self._faults)}"
