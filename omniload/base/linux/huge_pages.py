"""Huge pages of a process, where the machine is a virtual one that gives free memory back to its host.

Linux gives back what lies free in pieces of a huge page, two seconds behind its release (free page reporting), and
the machine stands still meanwhile: 13 to 30 ms for 100 MiB, and once in some 20 times nothing in it runs as it should
for another quarter of a second. What a process held in pages of 4 KiB lies between pages of others, and stays.
"""

from contextlib import suppress
from pathlib import Path

from omniload.base.linux import calls

__all__ = ["gives_memory_back", "spare_host"]

_DEVICES = Path("/sys/bus/virtio/devices")
_BALLOON = 5
_REPORTING_BIT = 5
"""Of the features of a balloon: both by the specification of virtio, 5.5."""


def gives_memory_back(devices: Path = _DEVICES) -> bool:
    """Tell whether free memory of this machine goes back to a host."""
    for device in devices.glob("*"):
        with suppress(OSError, ValueError):
            kind = int((device / "device").read_text(encoding="ascii"), 16)
            features = (device / "features").read_text(encoding="ascii")
            if kind == _BALLOON and features[_REPORTING_BIT : _REPORTING_BIT + 1] == "1":
                return True
    return False


def spare_host() -> None:
    """Have this process be given no huge pages from now on where its memory would go back to a host at its end."""
    if gives_memory_back():
        with suppress(OSError):  # Linux without huge pages
            calls.forgo_huge_pages()
