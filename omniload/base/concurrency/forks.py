"""Clients whose own threads are missing in a forked process, and which are therefore kept alive there.

`hdfs-native` ends its threads when its client is released, and waits for them. In a forked process these threads do
not exist, so it would wait for ever. `fsspec` empties its cache of clients in every forked process, even between fork
and exec (`subprocess` with a `preexec_fn`, as Ray starts its processes), and the parent waits for that.
"""

import ctypes
import os
import sys
import threading
from weakref import WeakValueDictionary

__all__ = ["never_ended_by_a_fork"]

_own: WeakValueDictionary[int, object] = WeakValueDictionary()
_fork = threading.local()
"""``held``: the clients for the fork that this thread is making; other threads may fork at the same time."""


def never_ended_by_a_fork(client: object) -> None:
    """Keep ``client`` alive in each process that is forked while it exists."""
    _own[id(client)] = client


def _hold() -> None:
    """Hold clients from before the fork on; fsspec's handler empties its cache before the handlers here are called."""
    module = sys.modules.get("hdfs_native.fsspec")
    classes = () if module is None else (module.HdfsFileSystem, module.ViewfsFileSystem)
    # Lists, which are built atomically, because another thread may open a store meanwhile.
    cached = [list(getattr(kind, "_cache", {}).values()) for kind in classes]
    _fork.held = [*(each for kind in cached for each in kind), *(ref() for ref in _own.valuerefs())]


def _release() -> None:
    _fork.held = []


def _keep() -> None:
    # When a forked process ends in order, modules are emptied; only a reference that is never released survives that.
    for client in _fork.held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_keep)
