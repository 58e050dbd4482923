"""Names of sources, as somebody says them who changes a mix."""

import difflib
from collections.abc import Iterable, Sequence

from omniload.base.errors import ConfigError

__all__ = ["require_known"]

_SHOWN = 12


def require_known(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a source that the mix does not have.

    Raises:
        ConfigError: Naming it, and the one that may be meant.
    """
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(
                f"source {name!r} is not in the mix{meant}, which has {', '.join(known[:_SHOWN])}; "
                "correct the name, or add the source with `omniload mix add`"
            )
