"""The form in which an environment gets a snapshot, or keeps one.

::

    held in the requested form    mount: kept as it is    link, copy, command: kept if no file changed
    otherwise                     cleared, then placed in the first form that is possible on this machine
    no form is possible           the former snapshot is put back, and the restore fails
"""

import errno
from typing import Literal

from omniload.base.errors import UnavailableError
from snapshot.env.target.records import Form, Record

__all__ = [
    "Keeps",
    "RequestedForm",
    "form_to_put_back",
    "forms_of",
    "is_refusal",
    "kept_by",
    "mounts_first",
]

RequestedForm = Literal["auto", "mount", "link", "copy"]
"""Requested form; ``auto`` takes the first of the others that works."""
Keeps = Literal["as it is", "if sound", "no"]

# Errnos of a file system that has no links, or none to this place: another form may still be possible.
_NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EROFS, errno.EMLINK, errno.EOPNOTSUPP}
)


def forms_of(requested: RequestedForm) -> tuple[Form, ...]:
    """Return the forms to try, in order."""
    return ("mount", "link", "copy") if requested == "auto" else (requested,)


def mounts_first(requested: RequestedForm, *, is_root: bool) -> bool:
    """Return whether a tree is mounted without a look at its files."""
    # A mount is finished before the code that compares files would be loaded.
    return requested == "mount" or (requested == "auto" and is_root)


def kept_by(record: Record | None, key: str, requested: RequestedForm) -> Keeps:
    """Return whether an environment keeps its snapshot; a mount was found in place when its record was healed."""
    if record is None or record.key != key:
        return "no"
    # an installation cannot be undone, so no other form can replace it
    if record.form == "command":
        return "if sound"
    if requested not in ("auto", record.form):
        return "no"
    return "as it is" if record.form == "mount" else "if sound"


def form_to_put_back(record: Record | None, key: str) -> Form | None:
    """Return the form of files in which an environment held the same snapshot, if any."""
    if record is None or record.key != key or record.form not in ("link", "copy"):
        return None
    return record.form


def is_refusal(error: Exception) -> bool:
    """Return whether a form is impossible here, so that another may be tried; any other error is a failure."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_LINKS
    return isinstance(error, UnavailableError)
