"""Which plane of a Ray a process is part of: one at a time, by the namespace of its actors."""

import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack

from omniload.actors.ray.environment import ray
from omniload.base.errors import StateError

__all__ = ["look_in", "new_namespace", "of_plane", "require_unconnected"]

_OURS = "omniload-"
"""What the namespaces of data planes begin with."""


def new_namespace() -> str:
    """Return a namespace of Ray that no other data plane has."""
    return f"{_OURS}{secrets.token_hex(4)}"


_LOOKED_IN, _USERS = "", 0
_LOOKING = threading.Lock()


def look_in(namespace: str) -> Callable[[], None]:
    """Have this process look for actors of a plane in its namespace, whichever Ray connected the process with.

    Returns:
        What ends that; a second call does nothing.

    Raises:
        StateError: The process looks for those of another plane: it would find them in the place of these.
    """
    global _LOOKED_IN, _USERS
    with _LOOKING:
        if _USERS and namespace != _LOOKED_IN:
            raise _another_open(_LOOKED_IN)
        _LOOKED_IN, _USERS = namespace, _USERS + 1
    ends = ExitStack()
    ends.callback(_look_no_more)
    return ends.close


def _look_no_more() -> None:
    global _LOOKED_IN, _USERS  # noqa: PLW0603 -- as above
    with _LOOKING:
        _USERS -= 1
        if not _USERS:
            _LOOKED_IN = ""


def of_plane() -> dict[str, str]:
    """Return the namespace of the plane, where it is another than that of this process, as Ray takes it."""
    own = str(ray.get_runtime_context().namespace) if _LOOKED_IN else ""
    return {} if own == _LOOKED_IN else {"namespace": _LOOKED_IN}


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
        f"this process has another data plane open, in the Ray at {address} ({namespace}), and is part of one alone at "
        "a time: close that plane, or the loader that opened or joined it, before; or give each plane a process of its "
        "own, or this one runtime.kind local where one process holds all its ranks"
    )
