"""One rank's process as the launcher sees it: started, listened to, ended."""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from omniload.base.log import RoleLog, get_logger, last_line_of
from trainer_integration.run.run_log import EventLine, MemoryLine, StepLine, parse_line

__all__ = ["ASK_TO_END", "RankProcess"]

ASK_TO_END = signal.SIGUSR1
"""Asks a rank to save after its step and to end; one that is still starting simply ends."""

_LOG = get_logger(__name__)
_SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_LONGEST_PIECE_BYTES = 64 << 10
"""Of what a rank says without an end of line."""
_LAST_WORDS_S = 5.0
"""How long a process of the rank's own that outlives it may keep its exit from being told."""


class RankProcess:
    """A process that takes a specification on standard input and writes lines to standard output."""

    def __init__(
        self,
        command: Sequence[str],
        specification: str,
        log_file: Path,
        variables: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start it.

        Args:
            command: Program and arguments.
            specification: What it reads on standard input.
            log_file: Gets what it writes to standard error, as ``RoleLog`` keeps lines; must be new.
            variables: What it gets beside the variables of this process.
            inherited: Open files that it gets, under the same numbers.
        """
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.touch(exist_ok=False)
        self._log = RoleLog(log_file, form="%(message)s")
        self._process = subprocess.Popen(  # noqa: S603 -- the launcher's own command
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **_SETTINGS, **(variables or {})},
            pass_fds=tuple(inherited),
            start_new_session=True,  # Ctrl-C at the terminal is for the launcher
        )
        # From its first moment: a rank whose pipe is full would stand still.
        self._keeping = threading.Thread(
            target=self._keep_words, name="omniload-rank-words", daemon=True
        )
        self._keeping.start()
        self.pid = self._process.pid
        self.killed = False
        """Whether ``kill`` ended it."""
        self._thread: threading.Thread | None = None
        assert self._process.stdin is not None
        # It may have died at once: its exit is reported by ``listen``.
        with suppress(BrokenPipeError):
            self._process.stdin.write(specification.encode())
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def listen(
        self, on_line: Callable[[StepLine | EventLine], None], on_exit: Callable[[int], None]
    ) -> None:
        """Pass on its lines and then, whatever happens, its exit code, from a thread.

        A line that is none of ours, such as a library may print, goes to the log file.
        """
        self._thread = threading.Thread(
            target=self._follow, args=(on_line, on_exit), name="omniload-rank", daemon=True
        )
        self._thread.start()

    def _follow(
        self, on_line: Callable[[StepLine | EventLine], None], on_exit: Callable[[int], None]
    ) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as lines:
                for text in lines:
                    self._pass_on(text, on_line)
        finally:
            code = self._process.wait()
            self._keeping.join(_LAST_WORDS_S)
            self._log.close()
            on_exit(code)

    def _keep_words(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as words:
            while text := words.readline(_LONGEST_PIECE_BYTES):
                self._note(text)

    def _note(self, text: bytes) -> None:
        self._log.note(logging.INFO, text.decode(errors="backslashreplace").rstrip("\n"))

    def _pass_on(self, text: bytes, on_line: Callable[[StepLine | EventLine], None]) -> None:
        try:
            line = parse_line(text.decode(errors="replace"))
        except ValueError:
            self._note(text)
            return
        if isinstance(line, MemoryLine):
            return  # the launcher's to write, not a rank's
        try:
            on_line(line)
        except Exception:  # noqa: BLE001 -- whatever it is, the thread must read on
            # The rank would block on a full pipe, and the job with it.
            _LOG.exception("a line of a rank was not taken: %s", line.kind)

    def cause(self, code: int) -> str:
        """Say how it ended, with the last line it wrote where it failed."""
        if code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
            return f"signal {-code}"
        if code == 0:
            return "code 0"
        return f"code {code}: {last_line_of(self._log.path) or 'it wrote nothing'}"

    def is_stopped(self) -> bool:
        """Tell whether the kernel calls it stopped (SIGSTOP), and not only slow."""
        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ask_to_end(self) -> None:
        """Ask it to save and to end."""
        self._process.send_signal(ASK_TO_END)

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        if self._process.poll() is None:
            self.killed = True
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until it is gone and its exit was passed on.

        A process of its own that holds the pipe may keep the latter from happening in time.
        """
        self._process.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
