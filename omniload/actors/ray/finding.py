"""Finds the present holder of a role by the names of actors in Ray's head, for processes that do not start roles."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from omniload.actors.ray.answers import ask_head
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.given.namespaces import where
from omniload.base.errors import UnavailableError
from omniload.base.log import place_of_lines

__all__ = ["Search", "actor_named", "await_newest", "newest_actor", "newest_of"]

_LOOK_S = 0.1
"""Interval at which a rank checks the plane while it waits for Ray's head, which answers in milliseconds or never."""
_FOUND_S = 60.0
"""Longest wait for the replacement of a lost member."""


def actor_named(name: str, namespace: str) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
    """Return an actor of a plane by its name and the plane's namespace.

    Raises:
        UnavailableError: There is no actor of that name.
    """
    try:
        return ray.get_actor(name, **where(namespace))
    except (
        ValueError,
        AssertionError,
    ):  # the latter if Ray has forgotten the job of a head whose node has died
        raise UnavailableError(
            f"the data plane has no {name} any more; start again from the last checkpoint{place_of_lines(name)}"
        ) from None


def newest_of(role: str, namespace: str) -> str | None:
    """Return the name of the actor that a role was started in last; ``None`` while none lives."""
    lives: dict[int, str] = {}
    for name in _names(namespace):
        of, _, number = name.partition("+")
        if of == role:
            # Compared by number, because a lost life may stay in Ray's list for a moment next to the new one.
            lives[int(number or 0)] = name
    return lives[max(lives)] if lives else None


def _names(namespace: str) -> list[str]:
    """Return the names of all actors of a plane."""
    if not where(namespace):
        own: list[str] = ray.util.list_named_actors()
        return own
    everywhere: Any = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in everywhere if each["namespace"] == namespace]


def newest_actor(role: str, namespace: str) -> tuple[str, Any] | None:
    """Return name and actor of a role's last life; ``None`` while none lives.

    Raises:
        UnavailableError: It has just ended.
    """
    name = newest_of(role, namespace)
    return None if name is None else (name, actor_named(name, namespace))


class Search:
    """Looks for the replacement of a lost member without waiting for an unreachable head."""

    def __init__(self, role: str, namespace: str) -> None:
        self._role, self._namespace = role, namespace
        self._asked: Future[tuple[str, Any] | None] | None = None

    def ask(self) -> "Future[tuple[str, Any] | None]":
        """Ask Ray's head, unless a question is under way; return the future answer."""
        if self._asked is None:
            self._asked = ask_head(partial(newest_actor, self._role, self._namespace))
        return self._asked

    def found(self) -> tuple[str, Any] | None:
        """Return name and actor of the last life; ``None`` while the head has not answered, or none lives."""
        if self._asked is None or not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        try:
            return asked.result()
        except (UnavailableError, RayError):
            return None  # it has just ended


def await_newest(
    role: str, namespace: str, look: Callable[[], None], pause: Callable[[], Any]
) -> tuple[str, Any]:
    """Return name and actor of a role; if its member is lost, wait for the replacement.

    Args:
        role: The role.
        namespace: Namespace of its plane.
        look: Raises once no replacement can come, or the head that would name it is lost.
        pause: Waits a little before Ray's head is asked again.

    Raises:
        UnavailableError: No replacement came within a minute, or ``look`` raised it.
    """
    search, until_s = Search(role, namespace), time.monotonic() + _FOUND_S
    while True:
        wait((search.ask(),), _LOOK_S)
        if (found := search.found()) is not None:
            return found
        look()
        if time.monotonic() >= until_s:
            raise UnavailableError(
                f"the data plane has no {role} any more, and none took its place within {_FOUND_S:.0f} s; start again "
                f"from the last checkpoint{place_of_lines(role)}"
            )
        pause()
