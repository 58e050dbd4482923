"""Clients whose own threads a forked process lacks, kept there as long as it lives.

`hdfs-native` ends its threads where its client is let go of, and waits for them: in a process that was forked they are
not there, so it waits for ever. `fsspec` empties its cache of clients in every forked process, also between fork and
exec (`subprocess` with a `preexec_fn`, as Ray starts its processes): the parent waits with it.
"""

import ctypes
import os
import sys
import threading
from weakref import WeakValueDictionary

__all__ = ["never_ended_by_a_fork"]

_own: WeakValueDictionary[int, object] = WeakValueDictionary()
_fork = threading.local()
"""``held``: clients of the fork that this thread is about; others may fork at the same time."""


def never_ended_by_a_fork(client: object) -> None:
    """Keep ``client`` in each process that is forked while it is there."""
    _own[id(client)] = client


def _hold() -> None:
    """Hold clients from before the fork on: the cache of fsspec is emptied before what stands here is called."""
    module = sys.modules.get("hdfs_native.fsspec")
    classes = () if module is None else (module.HdfsFileSystem, module.ViewfsFileSystem)
    # As lists, which are made at once: another thread may open a store meanwhile.
    cached = [list(getattr(kind, "_cache", {}).values()) for kind in classes]
    _fork.held = [*(each for kind in cached for each in kind), *(ref() for ref in _own.valuerefs())]


def _release() -> None:
    _fork.held = []


def _keep() -> None:
    # Modules are emptied where a forked process ends in order: a reference that nobody gives back outlives that.
    for client in _fork.held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_keep)
