"""A TCP relay that limits the rate of every connection, separately in each direction.

    python -m tests.support.hdfs.throttle LISTEN_HOST PORT TARGET_HOST TARGET_PORT BYTES_PER_SECOND

The kernels of containers often lack netem and tbf; a relay works everywhere. Bytes are passed on at their time and
never before, so a short transfer is no faster than a long one. The relay prints ``up`` when it listens.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

BUFFER_BYTES = 128 << 10
LATE_S = 0.02


@dataclass(slots=True)
class Pacer:
    """Computes when bytes may be passed on. Arithmetic; the caller provides the time."""

    bytes_per_s: float
    due_s: float
    """Time at which the bytes noted so far may have been passed on; initially the start."""

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """Note ``size_bytes`` and return how long to delay them; 0 or less means no delay.

        At any time ``t`` after the start, at most ``bytes_per_s * (t - start)`` bytes were passed on. A relay that is
        late because the machine is busy makes up for at most ``LATE_S``, so the idle time of a connection is not
        saved up.
        """
        self.due_s = max(self.due_s, now_s - LATE_S) + size_bytes / self.bytes_per_s
        return self.due_s - now_s


async def pass_on(
    source: socket.socket, target: socket.socket, pacer: Pacer, clock: Callable[[], float]
) -> None:
    loop = asyncio.get_running_loop()
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    try:
        while size := await loop.sock_recv_into(source, buffer):
            if (wait_s := pacer.wait_s(size, clock())) > 0:
                await asyncio.sleep(wait_s)
            await loop.sock_sendall(target, view[:size])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # Either side may close at any time, and the other side must be notified.
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


async def relay(client: socket.socket, target: tuple[str, int], bytes_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    with client, socket.socket() as server:
        server.setblocking(False)
        try:
            await loop.sock_connect(server, target)
        except OSError:
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(
            pass_on(client, server, Pacer(bytes_per_s, loop.time()), loop.time),
            pass_on(server, client, Pacer(bytes_per_s, loop.time()), loop.time),
        )


async def serve(listen: tuple[str, int], target: tuple[str, int], bytes_per_s: float) -> None:
    """Relay until cancelled."""
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    with socket.create_server(listen, backlog=512) as listener:
        listener.setblocking(False)
        sys.stdout.write("up\n")
        sys.stdout.flush()
        while True:
            client, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(relay(client, target, bytes_per_s))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    host, port, target_host, target_port, rate = sys.argv[1:]
    asyncio.run(serve((host, int(port)), (target_host, int(target_port)), float(rate)))
