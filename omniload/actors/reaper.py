"""The opener's side of the reaper: started before what it watches, closed after it."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omniload.actors import reaper_process
from omniload.actors.reaper_process import LEAVE, MARKS, PATIENCE_S
from omniload.base.log import get_logger

__all__ = ["Reaper", "marked"]

_LOG = get_logger(__name__)
_RESTARTS = 5
_LAST_S = 5.0
"""How long a reaper may take over its own end, beside the patience that it has with others."""


class Reaper:
    """The opener's side: started before what it watches, closed after it. Another one follows one that is killed."""

    def __init__(self, mark: str, folders: Sequence[Path] = ()) -> None:
        """Start the reaper of the processes that carry ``mark`` and of folders that may come to be."""
        self._words = [mark, str(os.getpid()), *map(str, folders)]
        self._lock = threading.Lock()
        self._closed = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._follow, name="omniload-reaper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the reaper at present."""
        return self._process.pid

    def close(self) -> None:
        """End every marked process that is left, and wait until that is done, for half a minute at most."""
        with self._lock:
            self._closed = True
            process = self._process
        assert process.stdin is not None
        # Said, not only closed: a process that was forked meanwhile holds the pipe as well.
        with suppress(BrokenPipeError):
            process.stdin.write(LEAVE)
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(PATIENCE_S + _LAST_S)
        except subprocess.TimeoutExpired:
            _LOG.warning("the reaper %d does not end; it is left alone", process.pid)
        self._thread.join(_LAST_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        # Without marks: a reaper of whoever started this process, a launcher for one, would end it before it has
        # reaped.
        environment = {name: value for name, value in os.environ.items() if name != MARKS}
        return subprocess.Popen(  # noqa: S603 -- our own module, our own interpreter
            # -P: the folder of this module holds no module that the reaper imports.
            [sys.executable, "-P", reaper_process.__file__, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal is for the opener
        )

    def _follow(self) -> None:
        """Start another reaper where one ends before its time."""
        for _ in range(_RESTARTS):
            code = self._process.wait()
            with self._lock:
                if self._closed:
                    return
                _LOG.warning("the reaper of a data plane ended with %d; another one starts", code)
                assert self._process.stdin is not None
                with suppress(BrokenPipeError):
                    self._process.stdin.close()
                self._process = self._start()
        _LOG.error("no reaper stays: if this process is killed, Ray's live on for a minute")


@contextmanager
def marked(mark: str) -> Iterator[None]:
    """Have processes that are started inside, and theirs, carry ``mark`` beside the marks of this one."""
    before = os.environ.get(MARKS)
    os.environ[MARKS] = mark if before is None else f"{before}:{mark}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARKS]
        else:
            os.environ[MARKS] = before
