"""Memory of a job by role: proportional set size, which counts a shared page once."""

import os
from collections.abc import Mapping
from contextlib import suppress

import psutil

__all__ = ["pss_by_role"]


def pss_by_role(pids: Mapping[str, int]) -> dict[str, int]:
    """Return the proportional set size of each process, and of the launcher's other children together.

    Args:
        pids: Processes by role.

    Returns:
        Bytes by role; ``launcher`` is this process, ``ray`` what Ray runs beside the actors. A
        process that has ended in the meantime is left out.
    """
    known = set(pids.values())
    sizes: dict[str, int] = {}
    for role, pid in {**pids, "launcher": os.getpid()}.items():
        with suppress(psutil.Error):
            sizes[role] = int(psutil.Process(pid).memory_full_info().pss)
    others = 0
    for child in psutil.Process().children(recursive=True):
        if child.pid not in known:
            with suppress(psutil.Error):
                others += int(child.memory_full_info().pss)
    if others:
        sizes["ray"] = others
    return sizes
