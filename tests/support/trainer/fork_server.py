"""The server from which processes of a trainer's tests are forked; it has loaded every module that they need.

``multiprocessing`` has one fork server in each process, and its modules are fixed when it starts. If each test module
named its own list, only the first list would count, and the processes of all other modules would each load their
modules again. In a session of tests the server is itself forked from the Python that has loaded the modules of ranks
(``tests/conftest.py``).
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.context import ForkServerContext

__all__ = ["forking", "python"]

_MODULES = (
    # A process also loads the main program of the process that asks.
    "pytest",
    # Torch loads this when the first tensor is spread over ranks, which takes a second in each of them.
    "torch._dynamo",
    *("tests.support.trainer.killed_saves", "tests.support.trainer.processes.striped_rank"),
    *("tests.support.trainer.moe_cases", "tests.support.trainer.moe_group"),
)


python: Callable[[], str] = spawn.get_executable
"""The Python that starts the server."""


def forking() -> ForkServerContext:
    """Start the server if none runs; return the context whose processes are forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_MODULES])
    resource_tracker.ensure_running()  # a small helper program for this whole process
    kept = spawn.get_executable()
    spawn.set_executable(python())
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(kept)
    return context
