"""The server that processes of a trainer's tests are forked from, which has loaded what any of them needs.

``multiprocessing`` has one a process, and what it loads is settled when it starts: where each module named its own,
the processes of all but the first loaded theirs anew, each of them.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

__all__ = ["forking"]

_MODULES = (
    # A process loads the main program of who asked, too.
    "pytest",
    # Torch loads it when the first tensor is spread over ranks: a second in each of them.
    "torch._dynamo",
    *("tests.support.trainer.killed_saves", "tests.support.trainer.processes.striped_rank"),
    *("tests.support.trainer.moe_cases", "tests.support.trainer.moe_group"),
)


def forking() -> ForkServerContext:
    """Return the context whose processes are forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_MODULES])
    return context
