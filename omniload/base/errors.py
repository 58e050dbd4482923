"""The exception tree. Each class tells the caller what to do next.

::

    OmniloadError
    +-- ConfigError        fix the input                      exit 2
    +-- UnavailableError   try again, perhaps elsewhere       exit 3
    +-- StateError         mend what it names, then resume    exit 4
    +-- IntegrityError     stop; never retried nor skipped    exit 5
    +-- DefectError        report it: the fault is ours       exit 1

Every message names the thing, the value found, the limit and the remedy. Errors hold a single string, so they cross
process boundaries unchanged. ``omniload.base.message_text`` removes what must never be in it.
"""

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from types import TracebackType

from omniload.base.message_text import message_text

__all__ = [
    "ConfigError",
    "DefectError",
    "IntegrityError",
    "OmniloadError",
    "ShownAtOnce",
    "StateError",
    "UnavailableError",
    "project_error",
    "shown_at_once",
    "system_refusal",
    "system_refusals",
]


class OmniloadError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        # A single argument, because an exception is pickled as its class and its arguments.
        super().__init__(message_text(message))


class ConfigError(OmniloadError):
    """The mix, a setting or an argument is wrong. Fix the value that the message names."""

    exit_code = 2


class UnavailableError(OmniloadError):
    """Something outside did not answer; the same call may succeed later."""

    exit_code = 3


class StateError(OmniloadError):
    """A saved or running state, or the disk under it, does not fit the request. Trying again gives the same error."""

    exit_code = 4


class IntegrityError(OmniloadError):
    """Bytes or samples are damaged or have changed. Never retried, never skipped."""

    exit_code = 5


class DefectError(OmniloadError):
    """A bug in this project. Trying again does not help; please report it."""


_REFUSALS: dict[int, tuple[type[OmniloadError], str]] = {
    errno.ENOENT: (ConfigError, "correct the path"),
    errno.ENOTDIR: (ConfigError, "a part of the path is no folder; correct it"),
    errno.EISDIR: (ConfigError, "it is a folder; name a file"),
    errno.EEXIST: (ConfigError, "something else lies there; name another path, or remove it"),
    errno.ENOTEMPTY: (ConfigError, "it holds something; name another path"),
    errno.EACCES: (ConfigError, "get the rights to it, or name another path"),
    errno.EPERM: (ConfigError, "get the rights to it, or name another path"),
    errno.EROFS: (ConfigError, "nothing can be written there; name another path"),
    errno.ENAMETOOLONG: (ConfigError, "shorten it; a name has 255 bytes at most, a path 4,095"),
    errno.ELOOP: (ConfigError, "its links lead in a circle; name another path"),
    errno.ENXIO: (ConfigError, "it is a pipe or a device that nobody serves; name a file"),
    errno.ENODEV: (ConfigError, "it is a device that is not there; name a file"),
    errno.ENOTSUP: (ConfigError, "what is there cannot do it; name another path"),
    errno.EADDRINUSE: (ConfigError, "another process has the address; choose another"),
    errno.EADDRNOTAVAIL: (ConfigError, "this machine has no such address; choose another"),
    errno.ENOSPC: (UnavailableError, "free space there, or name another path"),
    errno.EDQUOT: (UnavailableError, "free some of the quota, or name another path"),
    errno.EFBIG: (UnavailableError, "raise the largest size of a file (ulimit -f)"),
    errno.EMFILE: (UnavailableError, "raise the number of open files (ulimit -n)"),
    errno.ENFILE: (UnavailableError, "the machine has too many open files; end some"),
    errno.EAGAIN: (UnavailableError, "raise the number of processes (ulimit -u), or end some"),
    errno.ENOMEM: (
        UnavailableError,
        "the machine has no memory left; end something, or ask for less",
    ),
    errno.EIO: (
        UnavailableError,
        "the disk or the store behind it fails; look at it, then try again",
    ),
    errno.ESTALE: (UnavailableError, "it was replaced behind this machine's back; try again"),
    errno.EBUSY: (UnavailableError, "another process uses it; end that, or try again"),
    errno.ETXTBSY: (UnavailableError, "another process runs it; end that, or try again"),
    errno.ENOTCONN: (UnavailableError, "what served it is gone; mount or start it again"),
    **dict.fromkeys(
        (
            *(errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
            *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN),
        ),
        (UnavailableError, "see whether it can be reached from here, then try again"),
    ),
}
"""Refusals of the system for outside reasons: the class of the error, and the remedy.

Any other number, such as ``EBADF`` or ``EINVAL``, comes from a wrong call, which is a fault of code.
"""


