"""The Python stack of a worker that does not answer."""

import faulthandler
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["StackPipes", "show_stack_on_signal"]

_SIGNAL = signal.SIGRTMIN + 7
"""Signal that Slurm, torchrun and the interpreter never send."""
_READY = b"ready\n"
_PATIENCE_S = 2.0
_QUIET_S = 0.2
_MOST_BYTES = 1 << 14


def show_stack_on_signal(pipe: Connection) -> None:
    """Have this process write its threads' stacks into ``pipe`` when asked, even while it is stuck in C code."""
    # The handler is C code, because a Python handler would run only after the stuck C code has returned.
    faulthandler.register(_SIGNAL, file=pipe.fileno(), all_threads=True)
    os.write(pipe.fileno(), _READY)


class StackPipes:
    """One pipe per worker, to ask a worker for its stacks."""

    def __init__(self, context: Any, workers: int) -> None:
        """Make the pipes with a multiprocessing ``context``."""
        # One pipe per worker, because a shared pipe would mix the stacks of two workers.
        pairs = [context.Pipe(duplex=False) for _ in range(workers)]
        self._readers: list[Connection] = [reader for reader, _ in pairs]
        self.writers: list[Connection] = [writer for _, writer in pairs]
        self._ready: set[int] = set()

    def close_writers(self) -> None:
        """Close the writing ends here; only the started workers keep them."""
        for writer in self.writers:
            writer.close()

    def stack_of(self, worker: int, pid: int) -> str:
        """Return the stacks of a worker, or the reason why there are none."""
        reader = self._readers[worker]
        # Without a handler the signal ends a process, so it is sent only once the handler is known to be installed.
        if worker not in self._ready and _read(reader, len(_READY), 0) != _READY:
            return "it has not come to its first batch: it is still starting"
        self._ready.add(worker)
        try:
            os.kill(pid, _SIGNAL)
        except ProcessLookupError:
            return "it has ended"
        stacks = _read(reader, _MOST_BYTES, _PATIENCE_S).decode(errors="replace")
        return _of_loop(stacks.strip()) or f"it did not write its stack within {_PATIENCE_S:g} s"


def _of_loop(stacks: str) -> str:
    """Return the frames of the thread that makes batches, up to torch's loop."""
    for thread in stacks.split("\n\n"):
        frames, loop, _ = thread.partition(" in _worker_loop")
        if loop:
            # Without the thread's heading, and without the rest of the line of torch's loop.
            return "\n".join(frames.splitlines()[1:-1])
    return stacks


def _read(reader: Connection, most: int, patience_s: float) -> bytes:
    """Return the text that arrives until nothing arrives for a moment."""
    data = b""
    # The stacks arrive in many small writes without an end mark, so only silence shows that they are complete.
    while len(data) < most and reader.poll(patience_s if not data else _QUIET_S):
        piece = os.read(reader.fileno(), most - len(data))
        if not piece:
            break
        data += piece
    return data
