"""Faults of a mix file as a user is told them: behind the line to change, and all of them at once."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from omniload.base.config import line_of
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)

__all__ = ["key_of_message", "of_source", "outcome_of", "raise_together", "with_line"]

_GRAVITY = (IntegrityError, ConfigError, StateError, UnavailableError, OmniloadError)
"""Errors of which the first is the least likely to go away by itself."""

Found = TypeVar("Found")


def with_line(said: str, at: Sequence[str], file: Path | None) -> str:
    """Put the file and the line of a key ahead of what is said of it."""
    line = None if file is None else line_of(file, *at)
    return said if line is None else f"{file}:{line}: {said}"


def key_of_message(said: str, source: str) -> tuple[str, ...]:
    """Return the key of the mix file that is to be changed, which a message on a source begins with."""
    key = f"sources.{source}"
    below = said.removeprefix(f"{key}.").partition(":")[0] if said.startswith(f"{key}.") else ""
    return ("sources", source, below) if below.isidentifier() else ("sources", source)


def of_source(
    result: Found | OmniloadError, source: str, file: Path | None
) -> Found | OmniloadError:
    """Say of an error whose source it is, where its message names a file only, and the line of the key to change."""
    if not isinstance(result, OmniloadError):
        return result
    key, said = f"sources.{source}", str(result)
    if key not in said:
        said = f"{key}: {said}"
    named = type(result)(with_line(said, key_of_message(said, source), file))
    # Its cause stays at hand: a fault of the tokenizer, which many sources raise, is known by it and told once.
    named.__cause__ = result
    return named


def outcome_of(check: Callable[[], Found], file: Path | None = None) -> Found | OmniloadError:
    """Return what ``check`` returns, or the error it raises: behind the line in ``file`` of the key it begins with."""
    try:
        return check()
    except OmniloadError as error:
        key = re.match(r"\w+\.\w+", str(error)) if file else None
        return type(error)(with_line(str(error), key[0].split("."), file)) if key else error


def raise_together(errors: Sequence[OmniloadError]) -> None:
    """Raise what was found wrong as one error, each message on a line of its own.

    Its class is that of the error that is least likely to go away by itself.
    """
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    gravest = min(errors, key=lambda error: _GRAVITY.index(type(error)))
    raise type(gravest)("\n".join(str(error) for error in errors)) from gravest
