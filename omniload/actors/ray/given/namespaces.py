"""Planes of one process in the Ray that it is connected to: each has its namespace, the last ends the connection."""

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
"""What the namespaces of data planes begin with."""
_TOLD_AFTER_S, _TURN_S = 10.0, 330.0
"""When the user of a thread that waits for its turn is told, and its longest wait: a Ray may start twice."""


def new_namespace() -> str:
    """Return a namespace of Ray that no other data plane has."""
    return f"{_OURS}{secrets.token_hex(4)}"


def where(namespace: str) -> dict[str, str]:
    """Return the namespace of a plane, where it is another than that of this process, as Ray takes it."""
    own = str(ray.get_runtime_context().namespace)
    return {} if own == namespace else {"namespace": namespace}


@dataclass(slots=True)
class _Connection:
    """What planes have made of this process's connection to Ray."""

    users: int = 0
    """Planes over it."""
    made: bool = False
    """Whether one of them made it."""
    owned: bool = False
    """Whether its Ray is one plane's own, with room for the actors of that one alone."""
    doing: str = ""
    """What the thread does whose turn it is, as a sentence goes on that begins with it."""


_TURN, _CONNECTION = threading.RLock(), _Connection()


@contextmanager
def in_turn(doing: str) -> Iterator[None]:
    """Look at the connection of this process, make it or leave it, while no other thread does; also as a decorator.

    A thread that has its turn may take another within it; ``doing`` is what is done, such as ``leaves its Ray``.

    Raises:
        UnavailableError: Another thread takes too long.
    """
    if not _TURN.acquire(timeout=_TOLD_AFTER_S):
        _LOG.warning(
            "a thread that %s waits up to %.0f s for another one of this process, which %s",
            *(doing, _TURN_S, _CONNECTION.doing),
        )
        if not _TURN.acquire(timeout=_TURN_S - _TOLD_AFTER_S):
            raise UnavailableError(
                f"a thread that {doing} has waited {_TURN_S:.0f} s for another one of this process, which "
                f"{_CONNECTION.doing}; end this process, and start again"
            )
    before, _CONNECTION.doing = _CONNECTION.doing, doing
    try:
        yield
    finally:
        _CONNECTION.doing = before
        _TURN.release()


def use_connection(*, made: bool) -> Callable[[], bool]:
    """Note that a plane is used over the connection of this process to Ray, which was ``made`` for it or was there.

    Both this and what it returns are called ``in_turn``, with what makes the connection, or leaves it.

    Returns:
        What ends that, and tells whether the connection is to be left: it was made for a plane, and this was the last
        of all. A second call tells that it is not.
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
    """Tell whether a plane is used over the connection of this process to Ray; asked ``in_turn``."""
    return _CONNECTION.users > 0


def own_the_ray() -> Callable[[], None]:
    """Note that the Ray of this process is one plane's own; return what ends that."""
    _CONNECTION.owned = True

    def end() -> None:
        _CONNECTION.owned = False

    return end


def require_not_owned() -> None:
    """Refuse with ``StateError`` a second plane in the Ray of one that started it for itself, and ends it."""
    if _CONNECTION.owned:
        raise _another_open(str(ray.get_runtime_context().namespace))


def require_unconnected() -> None:
    """Refuse a process that is connected to a Ray: it can be to one at a time.

    Raises:
        StateError: It is; for another data plane, or by whatever else runs in it.
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
        f"this process has another data plane open, in the Ray at {address} ({namespace}), and is part of one Ray at "
        "a time: close that plane, or the loader that opened or joined it, before; or give each plane a process of its "
        "own, both one Ray of yours (runtime.address), or this one runtime.kind local where one process holds all its "
        "ranks"
    )
