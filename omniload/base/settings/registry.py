"""What installed distributions register by name: a mix file names a function, never a module.

Whoever installs a package vouches for it; whoever writes a file chooses among what is installed.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

from omniload.base.errors import ConfigError

__all__ = ["FAILURES", "Registered", "registered"]

FAILURES = (Exception, SystemExit)
"""What a stranger's code may come to; ``sys.exit`` in a thread would end that alone, without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A function, and whose it is."""

    name: str
    """As it is registered."""
    function: Callable[..., Any]
    distribution: str
    """What was installed, and its version, as ``lab 1.2.0``."""


# Kept: a look through the metadata of all that is installed takes tens of milliseconds.
@cache
def registered(group: str, name: str, built_in: Iterable[str] = ()) -> Registered:
    """Return the function that an installed distribution registers under ``name``.

    Args:
        group: Group of entry points.
        name: The name.
        built_in: Names that need no registering, for messages.

    Raises:
        ConfigError: None is registered, several are, or it cannot be imported.
    """
    found = [point for point in entry_points(group=group) if point.name == name]
    if len(found) != 1:
        known = sorted({point.name for point in entry_points(group=group)})
        count = "no" if not found else str(len(found))
        ours = f"built in: {sorted(built_in)}, " if built_in else ""
        near = () if found else difflib.get_close_matches(name, {*built_in, *known}, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{count} installed distributions register {name!r} under the entry points {group!r}; "
            f"{meant}{ours}registered: {known}"
        )
    (point,) = found
    try:
        function = point.load()
    # As it is imported, and no fault of ours.
    except FAILURES as error:
        raise ConfigError(
            f"{name!r} of the entry points {group!r} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{name!r} of the entry points {group!r} ({point.value}) is {type(function).__name__}, not a function"
        )
    assert point.dist is not None, "it was found in an installed distribution"
    return Registered(
        name=name,
        function=cast("Callable[..., Any]", function),
        distribution=f"{point.dist.name} {point.dist.version}",
    )
