"""Processes of an attempt, from the launcher's view: ranks that it starts, listens to, and ends.

Memory is the proportional set size, which counts a shared page once.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from omniload.base.errors import ConfigError
from omniload.base.linux.stopped import StopLooks
from omniload.base.log import RoleLog, get_logger, last_line_of
from trainer_integration.run.run_log import EventLine, MemoryLine, StepLine, parse_line

if TYPE_CHECKING:
    from omniload.actors.ray.plane import RayPlane

__all__ = ["ASK_TO_END", "Attempt", "RankProcess", "pss_by_role", "python_of_ranks"]

ASK_TO_END = signal.SIGUSR1
"""Signal that asks a rank to save after its step and to end; a rank that is still starting just ends."""

_PYTHON = "PYTHON_EXEC"
"""Variable that names the Python for ranks, as for torchrun."""
_LOG = get_logger(__name__)
# With a thread per core in each of several ranks, their spinning threads would compete.
_SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_LONGEST_PIECE_BYTES = 64 << 10
"""Longest output of a rank without a line end."""
_LAST_WORDS_S = 5.0
"""How long a child process of the rank that outlives it may delay the report of the rank's exit."""


def python_of_ranks(variables: Mapping[str, str] = os.environ) -> str:
    """Return the Python that starts ranks.

    Raises:
        ConfigError: The named Python cannot be run.
    """
    named = variables.get(_PYTHON, sys.executable)
    found = shutil.which(named)
    if found is None:
        raise ConfigError(
            f"{_PYTHON} is {named!r}, which is not a program that can be run; name a Python, or unset it"
        )
    return found


class RankProcess:
    """A process that takes a specification on standard input and writes lines to standard output."""

    def __init__(
        self,
        command: Sequence[str],
        specification: str,
        log_file: Path,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start it.

        Args:
            command: Program and arguments.
            specification: Text that it reads on standard input.
            log_file: Receives its standard error, in the form in which ``RoleLog`` keeps lines; must be new.
            inherited: Open files that it inherits, under the same numbers.
        """
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.touch(exist_ok=False)
        self._log = RoleLog(log_file, form="%(message)s")
        self._process = subprocess.Popen(  # noqa: S603 -- the launcher's own command
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **_SETTINGS},
            pass_fds=tuple(inherited),
            start_new_session=True,  # Ctrl-C at the terminal is for the launcher
        )
        # From its first moment on, because a rank whose pipe is full would block.
        self._keeping = threading.Thread(
            target=self._keep_words, name="omniload-rank-words", daemon=True
        )
        self._keeping.start()
        self.pid = self._process.pid
        self._looks = StopLooks(self.pid)
        self.killed = False
        """Whether ``kill`` ended it."""
        self._thread: threading.Thread | None = None
        assert self._process.stdin is not None
        # It may have died immediately, and ``listen`` reports its exit.
        with suppress(BrokenPipeError):
            self._process.stdin.write(specification.encode())
        with suppress(BrokenPipeError):
            # The end of the stream is the end of the specification, because the rank reads up to it.
            self._process.stdin.close()

    def listen(
        self, on_line: Callable[[StepLine | EventLine], None], on_exit: Callable[[int], None]
    ) -> None:
        """Pass on its lines and then, whatever happens, its exit code, from a thread.

        A line of another kind, such as a library may print, goes to the log file.
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
            # Before the exit is reported, because ``cause`` uses the last line of its output.
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
            return  # the launcher writes this kind of line, not a rank
        try:
            on_line(line)
        except Exception:  # noqa: BLE001 -- whatever the error is, the thread must continue to read
            # Otherwise the rank would block on a full pipe, and the job with it.
            _LOG.exception("a line of a rank was not taken: %s", line.kind)

    def cause(self, code: int) -> str:
        """Return how it ended, with the last line of its output if it failed."""
        if code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
            return f"signal {-code}"
        if code == 0:
            return "code 0"
        return f"code {code}: {last_line_of(self._log.path) or 'it wrote nothing'}"

    def is_stopped(self) -> bool:
        """Return whether it is stopped (SIGSTOP), and not only slow; see ``StopLooks``."""
        return self._looks.is_stopped()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ask_to_end(self) -> None:
        """Ask it to save and to end."""
        self._process.send_signal(ASK_TO_END)

    def kill(self) -> None:
        """End it immediately, unless it has ended."""
        if self._process.poll() is None:
            self.killed = True
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until it is gone and its exit was passed on.

        A child process of the rank that holds the pipe may delay the latter beyond the limit.
        """
        self._process.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


@dataclass(slots=True)
class Attempt:
    """The processes that run at present."""

    number: int
    plane: "RayPlane | None" = None
    ranks: dict[int, RankProcess] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    is_ending: bool = False
    """Whether the launcher is ending its processes, so that any process that ends now was ended by the launcher."""
    _stopped: set[int] = field(default_factory=set)

    @property
    def pids(self) -> dict[str, int]:
        """Processes by role: ``rank 0``, ``planner``, ``loader-0``, ..."""
        # A copy of the ranks, because the launcher adds to them while the watching thread reads.
        return {**{f"rank {rank}": p.pid for rank, p in dict(self.ranks).items()}, **self.roles}

    def newly_stopped(self) -> Iterator[str]:
        """Yield what to do about each rank that was stopped (SIGSTOP) since the last call; its peers wait for it."""
        for rank, process in dict(self.ranks).items():
            if not process.is_stopped():
                self._stopped.discard(rank)
            elif rank not in self._stopped:
                self._stopped.add(rank)
                yield (
                    f"rank {rank} (process {process.pid}) is stopped, and all ranks wait for it: kill -CONT "
                    f"{process.pid} resumes it, kill -9 {process.pid} restarts all ranks from the last checkpoint"
                )

    def without_ray(self) -> str:
        """Return which server of the data plane's own Ray has ended; empty while all run, or without such a Ray."""
        ended = "" if self.plane is None else self.plane.ended_service()
        return f"Ray's {ended}, and the data plane with it" if ended else ""

    def end_without_ray(self) -> str:
        """End the ranks if a server of their Ray has ended, because no role can be replaced then, and they would wait.

        Returns:
            The result of ``without_ray``, the first time; otherwise empty.
        """
        if self.is_ending or not (said := self.without_ray()):
            return ""
        self.is_ending = True
        for process in dict(self.ranks).values():
            process.kill()
        return said


def pss_by_role(pids: Mapping[str, int]) -> dict[str, int]:
    """Return the proportional set size of each process, and of the launcher's other children together.

    Args:
        pids: Processes by role.

    Returns:
        Bytes by role; ``launcher`` is this process, ``ray`` is all of Ray's processes apart from actors. A process that
        has ended in the meantime is left out.
    """
    known = set(pids.values())
    sizes: dict[str, int] = {}
    for role, pid in {**pids, "launcher": os.getpid()}.items():
        with suppress(psutil.Error):
            sizes[role] = int(psutil.Process(pid).memory_full_info().pss)
    others = 0
    for child in psutil.Process().children(recursive=True):
        if child.pid not in known:
            with suppress(psutil.Error):
                others += int(child.memory_full_info().pss)
    if others:
        sizes["ray"] = others
    return sizes
