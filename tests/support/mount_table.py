"""The kernel's table of mounts, whose changes it tells of; those of other tests are among them."""

import select
import time
from pathlib import Path

__all__ = ["once_mounts_allow"]

_LOOKS_AGAIN_S = 0.5
"""For what becomes true a moment after the mount is there, of which the kernel tells nobody."""


def once_mounts_allow(ask, *, within_s=60.0):
    """Return what ``ask`` gives as soon as it is not None, asked again after every change of the mounts."""
    end_s = time.monotonic() + within_s
    with Path("/proc/self/mountinfo").open("rb") as table:
        changes = select.poll()
        changes.register(table, select.POLLPRI)
        while (given := ask()) is None:
            assert time.monotonic() < end_s, f"the mount did not come back within {within_s:g} s"
            changes.poll(_LOOKS_AGAIN_S * 1000)
            table.seek(0)
            table.read()
    return given
