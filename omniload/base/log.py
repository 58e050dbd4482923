"""Logging: one logger tree; rich on a terminal, plain lines elsewhere, and a file for each role in a run's folder.

A thread writes for a role inside ``RoleLog.speaking``; a process with a single role calls ``speak_for``::

    logger "omniload" ──▶ standard error         every line, as the program has set it up
                      └─▶ RUN/logs/ROLE.log      lines of the role that the thread speaks for; whole, then ROLE.log.1

Secrets are removed from everything that is written to either.
"""

import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from typing_extensions import override

from omniload.base.errors import StateError
from omniload.base.message_text import log_text
from omniload.base.secrets import without_secrets

__all__ = [
    "ONCE",
    "RoleLog",
    "RoleLogs",
    "get_logger",
    "last_line_of",
    "log_name",
    "logs_folder",
    "place_of_lines",
    "set_up_logging",
    "speak_for",
]

_ROOT = "omniload"
ONCE = {"once": True}
"""``extra`` of a line that says nothing new when repeated: a command shows it once, the log of a role each time."""
_LARGEST_FILE_BYTES = 4 << 20
"""Largest size of a role's file; the previous file is kept as well."""
_LONGEST_LINE = 16 << 10
_TAIL_BYTES = 64 << 10
_LONGEST_SHOWN = 500


class _Discreet(logging.Formatter):
    """Hides secrets and escapes terminal control characters, both in messages and in tracebacks."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return log_text(super().format(record))


class _WithoutSecrets(logging.Filter):
    """Removes secrets from a line before any handler gets it; handlers of importing programs do not hide them."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        # The handler reports a line with the wrong arguments; such a line must not end the work that logs it.
        with suppress(TypeError, ValueError):
            text = record.getMessage()
            if (clean := without_secrets(text)) != text:
                record.msg, record.args = clean, ()
        if record.exc_info:  # formatters use this text instead of formatting the exception
            record.exc_text = without_secrets(_PLAIN.formatException(record.exc_info))
        return True


_WITHOUT_SECRETS, _PLAIN = _WithoutSecrets(), logging.Formatter()


class _NotAgain(logging.Filter):
    """Drops repetitions of lines that are marked ``ONCE``, because a command may open a source many times."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "once"):
            return True
        text = record.getMessage()
        if text in self._said:
            return False
        self._said.add(text)
        return True


class RoleLog(RotatingFileHandler):
    """The lines of one role: a file of bounded size that only its user can read or can have created."""

    def __init__(self, path: Path, *, form: str = "%(asctime)s %(levelname)s %(message)s") -> None:
        """Open the file and append to it.

        Raises:
            StateError: Something other than a file is there, or it belongs to another user.
            OSError: The file cannot be opened.
        """
        self._ended = self._is_told = False
        super().__init__(
            path, maxBytes=_LARGEST_FILE_BYTES, backupCount=1, encoding="utf-8", errors="replace"
        )
        self.setFormatter(_Discreet(form))

    @property
    def path(self) -> Path:
        """Path of the file."""
        return Path(self.baseFilename)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Write what this thread logs inside into this file too."""
        token = _SPEAKER.set(self)
        try:
            yield
        finally:
            _SPEAKER.reset(token)

    def note(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Write a line into this file only, with the traceback of ``error``."""
        traced = None if error is None else (type(error), error, error.__traceback__)
        self.handle(logging.LogRecord(_ROOT, level, "", 0, text, None, traced))

    @override
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        cut = len(text) - _LONGEST_LINE
        return text if cut <= 0 else f"{text[:_LONGEST_LINE]} [{cut} characters more]"

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not self._ended:  # the base class would open the file again
            super().emit(record)

    @override
    def close(self) -> None:
        self._ended = True
        with suppress(OSError):  # reported before, for the line that did not fit
            super().close()

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line, and report it once: a full disk must not end the role."""
        if not self._is_told:
            self._is_told = True
            get_logger(__name__).warning("%s: lines are lost: %s", self.path, sys.exc_info()[1])

    @override
    def _open(self) -> TextIOWrapper:
        # Without O_NONBLOCK, opening a pipe at this path would wait.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        # A link in the run's folder could lead to another file of this user, which must not be written to.
        descriptor = os.open(self.baseFilename, flags | os.O_CLOEXEC, 0o600)
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid():
            os.close(descriptor)
            raise StateError(
                f"{self.baseFilename}: is no file of user {os.geteuid()}, but of user {seen.st_uid}; move it away"
            )
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)  # noqa: PTH123 -- a descriptor


# Per thread: the threads that it starts write for no role until they say so.
_SPEAKER: ContextVar[RoleLog | None] = ContextVar("omniload_role_log", default=None)


