"""Digests of files and source trees by their content, never by their times."""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.base.reading import kind_of

__all__ = ["digest_of", "file_digest"]

# Builds do not read these folders, and they change by themselves, so each start would have another key.
_PASSED_OVER = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".tox", ".nox", "node_modules"}
    | {".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".eggs", ".omniload-env"}
)


def file_digest(path: str | Path) -> bytes:
    """Return the SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def digest_of(path: str | Path) -> str:
    """Return a digest of a file, or of a source tree: names, execute bits, links and contents.

    Folders without sources (version control, caches, byte code, ``*.egg-info``) are
    left out, because the installation of an editable source would change them.

    Raises:
        ConfigError: Nothing is there, or no file and no folder, or it cannot be read.
    """
    root = Path(path)
    try:
        mode = root.stat().st_mode
        if stat.S_ISDIR(mode):
            total = hashlib.sha256()
            for line in _tree_lines(root):
                total.update(line)
            return f"tree:{total.hexdigest()}"
        if not stat.S_ISREG(mode):
            # Reading a pipe would wait, and take its content away from the command.
            raise ConfigError(f"{path}: an input that is {kind_of(mode)}; name a file or a folder")
        return f"file:{file_digest(root).hex()}"
    except OSError as error:
        raise ConfigError(f"{path}: an input that cannot be read: {error.strerror}") from error


def _tree_lines(root: Path) -> Iterator[bytes]:
    for folder, folders, files in os.walk(root, onerror=_refused):
        folders[:] = sorted(
            name for name in folders if name not in _PASSED_OVER and not name.endswith(".egg-info")
        )
        for name in sorted([*files, *(f for f in folders if (Path(folder) / f).is_symlink())]):
            path = Path(folder) / name
            shown = os.fsencode(path.relative_to(root))
            if path.is_symlink():
                yield b"link\0%s\0%s\0" % (shown, os.fsencode(path.readlink()))
            elif path.is_file():
                # Hash the mode, not the rights of the user: root may run files that others may not.
                runs = b"x" if path.stat().st_mode & 0o111 else b"-"
                yield b"file\0%s\0%s\0%s\0" % (shown, runs, file_digest(path))


def _refused(error: OSError) -> None:
    """Make ``os.walk`` fail at a folder that cannot be read, which it would skip."""
    raise error
