"""Ray, imported with the environment that a private cluster needs.

Ray reads its authentication mode once, when it is imported, so the rest of the project
takes ``ray`` from here. Child processes inherit what is set: all processes of a job
share one token, and no other process of the machine can join.
"""

import atexit
import ctypes
import faulthandler
import os
import secrets
import sys

GIVEN_MODE, GIVEN_TOKEN = (os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"))
"""What the program or its user had set, before anything here is set."""

if "ray" not in sys.modules:  # else the program's own settings hold until ``use_token``
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Silences a warning about a default that will change; the data plane asks for no GPUs.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# How long the parts of a node may wait for each other at the start; Ray's own 30 s are too few
# where cores are scarce, and its raylet then ends itself.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
# Ray runs actors at niceness 15, and a process that is just starting at 0: while one starts, on few cores,
# roles that ranks wait for would stand still for most of a second.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray's head keeps what became of each of the last hundred thousand calls, for a dashboard that is not started.
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
# Ray kills actors where a host's memory is full by 95 %, whoever fills it: a trainer may, for good, and roles that take
# their place would be killed as well.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

_EXCEPTHOOK = None if "ray" in sys.modules else sys.excepthook

import ray  # noqa: E402 -- behind what it reads as it is imported
from ray._private import auto_init_hook, state, worker  # noqa: E402
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] # noqa: E402
from ray.exceptions import (  # noqa: E402
    RayActorError,
    RayError,
    RayTaskError,
)

if _EXCEPTHOOK is not None:
    # Ray's own tells its head of an error before it prints it: where the head has died, a rank that ends by that very
    # error would print nothing and hang until Ray ends it a minute later.
    sys.excepthook = _EXCEPTHOOK


@atexit.register  # behind Ray's own, which was registered as it was imported: so this comes before it
def _start_no_ray() -> None:
    """Have a thread that calls Ray once it was left raise: the call would start another Ray, as the process ends."""
    auto_init_hook.enable_auto_connect = False


_LIBC = ctypes.CDLL(None)
# Looked up now: a fork may lack the thread that holds the lock of the dynamic linker.
_ON_EXIT, _EXIT = _LIBC.on_exit, _LIBC._exit


def _leave_ray_to_parent() -> None:
    """Have a fork of a connected process end as it would without Ray, whose own end would reach into its parent's.

    Ray has no threads in a fork. What ends it there waits for some, or crashes.
    """
    if not ray.is_initialized():
        return
    atexit.unregister(ray.shutdown)
    # References that nobody gives back: clients of the head would end with the modules that hold them.
    for held in (worker.global_worker, state.state):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    # Behind Python's own end, and before that of native code: what is registered last is called first.
    _ON_EXIT(_EXIT, None)


os.register_at_fork(after_in_child=_leave_ray_to_parent)


__all__ = [
    "GIVEN_MODE",
    "GIVEN_TOKEN",
    "AuthenticationTokenLoader",
    "Config",
    "RayActorError",
    "RayError",
    "RayTaskError",
    "miss_hosts_soon",
    "place_traces",
    "ray",
]


_MISSED_AFTER_MS = 40_000
"""Longer than a lifeline takes, which says what has happened."""


def place_traces() -> None:
    """Say where a crash is traced, where ``sys.stderr`` has no descriptor; call it before this process joins a Ray.

    Ray asks that object for one, and refuses to start without: one that a script put in its place to keep a log has
    none, and a daemon whose standard files are closed has no such object.
    """
    if faulthandler.is_enabled() or _descriptor_of(sys.stderr) is not None:
        return
    descriptor = _descriptor_of(sys.__stderr__)
    # Held by the process for as long as it lasts, as traces are written when nothing can be opened any more.
    where = os.open(os.devnull, os.O_WRONLY) if descriptor is None else descriptor
    faulthandler.enable(where, all_threads=False)


def _descriptor_of(file: object) -> int | None:
    try:
        return int(file.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # none at all, of none, closed
        return None


def miss_hosts_soon() -> None:
    """Have connections to another host that is out of reach end soon; call it before this process joins a Ray.

    Ray itself leaves them to the kernel for two minutes, and a process that leaves Ray waits for them.
    """
    os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", str(_MISSED_AFTER_MS))
    Config.initialize("")  # Ray keeps what it read from the environment when it was imported
