"""Names of parametrised tests: what a test is given, unless that is a whole text."""

from zlib import crc32

__all__ = ["LONGEST", "short_id", "too_long"]

LONGEST = 200
"""Letters between the brackets at most: they are in every log and report."""
_SHOWN = 40


def short_id(value: object) -> str | None:
    """Return how a test is named that is given a long text; ``None`` leaves it to pytest."""
    if not isinstance(value, str | bytes) or len(value) <= _SHOWN + 20:
        return None
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    head = value[:_SHOWN] if isinstance(value, str) else value[:_SHOWN].decode("latin-1")
    shown = head.encode("unicode_escape").decode("ascii")[:_SHOWN]
    # Two texts that begin alike are told apart.
    return f"{shown}... of {len(value):,}, {crc32(data):08x}"


def too_long(name: str) -> bool:
    """Tell whether a test is named by more than anybody reads."""
    return len(name.partition("[")[2]) > LONGEST + 1
