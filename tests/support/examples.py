"""How many examples of a property there are: few in every run, and many in `make soak`."""

from hypothesis import settings

__all__ = ["few"]

_SAME = 16
"""Examples of the profile of every run, in tests/conftest.py."""


def few(count: int, soak: int) -> settings:
    """Return settings of ``count`` examples, the same in every run; of ``soak``, drawn anew, under another profile."""
    return settings(max_examples=count if settings().max_examples == _SAME else soak)
