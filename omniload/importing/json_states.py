"""States of other tools' loaders, written as JSON: pickles of such tools are never loaded."""

import json
from pathlib import Path

from omniload.base.errors import StateError
from omniload.base.reading import read_small_file

__all__ = ["read_json_state"]


def read_json_state(path: Path, *, most_bytes: int, what: str, remedy: str) -> object:
    """Read a state that was written as JSON.

    Args:
        path: The file.
        most_bytes: Largest size of a state of the tool.
        what: Name of the state, for messages.
        remedy: How to write the state as JSON.

    Raises:
        ConfigError: There is no such file, or it is too large.
        StateError: The file is a pickle, which is not loaded, or not valid JSON.
    """
    content = read_small_file(path, most_bytes=most_bytes, what=what)
    # The first bytes of pickles from protocol 2 on, and of the archives that torch writes since 1.6.
    if content[:1] == b"\x80" or content[:2] == b"PK":
        raise StateError(
            f"{path}: is a pickle, as torch.save writes it, which is never loaded; {remedy}"
        )
    try:
        found: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: is no JSON ({error!s:.100}); {remedy}") from error
    return found
