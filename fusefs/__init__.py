"""A striped POSIX filesystem over any store: large files are dealt over objects read and written in parallel.

The same namespace is reached through a mount (``omniload fs mount``) and, without one,
through fsspec (``omnifs://``). ``docs/design/0010-fusefs-format.md`` gives the bytes on the store.
"""

from fusefs.mounting import mount

__all__ = ["mount"]
