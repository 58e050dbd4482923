"""Names of parametrised tests: the parameters themselves, unless a parameter is a whole text."""

from collections.abc import Iterable
from zlib import crc32

import pytest

__all__ = ["LONGEST", "refuse_long", "short_id"]

LONGEST = 200
"""Most letters between the brackets, because they are in every log and report."""
_SHOWN = 40


def short_id(value: object) -> str | None:
    """Return the name of a test for a long parameter; ``None`` leaves the name to pytest."""
    if not isinstance(value, str | bytes) or len(value) <= _SHOWN + 20:
        return None
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    head = value[:_SHOWN] if isinstance(value, str) else value[:_SHOWN].decode("latin-1")
    shown = head.encode("unicode_escape").decode("ascii")[:_SHOWN]
    # The checksum distinguishes two texts that begin alike.
    return f"{shown}... of {len(value):,}, {crc32(data):08x}"


def refuse_long(items: Iterable[pytest.Item]) -> None:
    """Refuse tests whose own ids are too long to read.

    Raises:
        UsageError: There are such tests; none is run.
    """
    named = [item.nodeid for item in items if len(item.name.partition("[")[2]) > LONGEST + 1]
    if named:
        raise pytest.UsageError(
            f"{len(named)} tests have names of more than {LONGEST} letters between brackets; give them ids, such as "
            f"short_id gives: {named[0][:LONGEST]}"
        )
