"""The exception tree. Each class tells the caller what to do next.

::

    OmniloadError
    +-- ConfigError        fix the input                      exit 2
    +-- UnavailableError   try again, perhaps elsewhere       exit 3
    +-- StateError         the saved state does not fit       exit 4
    +-- IntegrityError     stop; never retried nor skipped    exit 5
    +-- DefectError        report it: the fault is ours       exit 1

Every message names the thing, the value found, the limit and the remedy. Errors
hold one string, so they cross process boundaries unchanged; no secret is in it (``omniload.base.secrets``).
"""

import traceback

from omniload.base.secrets import without_secrets

__all__ = [
    "ConfigError",
    "DefectError",
    "IntegrityError",
    "OmniloadError",
    "StateError",
    "UnavailableError",
    "project_error",
]


class OmniloadError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))


class ConfigError(OmniloadError):
    """What the user wrote cannot be carried out."""

    exit_code = 2


class UnavailableError(OmniloadError):
    """Something outside did not answer; the same call may succeed later."""

    exit_code = 3


class StateError(OmniloadError):
    """A saved or running state does not fit what is asked of it."""

    exit_code = 4


class IntegrityError(OmniloadError):
    """Bytes or samples are not what was promised. Never retried, never skipped."""

    exit_code = 5


class DefectError(OmniloadError):
    """A fault of this project itself. Trying again is no remedy; a report is."""


def project_error(error: BaseException, role: str) -> OmniloadError:
    """Return an error as callers get it: one of this project, which crosses process boundaries.

    Args:
        error: What was raised.
        role: Where, such as ``the planner``.

    Returns:
        The error itself where it is one of ours; ``UnavailableError`` where the system refused
        a file, a socket or memory; ``DefectError`` for any other, which nobody foresaw.
    """
    if isinstance(error, OmniloadError):
        return error
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return UnavailableError(f"{role} was refused by the system: {what}")
    if isinstance(error, MemoryError):
        return UnavailableError(
            f"{role} has no memory left ({what}); lower batch.tokens or runtime.prefetch_steps"
        )
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return DefectError(
        f"a fault of omniload itself in {role}: {what}{place}; please report it with the log"
    )
