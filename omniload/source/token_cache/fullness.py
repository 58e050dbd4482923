"""How much of the sources of a mix a token cache holds."""

from dataclasses import dataclass
from pathlib import Path

from omniload.base.errors import UnavailableError
from omniload.mix.config import MixConfig
from omniload.source.formats.opening import open_format
from omniload.source.index import IndexCache
from omniload.source.token_cache.cache import SourceTokens, TokenCache, open_token_cache
from omniload.source.token_cache.names import why_not_kept
from omniload.source.transforms.opening import open_pipeline

__all__ = ["Fullness", "fullness_of_mix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fullness:
    """What is kept of a source."""

    source: str
    """Its name."""
    units: int
    """Units that hold records and whose tokens are kept once they are made; 0 where they never are."""
    kept: int
    """Units of which something is kept; whether it can be believed shows when it is read."""
    why: str
    """Why tokens of the source are not kept; empty where they are."""


def fullness_of_mix(
    mix: MixConfig, *, base_dir: Path, cache_dir: Path | None
) -> list[Fullness] | None:
    """Return how full the token cache of a mix is, by source; ``None`` where the mix has none.

    Raises:
        ConfigError: The key file is missing, or the store cannot be opened.
        UnavailableError: The place cannot be listed.
    """
    cache = open_token_cache(mix.loader.token_cache, mix.tokenizer, base_dir)
    if cache is None:
        return None
    try:
        return [_of_source(mix, name, cache, base_dir, cache_dir) for name in mix.names]
    except OSError as error:
        raise UnavailableError(
            f"loader.token_cache: {cache.location}: cannot be listed: {error}; runs go on without it, mend it or leave "
            "it out"
        ) from error


def _of_source(
    mix: MixConfig, name: str, cache: TokenCache, base_dir: Path, cache_dir: Path | None
) -> Fullness:
    config = mix.sources[name].using(mix.batch.columns_used)
    if why := why_not_kept(config):
        return Fullness(source=name, units=0, kept=0, why=why)
    index = IndexCache(folder=cache_dir, source=name) if cache_dir else None
    opened = open_format(name, config, base_dir=base_dir, cache=index)
    pipeline = open_pipeline(name, config, mix.tokenizer, base_dir, mix.pack.length, mix.seed)
    tokens = SourceTokens.of(
        cache,
        config,
        tokenizer=mix.tokenizer,
        pipeline_digest=pipeline.digest,
        opened=opened,
    )
    assert tokens is not None, "nothing speaks against it"
    filled = opened.format.units().rows_U > 0
    return Fullness(source=name, units=int(filled.sum()), kept=tokens.kept(), why="")