def system_refusal(error: OSError | MemoryError) -> OmniloadError | None:
    """Return a refusal of the system as an error of this project; ``None`` if the call itself was wrong."""
    # Numpy raises it too, with the requested size and shape.
    if isinstance(error, MemoryError):
        return UnavailableError(
            f"no memory is left ({error}); ask for less, such as a lower batch.tokens or "
            "runtime.prefetch_steps"
        )
    kind, remedy = _REFUSALS.get(error.errno or 0, (None, ""))
    if kind is None:
        return None
    named = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    where = " and ".join(
        name.decode(errors="replace") if isinstance(name, bytes) else name for name in named
    )
    said = error.strerror or type(error).__name__
    return kind(f"{where}: {said}; {remedy}" if where else f"{said}; {remedy}")


@contextmanager
def system_refusals(what: str) -> Iterator[None]:
    """Raise refusals of the system inside, such as a folder that cannot be created, as errors of this project.

    Args:
        what: Name of what is being done, such as ``the run's folder``, for messages.

    Raises:
        OmniloadError: The error from ``system_refusal``; any other error passes unchanged.
    """
    try:
        yield
    except OSError as error:
        refusal = system_refusal(error)
        if refusal is None:
            raise
        raise type(refusal)(f"{what}: {refusal}") from error


def shown_at_once(error: BaseException) -> None:
    """Drop our frames from the traceback of an error that explains itself, and from its causes.

    Otherwise some sixty lines stand above the message for the user. Errors raised in a user's own function, such as a
    transform or a strategy, keep its frames, and faults of ours, which are to be reported, keep all frames.
    """
    if not isinstance(error, OmniloadError) or isinstance(error, DefectError):
        return
    each: BaseException | None = error
    seen = set[int]()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = _of_others(each.__traceback__)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


class ShownAtOnce(ContextDecorator):
    """Shortens the traceback of an error that leaves a user's call; see ``shown_at_once``."""

    def __enter__(self) -> None:
        """Begin a call."""

    def __exit__(
        self, kind: object, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Drop our frames if an error leaves the call."""
        if error is not None:
            shown_at_once(error)


_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_OF_PYTHON = f"{Path(os.__file__).parent}{os.sep}"


def _of_others(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame that is neither ours nor Python's, such as that of a lock or a pool."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        is_of_python = file.startswith(_OF_PYTHON) and "site-packages" not in file
        if not (file.startswith(_OURS) or is_of_python):
            break
        frames = frames.tb_next
    return frames


def project_error(error: BaseException, role: str) -> OmniloadError:
    """Return an error in the form for callers: an error of this project, which crosses process boundaries.

    Args:
        error: The error that was raised.
        role: Name of the role in which it was raised, such as ``the planner``.

    Returns:
        The error itself if it is one of ours; the error from ``system_refusal`` if the system refused a file, a socket
        or memory; ``DefectError`` for any other, unforeseen error.
    """
    if isinstance(error, OmniloadError):
        return error
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError | MemoryError) and (refusal := system_refusal(error)):
        return type(refusal)(f"{role} was refused by the system: {refusal}")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return DefectError(
        f"a fault of omniload itself in {role}: {what}{place}; please report it with the log"
    )