class _ToRoles(logging.Handler):
    """Passes a line to the log of the role of the current thread."""

    process_role: RoleLog | None = None
    """Log for threads without a role."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if (log := _SPEAKER.get() or self.process_role) is not None:
            log.handle(record)
        # Python itself writes to standard error if no handler is set up, and this handler must not count as one.
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not self._has_others():
            last.handle(record)

    def _has_others(self) -> bool:
        logger = logging.getLogger(_ROOT)
        above = logging.getLogger().handlers if logger.propagate else []
        return len(logger.handlers) + len(above) > 1


_TO_ROLES = _ToRoles()


class RoleLogs:
    """The log files of the roles that one process has in a plane."""

    latest: Path | None = None
    """Folder of the plane that this process opened or joined last."""

    def __init__(self, folder: Path | None) -> None:
        """Write below ``folder``, as from ``logs_folder``; write nothing without it or on a host without its parent."""
        self._folder, self._logs = folder, dict[str, RoleLog]()
        if folder is not None and folder.parent.is_dir():
            RoleLogs.latest = folder
        else:
            self._folder = None

    def of(self, role: str) -> RoleLog | None:
        """Open the log of a role; ``None`` if it cannot be opened, because a run continues without logs."""
        if self._folder is None:
            return None
        if role in self._logs:
            return self._logs[role]
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            log = RoleLog(self._folder / log_name(role))
        except (OSError, StateError) as error:
            get_logger(__name__).warning("%s writes no log: %s", role, error)
            return None
        if _TO_ROLES not in (handlers := logging.getLogger(_ROOT).handlers):
            handlers.append(_TO_ROLES)
        log.note(logging.INFO, f"{role} begins in process {os.getpid()}")
        self._logs[role] = log
        return log

    def close(self) -> None:
        """Close all logs; later lines are lost."""
        for log in self._logs.values():
            log.close()


def speak_for(log: RoleLog | None) -> None:
    """Write everything that this process logs from now on, from level INFO on, into the log of its role."""
    _TO_ROLES.process_role = log
    if log is not None:
        logging.getLogger(_ROOT).setLevel(logging.INFO)


def logs_folder(run_dir: Path) -> Path:
    """Return the folder of the roles' logs in the folder of a run."""
    return run_dir / "logs"


def log_name(role: str) -> str:
    """Return the name of a role's log file."""
    return f"{role.replace(' ', '-')}.log"


def place_of_lines(role: str) -> str:
    """Return the path of the log of a role of this process's plane, as the end of a message; empty without a file."""
    path = RoleLogs.latest and RoleLogs.latest / log_name(role.removeprefix("the "))
    return f"; its lines: {path}" if path and path.is_file() else ""


def last_line_of(path: Path) -> str:
    """Return the last line of a log, made safe for a terminal; empty if there is none."""
    # Imported here, because it imports pydantic, which adds a tenth of a second to the start of every command.
    from omniload.base.reading import open_file  # noqa: PLC0415

    try:
        with open_file(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except (OSError, StateError):
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "".join(c if c.isprintable() else " " for c in last)[:_LONGEST_SHOWN]


def get_logger(name: str) -> logging.Logger:
    """Return the project's logger for a module; pass ``__name__``."""
    logger = logging.getLogger(name if name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")
    logger.addFilter(_WITHOUT_SECRETS)  # added only once, because it is the same object
    return logger


def set_up_logging(level: str = "INFO", *, role: str = "") -> None:
    """Send the project's log to standard error; each line begins with ``role`` (``planner``, ``rank 1``).

    Only the project's own logger is changed, because a library that is imported into a program must leave the root
    logger alone.
    """
    handler: logging.Handler
    stderr: TextIO | None = sys.stderr  # None if it was closed before this process began
    if stderr is None:
        handler = logging.NullHandler()
    elif stderr.isatty():
        # Imported here, because it takes a quarter of the start of every command without a terminal.
        from rich.console import Console  # noqa: PLC0415
        from rich.logging import RichHandler  # noqa: PLC0415

        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(_Discreet(f"{role + ': ' if role else ''}%(message)s"))
    else:
        handler = logging.StreamHandler(stderr)
        handler.setFormatter(
            _Discreet(
                f"%(asctime)s %(levelname)s {role + ' ' if role else ''}%(name)s: %(message)s"
            )
        )
    handler.addFilter(_NotAgain())
    logger = logging.getLogger(_ROOT)
    # The handler of the roles' logs stays, because roles may begin before logging is set up.
    logger.handlers[:] = [handler, *(h for h in logger.handlers if h is _TO_ROLES)]
    logger.setLevel(level)
    # Otherwise a program that has set up the root logger would show each line twice.
    logger.propagate = False
