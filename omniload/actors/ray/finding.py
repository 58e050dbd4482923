"""Who holds a role by now, as a process finds out that does not start roles: by the names of actors in Ray's head."""

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
"""Ray's head answers in milliseconds, or is out of reach: a rank that waits for it looks at the plane so often."""
_FOUND_S = 60.0
"""Longest wait for the member that takes the place of a lost one."""


def actor_named(name: str, namespace: str) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
    """Return an actor of the plane whose actors are in a namespace.

    Raises:
        UnavailableError: There is none of that name.
    """
    try:
        return ray.get_actor(name, **where(namespace))
    except (
        ValueError,
        AssertionError,
    ):  # the latter where Ray forgets the job of a head whose node has died
        raise UnavailableError(
            f"the data plane has no {name} any more; start again from the last checkpoint{place_of_lines(name)}"
        ) from None


def newest_of(role: str, namespace: str) -> str | None:
    """Return the name of the actor that a role was started in last; ``None`` while none lives."""
    lives: dict[int, str] = {}
    for name in _names(namespace):
        of, _, number = name.partition("+")
        if of == role:
            # By number: a lost life may be in Ray's list beside the next one for a moment.
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
    """Return name and actor of what a role was started in last; ``None`` while none lives.

    Raises:
        UnavailableError: It has just ended.
    """
    name = newest_of(role, namespace)
    return None if name is None else (name, actor_named(name, namespace))


class Search:
    """Looks for the member that takes the place of a lost one, and waits for no head that is out of reach."""

    def __init__(self, role: str, namespace: str) -> None:
        self._role, self._namespace = role, namespace
        self._asked: Future[tuple[str, Any] | None] | None = None

    def ask(self) -> "Future[tuple[str, Any] | None]":
        """Ask Ray's head, unless that is under way; return the answer to be."""
        if self._asked is None:
            self._asked = ask_head(partial(newest_actor, self._role, self._namespace))
        return self._asked

    def found(self) -> tuple[str, Any] | None:
        """Return name and actor of who was started last; ``None`` while the head has not told, or none lives."""
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
    """Return name and actor of a role; of a lost one, of that which takes its place.

    Args:
        role: The role.
        namespace: Of its plane.
        look: Raises once nobody will take its place, or the head that would tell of it is lost.
        pause: Waits a little before Ray's head is asked again.

    Raises:
        UnavailableError: None did within a minute, or what ``look`` raises.
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
