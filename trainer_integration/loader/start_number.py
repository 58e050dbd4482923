"""The number of a job's present start, agreed by its ranks in the store of torchrun's agents.

The variables say how often the agent of this host has restarted its ranks. With a c10d rendezvous the agents differ:
the agent whose rank died counts a restart, the others count none. The store outlives a start, with all its notes. So
rank 0 tells each rank that greets it which start it is::

    rank 0   counts its own starts in the store ─────────────┬─▶ answers each greeting
    rank 1   greets, by a number that nobody ever had ───────┘   waits for the answer to that number

No note of an earlier start can answer this start's greeting. Agents of a static rendezvous do not wait for each other:
if a rank was started more often than rank 0, only the next rank 0 answers it.
"""

import os
import secrets
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from omniload.base.errors import UnavailableError
from omniload.front.launch import Launch

__all__ = ["agreed_start", "has_agents_store"]

_COUNT = "omniload/starts"
_GREETING, _ANSWER, _HEARD = (f"omniload/start/{kind}" for kind in ("greeting", "answer", "heard"))
_LOOK_S = 0.1
_LONGEST_S = 3600.0
"""How long rank 0 answers, because ranks of a large job may come minutes later."""


def has_agents_store() -> bool:
    """Return whether torchrun's agents keep the store, which then serves all starts of a job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agreed_start(store: Store, launch: Launch, timeout_s: float) -> int:
    """Return the number of this start, from 0, the same on every rank; each process asks once.

    Args:
        store: A connection for this purpose only, because rank 0 continues to answer over it.
        launch: Which rank this is, and how often its agent has restarted it.
        timeout_s: Longest wait for rank 0.

    Raises:
        UnavailableError: Rank 0 does not answer, or the agent that keeps the store has ended.
    """
    try:
        return _counted(store, launch) if launch.rank == 0 else _asked(store, launch, timeout_s)
    except dist.DistNetworkError as error:
        raise UnavailableError(
            f"rank {launch.rank}: the agent of torchrun that keeps the store has ended ({error}); start the job again"
        ) from error


def _counted(store: Store, launch: Launch) -> int:
    """Count this start, and continue to answer the other ranks."""
    # The larger number: a new store counts from 0, and an agent none of whose ranks died has counted nothing.
    number = max(store.add(_COUNT, 1) - 1, launch.restarts)
    answering = threading.Thread(
        target=_answer,
        args=(store, number, launch.world_size),
        name="omniload-starts",
        daemon=True,
    )
    answering.start()
    return number


def _asked(store: Store, launch: Launch, timeout_s: float) -> int:
    """Greet rank 0, and return its answer."""
    token = secrets.token_hex(8)
    store.set(f"{_GREETING}/{launch.rank}", f"{launch.restarts}/{token}")
    try:
        store.wait([f"{_ANSWER}/{token}"], timedelta(seconds=timeout_s))
        answer = int(store.get(f"{_ANSWER}/{token}"))
    except dist.DistStoreError as error:
        raise UnavailableError(
            f"rank {launch.rank}: rank 0 has not said within {timeout_s:g} s which start of the job this is; does it "
            "run?"
        ) from error
    # Set so that rank 0 stops looking for this rank, because each look is a message.
    store.set(f"{_HEARD}/{answer}/{token}", "")
    return answer


def _answer(store: Store, number: int, world_size: int) -> None:
    """Answer the greetings of all ranks; those of earlier starts are answered too, but not read."""
    outstanding, until_s = set(range(1, world_size)), time.monotonic() + _LONGEST_S
    try:
        while outstanding and time.monotonic() < until_s:
            outstanding -= {rank for rank in outstanding if _is_heard(store, number, rank)}
            time.sleep(_LOOK_S)
    except dist.DistError:
        return  # the agent has ended, and the job with it


def _is_heard(store: Store, number: int, rank: int) -> bool:
    """Answer the greeting of a rank; return whether the rank has received an answer of this start."""
    key = f"{_GREETING}/{rank}"
    if not store.check([key]):
        return False
    restarts, _, token = store.get(key).decode().partition("/")
    # A rank that was started more often waits for the next rank 0, and an answer of this one would mislead it.
    if number >= int(restarts) and not store.check([f"{_ANSWER}/{token}"]):
        store.set(f"{_ANSWER}/{token}", str(number))
    return bool(store.check([f"{_HEARD}/{number}/{token}"]))
