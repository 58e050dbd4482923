"""Looking for a shard among the files of a mix that no data plane has open."""

from pathlib import Path

from omniload.actors.heartbeats import Activity
from omniload.actors.roles.loader import LoaderShell
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import SkipShard
from omniload.mix.edits.shards import ShardsFound, shard_meant, shards_like
from omniload.source.formats.opening import shards_of

__all__ = ["shard_in"]


def shard_in(change: SkipShard, mix: MixConfig, base_dir: Path, cache_dir: Path) -> SkipShard:
    """Return the change with the shard that it means; of all sources files are listed, of those that have it opened.

    Raises:
        ConfigError: There is no such shard or source, or there are several shards.
        OmniloadError: A source cannot be listed, or opened.
    """
    names = [name for name in mix.names if change.source in (None, name)]
    with LimitedCalls("omniload-listing") as calls:
        listed = {
            name: [
                file.path
                for file in shards_of(name, mix.sources[name], base_dir=base_dir, calls=calls)
            ]
            for name in names
        }
    having = [name for name in names if shards_like(change, {name: listed[name]}).matches]
    if not having:
        return shard_meant(change, mix.names, [shards_like(change, listed)])
    shell = LoaderShell(
        mix,
        [mix.names.index(name) for name in having],
        base_dir=base_dir,
        cache_dir=cache_dir,
        activity=Activity("loader-0"),
    )
    try:
        found: ShardsFound = shell.look_for_shard(change)
    finally:
        shell.close()
    return shard_meant(change, mix.names, [found])
