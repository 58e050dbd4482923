"""The agents of a node of Ray: which of them are there, and which do nothing."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["leave_out_services", "no_dashboard_agent"]

_NO_SERVICE = -1
"""What Ray's own agent says of a service that its installation lacks."""
_AGENT = "--dashboard_agent_command="
_NO_AGENT = shutil.which("cat")
"""It reads the pipe that the raylet holds, and ends with it."""
_PATCHING = threading.Lock()


def leave_out_services(node: Any) -> None:  # noqa: ANN401 -- Ray is untyped
    """Say that the services of the node's agents that nobody asks are not there.

    The raylet waits 15 s for its agents to say their ports and then ends itself; no option
    changes that, and a loaded machine starts no Python process so fast. The port of the one
    service that is asked is chosen before.
    """
    raylet: Any = import_module("ray._raylet")
    for name in (
        raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        raylet.METRICS_AGENT_PORT_NAME,
        raylet.METRICS_EXPORT_PORT_NAME,
    ):
        raylet.persist_port(node._session_dir, node._node_id, name, _NO_SERVICE)


@contextmanager
def no_dashboard_agent() -> Iterator[None]:
    """Have a raylet that is started meanwhile run a process that does nothing as its dashboard agent."""
    services: Any = import_module("ray._private.services")

    def start(command: Sequence[str], *words: Any, **named: Any) -> Any:  # noqa: ANN401 -- Ray is untyped
        line = [f"{_AGENT}{_NO_AGENT}" if word.startswith(_AGENT) else word for word in command]
        return own(line if _NO_AGENT else command, *words, **named)

    with _PATCHING:
        own = services.start_ray_process
        services.start_ray_process = start
        try:
            yield
        finally:
            services.start_ray_process = own
