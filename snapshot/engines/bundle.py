"""The bundle of a start: what an OCI runtime must know to run a command in an image.

The image says what is run, as whom and with which variables; this says how far it is kept
from the machine. The container has process, mount, host name and message queue namespaces
of its own, the capabilities that engines give by default, and the network of the machine.
Limits are inherited: a runtime that raises them fails where that is not allowed.

Source:
    OCI runtime specification 1.0.2, "Configuration".
"""

import re
from collections.abc import Collection
from typing import Any

from snapshot.image.starting import Start

__all__ = ["CAPABILITIES", "RUNTIMES", "bundle_config", "held_capabilities", "runtime_words"]

RUNTIMES = ("runc", "crun")
CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_SETFCAP",
)
"""What root in a container may do, as Podman gives it; those that this machine holds."""
_NUMBER_OF = dict(zip(CAPABILITIES, (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31), strict=True))
_NAMESPACES = ("pid", "ipc", "uts", "mount")
_QUIET = ["nosuid", "noexec", "nodev"]
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


def bundle_config(
    start: Start, ids: tuple[int, int], held: Collection[str], name: str
) -> dict[str, Any]:
    """Return the ``config.json`` of a bundle whose root file system lies in its folder ``root``.

    Args:
        start: What is run.
        ids: Numbers of its user and group.
        held: Capabilities that may be given.
        name: Host name of the container.
    """
    given = [capability for capability in CAPABILITIES if capability in held]
    # As engines do: another user starts with none, and may get these only through set-uid files.
    owned = given if ids[0] == 0 else []
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": ids[0], "gid": ids[1]},
            "args": list(start.words),
            "env": [f"{key}={value}" for key, value in start.variables.items()],
            "cwd": start.folder,
            "capabilities": {
                "bounding": given,
                "effective": owned,
                "permitted": owned,
                "inheritable": [],
                "ambient": [],
            },
        },
        "root": {"path": "root", "readonly": False},
        "hostname": name,
        "mounts": [*_mounts(), *_binds(start)],
        "linux": {
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
    }


def held_capabilities(status: str) -> frozenset[str]:
    """Return which of ``CAPABILITIES`` a process may give away.

    Args:
        status: Its ``/proc/PID/status``.
    """
    found = re.search(r"^CapBnd:\s*([0-9a-f]+)$", status, re.MULTILINE)
    bits = int(found[1], 16) if found else 0
    return frozenset(name for name, number in _NUMBER_OF.items() if bits >> number & 1)


def runtime_words(runtime: str, name: str) -> list[str]:
    """Return the command that runs the bundle in its folder, in the foreground.

    Args:
        runtime: ``runc`` or ``crun``.
        name: Of the container.
    """
    return [runtime, "--root", "state", "run", "--bundle", ".", name]


def _mounts() -> list[dict[str, Any]]:
    """Return what a container mounts besides its root; shared memory up to half of all, as loaders of data need it."""
    terminals = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]
    device = ["nosuid", "strictatime", "mode=755", "size=65536k"]
    return [
        _mount("/proc", "proc"),
        _mount("/dev", "tmpfs", device),
        _mount("/dev/pts", "devpts", terminals),
        _mount("/dev/shm", "tmpfs", [*_QUIET, "mode=1777"]),  # noqa: S108 -- inside
        _mount("/dev/mqueue", "mqueue", _QUIET),
        _mount("/sys", "sysfs", [*_QUIET, "ro"]),
    ]


def _mount(target: str, kind: str, options: Collection[str] = ()) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}


def _binds(start: Start) -> list[dict[str, Any]]:
    return [
        {
            "destination": bind.target,
            "type": "bind",
            "source": bind.source,
            "options": ["rbind", "rprivate", "ro" if bind.read_only else "rw"],
        }
        for bind in start.binds
    ]
