"""Tokens that are made before a run: the units in a token cache, and the shares of the missing units.

Shape suffixes:
    U  units of a source that have a record
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import UnavailableError
from omniload.source.formats.opening import open_format
from omniload.source.spec import SourceSpec
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.source_tokens import SourceTokens, why_not_kept
from omniload.source.transforms.opening import open_pipeline

__all__ = ["CachedUnits", "Stretch", "cached_units", "stretches_of"]

_NONE = np.empty(0, np.int64)
_LONGEST = 16
"""Most units of a stretch: with 4 MiB of text each, they take a core half a minute."""
_TURNS = 64
"""Fewest stretches of each share of a source, if it has as many units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedUnits:
    """The units of a source and their state in a token cache; empty for a source whose tokens are not cached."""

    source: str
    why: str = ""
    """Reason why the tokens of the source are not cached; empty if they are."""
    units_U: NDArray[np.int64] = field(default_factory=_NONE.copy)
    """Numbers of the units. Units without records are left out, because they have no cache entries."""
    shards_U: NDArray[np.int64] = field(default_factory=_NONE.copy)
    """Number of the shard of each unit, never falling."""
    is_kept_U: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Units of one shard whose tokens are made one after another, so that the shard is read sequentially."""

    source: str
    units: tuple[int, ...]


def cached_units(spec: SourceSpec, cache: TokenCache) -> CachedUnits:
    """Return the units of a source, and which of them are cached.

    Raises:
        OmniloadError: The source cannot be opened, or the cache cannot be listed.
    """
    if why := why_not_kept(spec.config):
        return CachedUnits(source=spec.name, why=why)
    opened = open_format(spec)
    tokens = SourceTokens.of(
        cache,
        spec.config,
        tokenizer=spec.tokenizer,
        pipeline_digest=open_pipeline(spec).digest,
        opened=opened,
    )
    assert tokens is not None, "nothing speaks against it"
    units = opened.format.units()
    units_U = np.flatnonzero(units.rows_U)
    try:
        there = cache.names(tokens.folder)
    except (OSError, UnavailableError) as error:
        raise UnavailableError(
            f"loader.token_cache: {cache.location}: cannot be listed: {error}; runs continue without it: repair it, "
            "or leave it out"
        ) from error
    return CachedUnits(
        source=spec.name,
        units_U=units_U,
        shards_U=units.shards_U[units_U],
        is_kept_U=np.fromiter(
            (tokens.names_U[unit] in there for unit in units_U.tolist()), np.bool_, len(units_U)
        ),
    )


def stretches_of(units: CachedUnits, number: int, of: int) -> Iterator[Stretch]:
    """Yield the missing units of a share, each once and in order.

    Shares are divided by all units, whatever is cached meanwhile. So hosts that make one share each, and begin at
    different times, leave no unit out.

    Args:
        units: Units of a source.
        number: Number of the share, from 0.
        of: Number of shares.
    """
    size = min(max(len(units.units_U) // (_TURNS * of), 1), _LONGEST)
    begins = np.flatnonzero(np.diff(units.shards_U, prepend=-1))
    stops = np.append(begins, len(units.units_U))[1:]
    cuts = [
        (at, min(at + size, stop))
        for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)
        for at in range(begin, stop, size)
    ]
    for begin, stop in cuts[number::of]:
        left = units.units_U[begin:stop][~units.is_kept_U[begin:stop]]
        if len(left):
            yield Stretch(source=units.source, units=tuple(left.tolist()))
