"""Stands in for an agent of a node of Ray until somebody asks it something, and then becomes it.

The agent for environments of tasks takes 0.6 s of processor time to start, while the actors of a plane do too, and
no plane asks it. A user who runs tasks on the plane's Ray may: then it is there, a second later.

    python -I -S late_agent.py ADDRESS PORT COMMAND...
"""

import os
import select
import socket
import sys

__all__ = ["main"]


def main(address: str, port: str, *command: str) -> None:
    """Listen where the agent would; become it with the first connection, or end with the raylet."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        # The raylet holds the other end of standard input, and writes nothing to it.
        asked, _, _ = select.select([listener.fileno(), sys.stdin.fileno()], [], [])
        if listener.fileno() not in asked:
            return
        # It listens no more, and what has connected is reset: the raylet asks again, until the agent has bound the port
        # itself. Up to then the port stays taken: whoever connects to anybody meanwhile may be given any free one, and
        # the raylet ends with an agent that finds it in use.
        listener.shutdown(socket.SHUT_RDWR)
        listener.set_inheritable(True)
        os.execv(command[0], command)  # noqa: S606 -- what the raylet would have started


if __name__ == "__main__":
    main(*sys.argv[1:])
