"""Whether the servers of a plane's Ray are there: where one died alone, Ray ends the process without a word of ours."""

from collections.abc import Callable

from omniload.actors.lifeline import answers
from omniload.base.errors import UnavailableError

__all__ = ["HeadWatch", "check_servers"]

_EVERY_S, _SILENT_S = 5.0, 45.0
"""Ray ends a process whose head it has not reached for a minute, with a line of its own: ours comes before."""


class HeadWatch:
    """Looks now and then whether the head of a plane's Ray takes connections: where it died, its opener may live."""

    def __init__(self, address: str) -> None:
        """Look at the head that is at ``address``, host and port."""
        self._address = address
        self._look_at_s = 0.0
        self._silent_from_s: float | None = None
        self._is_lost = False

    def look(self, now_s: float) -> None:
        """Look, if it is time to; takes up to some seconds."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _EVERY_S
        if answers(self._address, _EVERY_S):
            self._silent_from_s, self._is_lost = None, False
        elif self._silent_from_s is None:
            self._silent_from_s = now_s
        else:
            self._is_lost = now_s - self._silent_from_s >= _SILENT_S

    def check(self) -> None:
        """Return while the head is there, or may only be late.

        Raises:
            UnavailableError: It has not been there for most of a minute.
        """
        if self._is_lost:
            raise UnavailableError(
                f"the head of the data plane's Ray at {self._address} has taken no connection for {_SILENT_S:.0f} s, "
                "and Ray ends this process: its process there has ended, or the way to it is cut; start again from the "
                "last checkpoint"
            )


def check_servers(ended: Callable[[], str]) -> None:
    """Return while the servers of Ray that were started here run.

    Args:
        ended: Says which has ended, and how.

    Raises:
        UnavailableError: One has: no role that is lost can be replaced any more.
    """
    if which := ended():
        raise UnavailableError(
            f"Ray's {which}, and the data plane with it: no role can be replaced any more; start again from the last "
            "checkpoint"
        )
