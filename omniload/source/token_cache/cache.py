"""Tokens of text are made once: a write-through cache of the units of all sources of a process.

Nothing depends on it but time. An entry that is missing, torn, of another user or slow to come is a unit
whose text is decoded and tokenised as without a cache; samples and digests are the same.
"""

import hashlib
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError, IntegrityError, OmniloadError
from omniload.base.log import get_logger
from omniload.base.reading import read_small_file
from omniload.mix.config import SourceConfig, TokenizerConfig
from omniload.mix.runtime import TokenCacheConfig
from omniload.source.byte_pairs.files import content_of
from omniload.source.formats.opening import OpenFormat
from omniload.source.token_cache.entry import EncodedUnit, Seal, packed, unpacked
from omniload.source.token_cache.names import folder_of_source, names_of_units, why_not_kept
from omniload.source.token_cache.places import LocalPlace, Place, StorePlace

__all__ = ["SourceTokens", "TokenCache", "open_token_cache"]

_AWAY_S = 60.0
"""How long a place that failed is left alone: a source waits for its limit once, not for each unit."""
_LEAST_KEY_BYTES = 16
_MOST_KEY_BYTES = 4096
_LOG = get_logger(__name__)
_Answer = TypeVar("_Answer")


class TokenCache:
    """The entries of a place. Safe in threads."""

    def __init__(self, place: Place, seal: Seal, tokenizer_digest: str, clock: Clock) -> None:
        self.location = place.location
        """For people."""
        self.tokenizer_digest = tokenizer_digest
        """Of the tokenizer's file."""
        self.seal = seal
        """What its entries are checked by."""
        self._place, self._clock = place, clock
        self._lock = threading.Lock()
        self._away_until_s = 0.0
        self._told: set[str] = set()

    def get(self, path: str) -> EncodedUnit | None:
        """Return an entry; ``None`` where there is none that can be believed."""
        data = self._asked(lambda: self._place.read(path), path)
        if data is None:
            return None
        try:
            return unpacked(path, data, self.seal)
        except IntegrityError as error:
            self._tell("torn", f"{self.location}/{path}: {error}; made anew")
            return None

    def put(self, path: str, unit: EncodedUnit) -> bool:
        """Keep a unit; tell whether it is kept."""
        return bool(
            self._asked(lambda: self._place.write(path, packed(path, unit, self.seal)), path)
        )

    def names(self, folder: str) -> set[str]:
        """Return the names of the entries of a folder.

        Raises:
            OmniloadError: The store does not answer.
            OSError: It cannot be listed.
        """
        return self._place.names(folder)

    def _asked(self, call: Callable[[], _Answer], path: str) -> _Answer | None:
        """Ask the place, unless it failed a while ago; what fails is told once."""
        if self._clock.now_s() < self._away_until_s:
            return None
        try:
            return call()
        # What lies there is not to be believed; the place is well, and is asked for the next.
        except IntegrityError as error:
            self._tell("foreign", f"{self.location}/{path}: {error}; made anew")
        except (OmniloadError, OSError) as error:
            with self._lock:
                self._away_until_s = self._clock.now_s() + _AWAY_S
            self._tell(
                "away",
                f"{self.location}: {error}; going on without it, asking again every {_AWAY_S:g} s",
            )
        return None

    def _tell(self, kind: str, message: str) -> None:
        with self._lock:
            first = kind not in self._told
            self._told.add(kind)
        if first:
            _LOG.warning("the token cache at %s", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTokens:
    """The entries of one source."""

    cache: TokenCache
    folder: str
    names_U: Sequence[str]

    @classmethod
    def of(
        cls,
        cache: TokenCache | None,
        config: SourceConfig,
        *,
        tokenizer: TokenizerConfig | None,
        pipeline_digest: str,
        opened: OpenFormat,
    ) -> "SourceTokens | None":
        """Return the entries of a source; ``None`` where its tokens are not kept.

        Args:
            cache: Where they lie; ``None`` for nowhere.
            config: What the mix file says of the source.
            tokenizer: Tokenizer of the mix.
            pipeline_digest: Of the files that its transforms read.
            opened: Its units and their files.
        """
        if cache is None or why_not_kept(config):
            return None
        folder = folder_of_source(
            config,
            tokenizer=tokenizer,
            tokenizer_digest=cache.tokenizer_digest,
            pipeline_digest=pipeline_digest,
            seal=cache.seal.name,
        )
        names_U = names_of_units(
            opened.format.units(), opened.files, digests_all=opened.digests_all
        )
        return cls(cache=cache, folder=folder, names_U=names_U)

    def get(self, unit: int) -> EncodedUnit | None:
        """Return what is kept of a unit, if anything."""
        return self.cache.get(f"{self.folder}/{self.names_U[unit]}")

    def put(self, unit: int, made: EncodedUnit) -> bool:
        """Keep a unit; tell whether it is kept."""
        return self.cache.put(f"{self.folder}/{self.names_U[unit]}", made)

    def kept(self) -> int:
        """Return how many units there is something kept of; raises as ``TokenCache.names``."""
        there = self.cache.names(self.folder)
        return sum(name in there for name in self.names_U)


def open_token_cache(
    config: TokenCacheConfig | None,
    tokenizer: TokenizerConfig | None,
    base_dir: Path,
    clock: Clock | None = None,
) -> TokenCache | None:
    """Open what ``loader.token_cache`` names; ``None`` for none. No store is asked yet.

    Raises:
        ConfigError: The key file or the tokenizer is missing, or everybody may read the key.
    """
    if config is None:
        return None
    seal = Seal(
        _read_key(base_dir / Path(config.key_file).expanduser()) if config.key_file else b""
    )
    place: Place
    if config.is_url:
        place = StorePlace(config.path)
    else:
        root = base_dir / Path(config.path.removeprefix("file://")).expanduser()
        place = LocalPlace(root, limit_bytes=config.limit, shared=seal.has_key)
    # Of what the file holds: hosts that share a cache have it under paths and times of their own.
    digest = hashlib.blake2b(content_of(tokenizer, base_dir), digest_size=16).hexdigest()
    return TokenCache(place, seal, digest, clock or SystemClock())


def _read_key(path: Path) -> bytes:
    key = read_small_file(path, most_bytes=_MOST_KEY_BYTES, what="the key of a token cache")
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(
            f"loader.token_cache.key_file: {path}: holds {len(key)} bytes, and a key {_LEAST_KEY_BYTES} or more; "
            "write one with `openssl rand -hex 32`"
        )
    if path.stat().st_mode & stat.S_IROTH:
        raise ConfigError(
            f"loader.token_cache.key_file: {path}: every user of this machine may read it; chmod o-r {path}"
        )
    return key
