"""Paths that a settings file names: from the file's folder, from a home, or whole."""

from pathlib import Path

from omniload.base.errors import ConfigError

__all__ = ["path_from"]


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
