"""Claims that let a plane be opened only once: by one process, for all ranks of its job.

If every rank opened a plane of its own, all of them would wait for ever, because each plane
waits for ranks that another one serves.
"""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import StateError, UnavailableError, system_refusals
from omniload.base.linux.file_lock import FileLock, is_held_here, is_locked
from omniload.base.linux.socket_peer import peer_of
from omniload.base.log import get_logger

__all__ = ["LOCK_NAME", "claim", "launch_of"]

LOCK_NAME = ".plane.lock"
"""File in the run's folder. The file stays; the lock on it is the claim."""
_MOST_ASKING = 4096
"""Most processes that can learn who holds a name; the kernel keeps each connection as long as the holder lives."""
_MOMENT_S, _TRIES = 0.01, 100
_CHANGED_S = 60.0
"""Longest wait for a command that changes the mix of a stopped run; it may have to list a source."""
_LOG = get_logger(__name__)
_JOIN = (
    "if an earlier job opened it, end that job; if another job uses it, give that job a run_dir of its own; if both "
    "are ranks of one job, leave rank= and world_size= of omniload.open to the launcher: rank 0 opens the plane, and "
    "the others join it"
)
_CLOSE = (
    "this process itself has it, by a loader that is not closed: use that loader, or close() it before you open "
    "another, which a notebook cell does when it runs again; give another job a run_dir of its own"
)


def claim(spec: PlaneSpec, environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Claim a plane by its run's folder, or without a folder by the launch that this process is part of.

    A plane without either may be opened any number of times, and so may the plane of a single rank.

    Returns:
        A function that gives the claim up; the kernel does so too when the process ends.

    Raises:
        ConfigError: The run's folder cannot be used.
        StateError: The plane is open already; names the process that has it.
        UnavailableError: A change of the run's mix is under way and takes too long.
    """
    if spec.run_dir is not None:
        return _locked(spec.run_dir).close
    launch = launch_of(environment)
    if launch is None or spec.tree.world_size == 1:
        return lambda: None
    # The name contains mix and ranks, because one launch may open several planes, to train and to evaluate.
    identity = f"{os.getuid()}\n{launch}\n{spec.tree!r}\n{spec.mix.model_dump_json()}"
    digest = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    held = _bound(f"\0omniload-plane-{digest}", launch)
    return (lambda: None) if held is None else held.close


def launch_of(environment: Mapping[str, str]) -> str | None:
    """Return the identity of the launch of several processes that this one belongs to; ``None`` outside of one."""
    for names in (("MASTER_ADDR", "MASTER_PORT"), ("SLURM_JOB_ID", "SLURM_STEP_ID")):
        if all(environment.get(name) for name in names):
            found = (*names, "TORCHELASTIC_RUN_ID")
            return " ".join(f"{name}={environment.get(name, '')}" for name in found)
    return None


@system_refusals("the run's folder")
def _locked(run_dir: Path) -> FileLock:
    run_dir.mkdir(parents=True, exist_ok=True)
    place, until_s = run_dir / LOCK_NAME, time.monotonic() + _CHANGED_S
    changed = f"the mix of {run_dir} is being changed by a command, such as omniload mix add"
    waits = False
    while True:
        try:
            return FileLock(place)
        except BlockingIOError as error:
            if is_locked(place):
                # If the holder is this process itself, such as a notebook, the advice must not be to end it.
                remedy = _CLOSE if is_held_here(place) else _JOIN
                raise StateError(
                    f"the data plane of {run_dir} is open in {error.strerror}: {remedy}"
                ) from None
        if time.monotonic() > until_s:
            raise UnavailableError(
                f"{changed}, and has been for {_CHANGED_S:.0f} s; open the data plane again once that command has "
                "ended, or end the command"
            )
        if not waits:
            # Named by its kind only: several commands may hold the lock at once, so none writes its process id there.
            _LOG.warning("%s: waiting at most %.0f s for that command to end", changed, _CHANGED_S)
            waits = True
        threading.Event().wait(_MOMENT_S)


def _bound(name: str, launch: str) -> socket.socket | None:
    """Bind a name of the abstract socket namespace, which leaves no file behind."""
    fault: OSError | None = None
    for _ in range(_TRIES):
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(name)
            # A later process can then connect, and the kernel tells it which process this is.
            held.listen(_MOST_ASKING)
        except OSError as error:
            held.close()
            fault = error
        else:
            return held
        holder = _holder(name)
        if holder is not None:
            pid, uid = holder
            # If another user holds the name, that must not keep this user from a plane.
            if uid != os.getuid():
                break
            raise StateError(
                f"the data plane of this launch ({launch}) is open in process {pid} with the same mix and ranks: "
                f"{_CLOSE if pid == os.getpid() else _JOIN}"
            )
        # The holder does not listen yet, which may take a while on a busy machine; or it has just ended.
        threading.Event().wait(_MOMENT_S)
    _LOG.warning("cannot determine whether the plane is open twice: %s", fault)
    return None


def _holder(name: str) -> tuple[int, int] | None:
    """Return process and user that listen on a name; -1 where they are unknown, ``None`` if nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        # The holder never accepts a connection, so a connect with a full queue would wait as long as the holder lives.
        asking.setblocking(False)
        try:
            asking.connect(name)
            return peer_of(asking)
        except ConnectionRefusedError:
            return None
        except OSError:
            return -1, -1
