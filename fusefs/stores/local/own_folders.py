"""Modes of the folders that a local store makes: nobody else may list where objects lie, nor change anything."""

from fusefs.stores.local.beneath import umask
from fusefs.stores.protocol import RESERVED, TEMPORARY, is_at_or_below

__all__ = ["OBJECTS", "hidden_mode", "mode_of_new"]

OBJECTS = f"{RESERVED}/objects"
"""Folder of the objects."""
_TO_LIST, _TO_CHANGE = 0o004, 0o002


def mode_of_new(path: str) -> int:
    """Return the mode that a new folder is made with, before the mask of this process takes its part."""
    return _most(path, 0o777 & ~umask()) if is_at_or_below(path, RESERVED) else 0o777


def hidden_mode(path: str, mode: int) -> int:
    """Return what is left of the mode of a folder of fusefs itself, as far as others may not list it."""
    return mode & _most(path, mode)


def _most(path: str, allowed: int) -> int:
    """Return the most that a folder of fusefs itself allows.

    Where a group may write, since the store is shared so, it may list as well: its daemons do.
    """
    if not (is_at_or_below(path, OBJECTS) or is_at_or_below(path, TEMPORARY)):
        return 0o777 & ~_TO_CHANGE
    of_group = 0 if allowed & 0o020 else 0o040
    return 0o777 & ~(_TO_CHANGE | _TO_LIST | of_group)
