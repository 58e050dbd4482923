"""Differences between the mixes of two ranks that are to open one plane."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Self

from omniload.base.config import StrictModel
from omniload.base.secrets import with_urls_hidden
from omniload.mix.config import MixConfig

__all__ = ["MixValues"]

_NAMED = 3
"""Most keys named in a message."""
_MOST_LETTERS = 80
"""Most letters of a value quoted in a message."""


class MixValues(StrictModel):
    """The values of a mix and its settings that a rank may send to another, without the secrets in its URLs."""

    version: Literal[1] = 1
    values: dict[str, str]
    """Values by dotted key, such as ``sources.web.path``, in the order of the file; defaults are left out."""

    @classmethod
    def of(cls, mix: MixConfig) -> Self:
        """Return the values of a mix, without the listening address of each rank, which is the rank's own."""
        # Taken from the model and not from the file, because comments and the order of keys may differ between hosts.
        own = {"runtime": {"bind", "metrics_bind"}}
        said = mix.model_dump(mode="json", exclude=own, exclude_defaults=True)
        return cls(values={key: with_urls_hidden(repr(value)) for key, value in _leaves(said, "")})

    def said_beside(self, of_rank_0: "MixValues") -> str:
        """Return the first keys that differ, with both values: ``seed is 5, on rank 0 17``."""
        theirs = of_rank_0.values
        keys = dict.fromkeys((*self.values, *theirs))
        differ = [key for key in keys if self.values.get(key) != theirs.get(key)]
        if not differ:
            # Secrets are in neither set of values, and everything else is equal.
            return "in the order of its keys, or in what is secret, such as a password in a URL"
        said = [
            f"{key} is {_shown(self.values.get(key))}, on rank 0 {_shown(theirs.get(key))}"
            for key in differ[:_NAMED]
        ]
        more = len(differ) - _NAMED
        return "; ".join(said) + (f"; and {more:,} more keys differ" if more > 0 else "")


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield each value that contains no others, with the keys and indexes that lead to it."""
    below: Mapping[str, object] = {}
    if isinstance(value, Mapping):
        below = value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        below = {str(i): each for i, each in enumerate(value)}
    if not below and not isinstance(value, Mapping):
        yield key, value
    for name, inner in below.items():
        yield from _leaves(inner, f"{key}.{name}" if key else name)


def _shown(value: str | None) -> str:
    if value is None:
        return "not given"
    return value if len(value) <= _MOST_LETTERS else f"{value[: _MOST_LETTERS - 1]}…"
