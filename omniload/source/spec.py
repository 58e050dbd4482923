"""What a source is opened with: one value, for whoever draws from it or only looks at it."""

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Self

from omniload.mix.config import MixConfig, SourceConfig, TokenizerConfig
from omniload.source.index import IndexCache

__all__ = ["SourceSpec"]


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source as a mix declares it, and the folders it is opened in."""

    name: str
    """Name in the mix; decides the order together with ``seed``."""
    config: SourceConfig
    """What the mix says of it."""
    _: KW_ONLY
    base_dir: Path
    """Folder that relative paths start at."""
    cache_dir: Path | None = None
    """Folder that keeps the index; ``None`` builds it each time."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of the mix; needed when the source holds text."""
    seed: int = 0
    """Seed of the mix."""
    row_length: int | None = None
    """Tokens of a row, which samples with images are cut to; ``None`` leaves them whole."""

    @classmethod
    def of(
        cls, mix: MixConfig, name: str, base_dir: Path, cache_dir: Path | None = None
    ) -> "SourceSpec":
        """Return a source of a mix with every column that it names, also those that no batch brings."""
        return cls(
            name,
            mix.sources[name],
            base_dir=base_dir,
            cache_dir=cache_dir,
            tokenizer=mix.tokenizer,
            seed=mix.seed,
            row_length=mix.pack.length,
        )

    @classmethod
    def drawn(
        cls, mix: MixConfig, name: str, base_dir: Path, cache_dir: Path | None = None
    ) -> "SourceSpec":
        """Return a source as a run draws from it: columns that no batch brings are not read."""
        spec = cls.of(mix, name, base_dir, cache_dir)
        return replace(spec, config=spec.config.using(mix.columns_used))

    @property
    def uncut(self) -> Self:
        """The same with its samples left whole, for whoever measures them."""
        return replace(self, row_length=None)

    @property
    def index_cache(self) -> IndexCache | None:
        """Where its index is kept; ``None`` for nowhere."""
        return (
            None if self.cache_dir is None else IndexCache(folder=self.cache_dir, source=self.name)
        )
