"""The number of examples of a property: few in every run, and many in `make soak`."""

from hypothesis import settings

__all__ = ["few"]

_SAME = 16
"""Examples of the profile of every run, in tests/conftest.py."""


def few(count: int, soak: int) -> settings:
    """Return settings with ``count`` examples, the same in every run, or ``soak`` new ones under another profile."""
    return settings(max_examples=count if settings().max_examples == _SAME else soak)
