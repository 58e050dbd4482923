"""Stands in for an agent of a node of Ray, and becomes the agent when a process first connects to it.

Ray's agent for the environments of tasks takes 0.6 s of processor time to start, at the moment when the actors of a
plane start too. No plane uses it. A user who runs tasks on the plane's Ray may need it, and then has it one second
later.

    python -I -S late_agent.py ADDRESS PORT COMMAND...
"""

import os
import select
import socket
import sys

__all__ = ["main"]


def main(address: str, port: str, *command: str) -> None:
    """Listen on the agent's address; become the agent at the first connection, or end together with the raylet."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        # The raylet holds the other end of standard input, and writes nothing to it.
        asked, _, _ = select.select([listener.fileno(), sys.stdin.fileno()], [], [])
        if listener.fileno() not in asked:
            return
        # Closing the socket resets the connection, and the raylet retries until the agent has bound the port itself.
        # The port stays reserved until then. Otherwise the kernel could give it to any outgoing connection, and the
        # raylet ends if its agent finds the port in use.
        listener.shutdown(socket.SHUT_RDWR)
        listener.set_inheritable(True)
        os.execv(command[0], command)  # noqa: S606 -- the command that the raylet would have started


if __name__ == "__main__":
    main(*sys.argv[1:])
