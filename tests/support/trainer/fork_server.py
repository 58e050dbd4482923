"""The server that processes of a trainer's tests are forked from, which has loaded what any of them needs.

``multiprocessing`` has one a process, and what it loads is settled when it starts: where each module named its own,
the processes of all but the first loaded theirs anew, each of them. In a session of tests it is itself forked from the
Python that has loaded what ranks need (``tests/conftest.py``).
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.context import ForkServerContext

__all__ = ["forking", "python"]

_MODULES = (
    # A process loads the main program of who asked, too.
    "pytest",
    # Torch loads it when the first tensor is spread over ranks: a second in each of them.
    "torch._dynamo",
    *("tests.support.trainer.killed_saves", "tests.support.trainer.processes.striped_rank"),
    *("tests.support.trainer.moe_cases", "tests.support.trainer.moe_group"),
)


python: Callable[[], str] = spawn.get_executable
"""What the server is started with."""


def forking() -> ForkServerContext:
    """Start the server where none runs; return the context whose processes are forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_MODULES])
    resource_tracker.ensure_running()  # a small program of its own, for all of this process
    kept = spawn.get_executable()
    spawn.set_executable(python())
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(kept)
    return context
