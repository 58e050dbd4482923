"""Opens the token cache of ``loader.token_cache``: its place, its key, and the digest of its tokenizer."""

import hashlib
import stat
from pathlib import Path

from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError
from omniload.base.reading import read_small_file
from omniload.base.settings.paths import path_from
from omniload.mix.config import TokenizerConfig
from omniload.mix.runtime import TokenCacheConfig
from omniload.source.byte_pairs.files import content_of
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.entry import Seal
from omniload.source.token_cache.places import LocalPlace, Place, StorePlace

__all__ = ["open_token_cache"]

_LEAST_KEY_BYTES = 16
_MOST_KEY_BYTES = 4096


def open_token_cache(
    config: TokenCacheConfig | None,
    tokenizer: TokenizerConfig | None,
    base_dir: Path,
    clock: Clock | None = None,
) -> TokenCache | None:
    """Open the cache of ``loader.token_cache``; ``None`` if there is none. No store is accessed yet.

    Raises:
        ConfigError: The key file or the tokenizer is missing, or every user may read the key.
    """
    if config is None:
        return None
    seal = Seal(
        _read_key(path_from(base_dir, config.key_file, "loader.token_cache.key_file"))
        if config.key_file
        else b""
    )
    place: Place
    if config.is_url:
        place = StorePlace(config.path)
    else:
        root = path_from(base_dir, config.path, "loader.token_cache.path")
        place = LocalPlace(root, limit_bytes=config.limit, shared=seal.has_key)
    # A digest of the content, because hosts that share a cache have the file at other paths and with other times.
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
