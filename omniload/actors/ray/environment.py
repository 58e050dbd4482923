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
"""Settings of the program or its user, from before this module sets its own."""

if "ray" not in sys.modules:  # otherwise the program's own settings apply until ``use_token``
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Silences a warning about a default that will change; the data plane asks for no GPUs.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# How long the parts of a node may wait for each other at the start. Ray's own 30 s are too few on
# a host with few cores, where its raylet would end itself.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
# Ray runs actors at niceness 15, but a starting process at 0. On few cores, roles that ranks wait for would
# stand still for most of a second while a process starts.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray's head keeps the outcome of the last hundred thousand calls, for a dashboard that is not started.
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
# Ray kills actors if 95 % of a host's memory is in use, by whichever process. A trainer may use that much all the
# time, and replaced roles would be killed as well.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

_EXCEPTHOOK = None if "ray" in sys.modules else sys.excepthook

import ray  # noqa: E402 -- after the variables that it reads during its import
from ray._private import auto_init_hook, state, worker  # noqa: E402
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] # noqa: E402
from ray.exceptions import (  # noqa: E402
    RayActorError,
    RayError,
    RayTaskError,
)

if _EXCEPTHOOK is not None:
    # Ray's own hook reports an error to its head before printing it. If the head has died, a rank that ends by that
    # very error would print nothing, and hang until Ray ends it a minute later.
    sys.excepthook = _EXCEPTHOOK


@atexit.register  # registered after Ray's own, which was registered at its import, so this runs before it
def _start_no_ray() -> None:
    """Let calls to Ray after it was left raise; they would start another Ray while the process ends."""
    auto_init_hook.enable_auto_connect = False


_LIBC = ctypes.CDLL(None)
# Looked up now, because in a fork the dynamic linker's lock may be held by a thread that no longer exists.
_ON_EXIT, _EXIT = _LIBC.on_exit, _LIBC._exit


def _leave_ray_to_parent() -> None:
    """Let a fork of a connected process end as it would without Ray, whose shutdown would affect the parent.

    Ray has no threads in a fork, so its shutdown there would wait for them, or crash.
    """
    if not ray.is_initialized():
        return
    atexit.unregister(ray.shutdown)
    # References that are never released, because clients of the head would end with the modules that hold them.
    for held in (worker.global_worker, state.state):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    # Runs after Python's own shutdown and before that of native code: handlers run in reverse order of registration.
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
"""Longer than a lifeline takes to notice the end of a host, because its error names the cause."""


def place_traces() -> None:
    """Choose a file for crash traces if ``sys.stderr`` has no descriptor; call it before this process joins a Ray.

    Ray asks ``sys.stderr`` for a descriptor, and refuses to start without one. A script's replacement that keeps a log
    has none, and a daemon with closed standard files has no such object.
    """
    if faulthandler.is_enabled() or _descriptor_of(sys.stderr) is not None:
        return
    descriptor = _descriptor_of(sys.__stderr__)
    # Kept open as long as the process lives, because traces are written when nothing can be opened any more.
    where = os.open(os.devnull, os.O_WRONLY) if descriptor is None else descriptor
    faulthandler.enable(where, all_threads=False)


def _descriptor_of(file: object) -> int | None:
    try:
        return int(file.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # no object, no descriptor, or closed
        return None


def miss_hosts_soon() -> None:
    """Let connections to an unreachable host end soon; call it before this process joins a Ray.

    Ray leaves them to the kernel, for two minutes, and a process that leaves Ray waits for them.
    """
    os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", str(_MISSED_AFTER_MS))
    Config.initialize("")  # Ray keeps what it read from the environment when it was imported
