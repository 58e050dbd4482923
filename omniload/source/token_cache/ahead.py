"""Tokens that are made before a run: which units of a source are in a token cache, and who makes which of the others.

Shape suffixes:
    U  units of a source that hold a record
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
"""Units of a stretch at most: of 4 MiB of text each they take a core half a minute."""
_TURNS = 64
"""Stretches that a share of a source has at least, where it has as many units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedUnits:
    """The units of a source, as a token cache has them; of one whose tokens are not kept none."""

    source: str
    why: str = ""
    """Why its tokens are not kept; empty where they are."""
    units_U: NDArray[np.int64] = field(default_factory=_NONE.copy)
    """Numbers of the units. Of one without records nothing is ever kept."""
    shards_U: NDArray[np.int64] = field(default_factory=_NONE.copy)
    """Number of the shard of each; never falling."""
    is_kept_U: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Units of one shard whose tokens are made one after the other, as a shard is read on."""

    source: str
    units: tuple[int, ...]


def cached_units(spec: SourceSpec, cache: TokenCache) -> CachedUnits:
    """Return the units of a source, and which of them are kept.

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
            f"loader.token_cache: {cache.location}: cannot be listed: {error}; runs go on without it, mend it or leave "
            "it out"
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
    """Yield the units of a share that are not kept, each once and in order.

    Shares are cut by all units, whatever is kept meanwhile: hosts that make a share each, and begin at different
    moments, leave none out.

    Args:
        units: Those of a source.
        number: Of the share, from 0.
        of: Shares that there are.
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
