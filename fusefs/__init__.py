"""A striped POSIX filesystem over any store: large files are dealt over objects read and written in parallel.

The same namespace is reached through a mount (``omniload fs mount``) and, without one,
through fsspec (``omnifs://``). ``docs/design/fusefs/0010-fusefs-format.md`` gives the bytes on the store.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusefs.mounts.lifecycle import mount

__all__ = ["mount"]


def __getattr__(name: str) -> object:
    """Load public names lazily: a user of a store alone need not load the code of mounts."""
    if name == "mount":
        from fusefs.mounts.lifecycle import mount  # noqa: PLC0415

        return mount
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
