"""Clients whose own threads a forked process lacks, kept there as long as it lives.

`hdfs-native` ends its threads where its client is let go of, and waits for them: in a process that was forked they are
not there, so it waits for ever. `fsspec` empties its cache of clients in every forked process, also between fork and
exec (`subprocess` with a `preexec_fn`, as Ray starts its processes): the parent waits with it.
"""

import ctypes
import os
import sys
from weakref import WeakSet

__all__ = ["never_ended_by_a_fork"]

_OWN: WeakSet[object] = WeakSet()
_held: list[object] = []


def never_ended_by_a_fork(client: object) -> None:
    """Keep ``client`` in each process that is forked while it is there."""
    _OWN.add(client)


def _hold() -> None:
    """Hold clients from before the fork on: the cache of fsspec is emptied before what stands here is called."""
    module = sys.modules.get("hdfs_native.fsspec")
    classes = () if module is None else (module.HdfsFileSystem, module.ViewfsFileSystem)
    _held.extend(client for kind in classes for client in getattr(kind, "_cache", {}).values())
    _held.extend(_OWN)


def _keep() -> None:
    # Modules are emptied where a forked process ends in order: a reference that nobody gives back outlives that.
    for client in _held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(before=_hold, after_in_parent=_held.clear, after_in_child=_keep)
