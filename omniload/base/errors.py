"""The exception tree. Each class tells the caller what to do next.

::

    OmniloadError
    +-- ConfigError        fix the input                      exit 2
    +-- UnavailableError   try again, perhaps elsewhere       exit 3
    +-- StateError         the saved state does not fit       exit 4
    +-- IntegrityError     stop; never retried nor skipped    exit 5

Every message names the thing, the value found, the limit and the remedy. Errors
hold one string, so they cross process boundaries unchanged.
"""

__all__ = ["ConfigError", "IntegrityError", "OmniloadError", "StateError", "UnavailableError"]


class OmniloadError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)


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
