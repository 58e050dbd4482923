"""Paths that a settings file names: from the file's folder, from a home, or whole."""

import os
import sys
from pathlib import Path

from omniload.base.errors import ConfigError

__all__ = ["path_from", "unnamed", "why_no_text"]


def path_from(base_dir: Path, text: str, key: str) -> Path:
    """Return the path that a setting names; ``file://`` before it and ``~`` at its beginning are understood.

    Args:
        base_dir: The folder of the settings file.
        text: The setting.
        key: Its name, for messages.

    Raises:
        ConfigError: No file can have that name, or nobody has that home.
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
    """Return why this Python can name no file so, and the remedy; empty for any other error."""
    # In UTF-8 it names all but halves of surrogate pairs, which are refused as such.
    if not isinstance(error, UnicodeEncodeError) or error.encoding == "utf-8":
        return ""
    return f"it has {error.object[error.start]!r}, and {_taken_as(error.encoding)}"


def why_no_text(name: str, remedy: str) -> str:
    """Return why a name of a file, as the system gave it, is no text, and what to do about it.

    Args:
        name: The name, with halves of surrogate pairs.
        remedy: For one that is not UTF-8: of others Python is to be started otherwise.
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
