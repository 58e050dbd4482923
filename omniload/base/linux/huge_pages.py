"""Huge pages of a process on a virtual machine that returns free memory to its host.

Linux returns free memory in pieces of a huge page, two seconds after its release (free page reporting). The machine
stands still meanwhile: 13 to 30 ms for 100 MiB, and about once in 20 times nothing in it runs properly for another
quarter of a second. Memory that a process held in pages of 4 KiB lies between pages of others, and stays.
"""

from contextlib import suppress
from pathlib import Path

from omniload.base.linux import calls

__all__ = ["gives_memory_back", "spare_host"]

_DEVICES = Path("/sys/bus/virtio/devices")
_BALLOON = 5
_REPORTING_BIT = 5
"""Bit among the features of a balloon; both numbers are from the specification of virtio, 5.5."""


def gives_memory_back(devices: Path = _DEVICES) -> bool:
    """Return whether free memory of this machine is returned to a host."""
    for device in devices.glob("*"):
        with suppress(OSError, ValueError):
            kind = int((device / "device").read_text(encoding="ascii"), 16)
            features = (device / "features").read_text(encoding="ascii")
            if kind == _BALLOON and features[_REPORTING_BIT : _REPORTING_BIT + 1] == "1":
                return True
    return False


def spare_host() -> None:
    """Disable huge pages for this process if its memory would be returned to a host at its end."""
    if gives_memory_back():
        with suppress(OSError):  # Linux without huge pages
            calls.forgo_huge_pages()
