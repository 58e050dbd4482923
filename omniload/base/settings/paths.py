"""Paths in a settings file: relative to the file's folder, relative to a home, or absolute."""

import os
import sys
from pathlib import Path

from omniload.base.errors import ConfigError

__all__ = ["path_from", "unnamed", "why_no_text"]


def path_from(base_dir: Path, text: str, key: str) -> Path:
    """Return the path of a setting, with an optional ``file://`` prefix and ``~`` resolved.

    Args:
        base_dir: The folder of the settings file.
        text: The setting.
        key: Its name, for messages.

    Raises:
        ConfigError: No file can have that name, or there is no home of that user.
    """
    shown = repr(text[:100])
    if "\0" in text:
        raise ConfigError(f"{key} is {shown}, and no name of a file holds a zero byte; correct it")
    try:
        return base_dir / Path(text.removeprefix("file://")).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{key} is {shown}, and no user of that name has a home here; write the folder out"
        ) from error


def unnamed(error: Exception) -> str:
    """Return why this Python cannot represent a file name, and the remedy; empty for any other error."""
    # UTF-8 can encode everything except halves of surrogate pairs, which are refused elsewhere.
    if not isinstance(error, UnicodeEncodeError) or error.encoding == "utf-8":
        return ""
    return f"it has {error.object[error.start]!r}, and {_taken_as(error.encoding)}"


def why_no_text(name: str, remedy: str) -> str:
    """Return why a file name, as given by the system, is not valid text, and what to do about it.

    Args:
        name: The name, with halves of surrogate pairs.
        remedy: Remedy for a name that is not UTF-8; for other names, Python has to be started differently.
    """
    try:
        os.fsencode(name).decode()
    except UnicodeError:
        return f"is not UTF-8; {remedy}"
    return f"is UTF-8, and {_taken_as(sys.getfilesystemencoding())}"


def _taken_as(encoding: str) -> str:
    return (
        f"this Python takes names of files as {encoding}; start it with PYTHONUTF8=1, or with a locale of UTF-8 such "
        "as LC_ALL=C.UTF-8"
    )
