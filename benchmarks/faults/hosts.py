"""Two hosts for a job, as network namespaces with a wire between: shadows are on one, everything else on the other.

::

    here   the ranks, and the process that opens the plane: planner, loaders, constructors
    there  shadows of the loaders
"""

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.support.plane.processes.shadow_rank import wait_for_nodes
from tests.support.plane.two_hosts import (
    ADDRESSES,
    NO_TOKEN,
    begin_bare_node,
    cut,
    end_all_on,
    head_of,
    mend,
    on,
    two_hosts,
)

__all__ = ["Hosts", "cut_for", "run_on_two_hosts"]

_THERE, _HEAD = "CHAOS_HOST", "CHAOS_RAY"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts as known to a process of the first one."""

    there: str
    """Name of the other host."""
    ray: str
    """Address of the head of the Ray of both hosts."""
    here: str = ADDRESSES[0]
    """Address of this host."""

    @classmethod
    def known(cls) -> Self | None:
        """Return the hosts, once both have a node of Ray; ``None`` in a process that was started on no host."""
        if (head := os.environ.get(_HEAD)) is None:
            return None
        wait_for_nodes(head, len(ADDRESSES))
        return cls(os.environ[_THERE], head)


def run_on_two_hosts(command: Sequence[str], text: str) -> int:
    """Run a command on the first of two hosts with a Ray on both, and end everything on them; return its exit code.

    Args:
        command: Words of the command.
        text: Standard input of the command.

    Raises:
        CalledProcessError: Namespaces cannot be made, because that needs root.
    """
    env = os.environ | NO_TOKEN
    with ExitStack() as ends, tempfile.TemporaryDirectory(prefix="hosts", dir="/tmp") as made:
        hosts = ends.enter_context(two_hosts())
        head = ""
        for host in hosts:
            words = [head] if head else []
            node = begin_bare_node(host, *words, folder=Path(made, host), env=env)
            ends.callback(node.communicate)
            head = head or head_of(node)
        for host in hosts:
            ends.callback(end_all_on, host)
        process = on(
            hosts[0], *command, env=env | {_THERE: hosts[1], _HEAD: head}, stdin=subprocess.PIPE
        )
        process.communicate(text)
        return int(process.returncode)


@contextmanager
def cut_for(host: str, seconds: float) -> Iterator[threading.Event]:
    """Cut the wire of a host for a while; yield an event that is set when the wire is back."""
    is_mended, mending = threading.Event(), threading.Lock()

    def put_back() -> None:
        with mending:
            if not is_mended.is_set():
                mend(host)
                is_mended.set()

    timer = threading.Timer(seconds, put_back)
    cut(host)
    try:
        timer.start()
        yield is_mended
    finally:
        timer.cancel()
        put_back()
