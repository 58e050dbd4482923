"""Checks of a source that an edit adds, before the run draws from it; otherwise its first read could end the run."""

from collections.abc import Callable
from typing import TypeAlias

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.source.parts.sample_block import SampleBlock
from omniload.source.source import Source

__all__ = ["Look", "as_it_is", "gives_any", "require_samples"]

Look: TypeAlias = Callable[[Source, MixConfig], None]
"""Checks an opened source; raises an error if something is wrong with it."""
_FIRST = 64
"""Records that are decoded and tokenised."""
_FEW = 4_096
"""Largest source that is read whole if its first records give no sample, as in ``omniload mix check``; in records."""


def as_it_is(source: Source, mix: MixConfig) -> None:
    """Accept a source that the run draws from already."""


def require_samples(source: Source, mix: MixConfig) -> None:
    """Refuse a source whose first records cannot be decoded, or whose few records give no sample that fits.

    Raises:
        ConfigError: None of its records would ever be drawn.
        IntegrityError: A record cannot be decoded, and its source leaves out none.
    """
    config, records = mix.sources[source.name], source.positions_per_epoch
    if config.shuffle.method == "full" and records > _FEW:
        return  # decoding all of it would take longer than the user waits
    if gives_any(source.read(0, min(_FIRST, records)), mix, source.name):
        return
    if records > _FEW or config.may_end_empty:
        return
    if not gives_any(source.read(0, records), mix, source.name):
        raise ConfigError(
            f"sources.{source.name}: none of its {records:,} records gives a sample that fits pack.length "
            f"{mix.pack.length:,}; change overlong, its conditions, its transforms or its text key, then add it"
        )


def gives_any(block: SampleBlock, mix: MixConfig, name: str) -> bool:
    """Return whether the run would draw any sample of a block."""
    lengths_N = block.table.lengths_N
    if (mix.sources[name].overlong or mix.pack.overlong) == "drop":
        lengths_N = lengths_N[lengths_N <= mix.pack.length]
    return len(lengths_N) > 0
