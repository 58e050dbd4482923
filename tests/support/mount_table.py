"""The kernel's table of mounts, whose changes the kernel reports; mounts of other tests are among them."""

import select
import time
from pathlib import Path

__all__ = ["once_mounts_allow"]

_LOOKS_AGAIN_S = 0.5
"""Time between looks at conditions that become true shortly after the mount and that the kernel does not report."""


def once_mounts_allow(ask, *, within_s=60.0):
    """Return the result of ``ask`` as soon as it is not None; it is called again after every change of the mounts."""
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
