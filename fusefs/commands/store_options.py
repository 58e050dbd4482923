"""Options of a verb that reads a store instead of a mount: its URL, paths in it, and the disk cache for it."""

from collections.abc import Callable, Mapping

import click

from fusefs.config import FilesConfig
from fusefs.stores.protocol import checked_path
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import open_store
from fusefs.tools.prefetch import with_disk_cache
from fusefs.tree.namespace import StripedFiles
from omniload.base.config import load_yaml
from omniload.base.errors import ConfigError

__all__ = ["cache_options", "in_store", "opened", "opened_with_cache", "require_store"]


def cache_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a store and its disk cache instead of a mount."""
    options = (
        click.option("--store", help="Store that contains PATHS; not needed on a mount."),
        click.option("--disk-cache", help="With --store: directory of the disk cache."),
        click.option("--capacity", help="Largest size of the disk cache; 64GiB by default."),
        click.option(
            "-c",
            "--config",
            type=click.Path(exists=True, dir_okay=False),
            help="With --store: YAML file with settings under files.",
        ),
    )
    for option in options:
        verb = option(verb)
    return verb


def require_store(store: str | None, cache: Mapping[str, str | None]) -> None:
    """Refuse settings of a cache for a path on a mount, which has its own."""
    given = [f"--{name.replace('_', '-')}" for name, value in cache.items() if value is not None]
    if store is None and given:
        raise ConfigError(
            f"{', '.join(given)} goes with --store only: a mount has the cache it was mounted with"
        )


def in_store(path: str) -> str:
    """Return a path within a store.

    Raises:
        ConfigError: It leads out of the store.
    """
    try:
        return checked_path(path)
    except ValueError as error:
        raise ConfigError(f"{error} from the root of the store") from error


def opened(store: str, config: FilesConfig | None = None) -> StripedFiles:
    """Open the files of a store; the caller closes them."""
    return StripedFiles(RetryingStore(open_store(store)), config)


def opened_with_cache(
    store: str, *, disk_cache: str | None, capacity: str | None, config: str | None
) -> StripedFiles:
    """Open the files of a store over a disk cache, both given by ``cache_options``."""
    known = load_yaml(config, FilesConfig) if config is not None else FilesConfig()
    return opened(store, with_disk_cache(known, disk_cache, capacity))
