"""The server that processes of a trainer's tests are forked from, which has loaded what any of them needs.

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
    # A process loads the main program of who asked, too.
    "pytest",
    # Torch loads it when the first tensor is spread over ranks: a second in each of them.
    "torch._dynamo",
    *("tests.support.trainer.killed_saves", "tests.support.trainer.processes.striped_rank"),
    *("tests.support.trainer.moe_cases", "tests.support.trainer.moe_group"),
)


python: Callable[[], str] = spawn.get_executable
"""The Python that starts the server."""


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
