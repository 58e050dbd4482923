"""Functions that installed distributions register by name: a mix file names a function, never a module.

The installer of a package vouches for it, and the author of a file chooses among the installed functions.
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
"""Failures of code that is not ours; ``sys.exit`` in a thread would end only that thread, silently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A registered function and its distribution."""

    name: str
    """Name under which it is registered."""
    function: Callable[..., Any]
    distribution: str
    """Installed distribution and its version, such as ``lab 1.2.0``."""


# Cached, because a search through the metadata of all installed distributions takes tens of milliseconds.
@cache
def registered(group: str, name: str, built_in: Iterable[str] = ()) -> Registered:
    """Return the function that an installed distribution registers under ``name``.

    Args:
        group: Group of entry points.
        name: The name.
        built_in: Names that need no registration, for messages.

    Raises:
        ConfigError: No function is registered, several are, or the function cannot be imported.
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
    # Raised during the import, so it is not a fault of ours.
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
