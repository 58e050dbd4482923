"""A gate before pyfuse3's reading of /dev/fuse, and the count of what it has read and not answered.

pyfuse3 finds trio through its own module's name ``trio``, which its asyncio layer replaces
too. ``Gate`` stands there: all of trio, but for the two calls that concern the descriptor.
Its workers call ``wait_readable`` before each read, and read in the same step once it
returns. So a closed gate leaves requests with the kernel, and a thread that waits at it is woken
when it opens again: nothing that was read is lost, and libfuse notices nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

__all__ = ["Gate"]


class Gate:
    """What pyfuse3 takes for trio. Used on the loop of one mount only."""

    def __init__(self) -> None:
        self.lowlevel = _Lowlevel(self)
        self.device: int | None = None
        """/dev/fuse, once pyfuse3 has waited for it; libfuse's to close."""
        self._is_open = True
        self._is_ended = False
        self._moved = trio.Event()
        self._under_way = 0
        self._idle = trio.Event()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- whatever trio has
        return getattr(trio, name)

    def close(self) -> None:
        """Leave new requests with the kernel."""
        assert self.device is not None, "nothing was read yet"
        self._is_open = False
        self._moved = trio.Event()
        trio.lowlevel.notify_closing(self.device)

    def open(self) -> None:
        """Go on reading."""
        self._is_open = True
        self._moved.set()

    def end(self) -> None:
        """Wake waiting threads without a request: the loop of requests ends."""
        self._is_ended = True
        self._moved.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request from the step in which it was read to the one in which its reply is written."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def finish(self, within_s: float) -> bool:
        """Wait until no request is under way; return whether it came to that."""
        with trio.move_on_after(within_s):
            while self._under_way:
                self._idle = trio.Event()
                await self._idle.wait()
        return not self._under_way

    async def wait_readable(self, device: int) -> None:
        """Wait until a request may be read.

        Raises:
            trio.ClosedResourceError: The loop of requests ends.
        """
        self.device = device
        while not self._is_ended:
            if not self._is_open:
                await self._moved.wait()
                continue
            try:
                await trio.lowlevel.wait_readable(device)
            except trio.ClosedResourceError:
                continue  # by ``close`` or at the end: the conditions above say
            if self._is_open:
                return
        raise trio.ClosedResourceError


class _Lowlevel:
    """What pyfuse3 takes for ``trio.lowlevel``."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.wait_readable = gate.wait_readable

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- as above
        return getattr(trio.lowlevel, name)

    def notify_closing(self, device: int) -> None:
        self._gate.end()
        trio.lowlevel.notify_closing(device)
