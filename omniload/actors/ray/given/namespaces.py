"""Planes of one process that share its connection to Ray: each has a namespace, and the last closes the connection."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from omniload.actors.ray.environment import ray
from omniload.base.errors import StateError, UnavailableError
from omniload.base.log import get_logger

__all__ = [
    "in_turn",
    "is_used",
    "new_namespace",
    "own_the_ray",
    "require_not_owned",
    "require_unconnected",
    "use_connection",
    "where",
]

_LOG = get_logger(__name__)
_OURS = "omniload-"
"""Prefix of the namespaces of data planes."""
_TOLD_AFTER_S, _TURN_S = 10.0, 330.0
"""Wait for a turn after which the user is told, and the longest wait, in which a Ray may start twice."""


def new_namespace() -> str:
    """Return a namespace of Ray that no other data plane has."""
    return f"{_OURS}{secrets.token_hex(4)}"


def where(namespace: str) -> dict[str, str]:
    """Return a plane's namespace as an argument for Ray; empty if it is the namespace of this process."""
    own = str(ray.get_runtime_context().namespace)
    return {} if own == namespace else {"namespace": namespace}


@dataclass(slots=True)
class _Connection:
    """State of this process's connection to Ray, shared by its planes."""

    users: int = 0
    """Number of planes that use it."""
    made: bool = False
    """Whether a plane made the connection."""
    owned: bool = False
    """Whether the Ray belongs to one plane, with room for the actors of that plane only."""
    doing: str = ""
    """What the thread that has the turn does, as a clause that follows ``which`` in a message."""


_TURN, _CONNECTION = threading.RLock(), _Connection()


@contextmanager
def in_turn(doing: str) -> Iterator[None]:
    """Inspect, make or leave this process's connection while no other thread does; also usable as a decorator.

    A thread that has its turn may take another turn inside it. ``doing`` describes the action, such as ``leaves its
    Ray``.

    Raises:
        UnavailableError: Another thread takes too long.
    """
    if not _TURN.acquire(timeout=_TOLD_AFTER_S):
        _LOG.warning(
            "a thread that %s waits up to %.0f s for another thread of this process, which %s",
            *(doing, _TURN_S, _CONNECTION.doing),
        )
        if not _TURN.acquire(timeout=_TURN_S - _TOLD_AFTER_S):
            raise UnavailableError(
                f"a thread that {doing} has waited {_TURN_S:.0f} s for another thread of this process, which "
                f"{_CONNECTION.doing}; end this process, and start again"
            )
    before, _CONNECTION.doing = _CONNECTION.doing, doing
    try:
        yield
    finally:
        _CONNECTION.doing = before
        _TURN.release()


def use_connection(*, made: bool) -> Callable[[], bool]:
    """Note that a plane uses this process's connection to Ray; ``made`` says whether the plane made the connection.

    Call both this function and its result ``in_turn``, together with the code that makes or leaves the connection.

    Returns:
        A function that ends the use. It returns whether the connection must be left: a plane made it, and this plane
        was the last user. A second call returns false.
    """
    _CONNECTION.users += 1
    _CONNECTION.made |= made
    used = True

    def end() -> bool:
        nonlocal used
        if not used:
            return False
        used = False
        _CONNECTION.users -= 1
        if _CONNECTION.users:
            return False
        leaves, _CONNECTION.made = _CONNECTION.made, False
        return leaves

    return end


def is_used() -> bool:
    """Return whether a plane uses this process's connection to Ray; call it ``in_turn``."""
    return _CONNECTION.users > 0


def own_the_ray() -> Callable[[], None]:
    """Note that the Ray of this process belongs to one plane; return a function that ends this."""
    _CONNECTION.owned = True

    def end() -> None:
        _CONNECTION.owned = False

    return end


def require_not_owned() -> None:
    """Refuse, with ``StateError``, a second plane in a Ray that another plane started for itself and will end."""
    if _CONNECTION.owned:
        raise _another_open(str(ray.get_runtime_context().namespace))


def require_unconnected() -> None:
    """Refuse a process that is connected to a Ray: a process can be connected to only one at a time.

    Raises:
        StateError: The process is connected, for another data plane or by other code.
    """
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    if context.namespace.startswith(_OURS):
        raise _another_open(context.namespace)
    raise StateError(
        "this process is connected to a Ray cluster already; close it (ray.shutdown()) before the data plane is "
        "opened, name that Ray in the mix (runtime: {kind: ray, address: auto}), or set runtime.kind to local"
    )


def _another_open(namespace: str) -> StateError:
    address = ray.get_runtime_context().gcs_address if ray.is_initialized() else "that it has left"
    return StateError(
        f"this process has another data plane open, in the Ray at {address} ({namespace}), and can be part of only "
        "one Ray at a time: first close that plane, or the loader that opened or joined it; or give each plane a "
        "process of its own; or let both use one Ray of yours (runtime.address); or set runtime.kind to local for "
        "this plane if one process holds all its ranks"
    )
