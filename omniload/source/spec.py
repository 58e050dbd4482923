"""The parameters that a source is opened with, both for drawing samples and for inspecting the source."""

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Self

from omniload.mix.config import MixConfig, SourceConfig, TokenizerConfig
from omniload.source.index import IndexCache

__all__ = ["SourceSpec"]


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source as a mix declares it, and the folders that it uses."""

    name: str
    """Name in the mix; decides the order together with ``seed``."""
    config: SourceConfig
    """The entry of the source in the mix."""
    _: KW_ONLY
    base_dir: Path
    """Folder that relative paths start from."""
    cache_dir: Path | None = None
    """Folder that keeps the index; with ``None`` the index is built each time."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of the mix; needed if the source has text."""
    seed: int = 0
    """Seed of the mix."""
    row_length: int | None = None
    """Tokens per row; samples with images are cut to this length. ``None`` leaves them whole."""

    @classmethod
    def of(
        cls, mix: MixConfig, name: str, base_dir: Path, cache_dir: Path | None = None
    ) -> "SourceSpec":
        """Return a source of a mix with all columns that it names, including columns that no batch contains."""
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
        """Return a source as a run draws from it: columns that no batch contains are not read."""
        spec = cls.of(mix, name, base_dir, cache_dir)
        return replace(spec, config=spec.config.using(mix.columns_used))

    @property
    def uncut(self) -> Self:
        """Return the same source with uncut samples, for measurements of their lengths."""
        return replace(self, row_length=None)

    @property
    def index_cache(self) -> IndexCache | None:
        """The place where the index is kept; ``None`` if it is kept nowhere."""
        return (
            None if self.cache_dir is None else IndexCache(folder=self.cache_dir, source=self.name)
        )
