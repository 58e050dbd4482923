"""``omniload mix check``: whether a mix file is valid, and whether everything it names exists."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.text import Text

from omniload.base.errors import ConfigError, OmniloadError, UnavailableError
from omniload.base.linux.network import listening_address
from omniload.base.settings.paths import path_from
from omniload.base.units import counted, format_bytes
from omniload.commands.display import Cell, FittedTable, colour_of, emit_json, output, say, table
from omniload.commands.faults import (
    bears_none,
    doubts_of_tokenizer,
    held_out_of_nothing,
    joined_without_an_end,
    key_of_message,
    read_alike,
    said_of_dropped,
    sources_in_silence,
    with_line,
)
from omniload.commands.mix_tables import (
    MOST_ROWS,
    bounded,
    said_of_files,
    said_of_step,
    shares_at,
    shares_table,
    sorted_files,
    stages_by_epochs_json,
)
from omniload.commands.opening import find_sources, open_spec, tokenizer_of
from omniload.commands.options import (
    cache_option,
    dp_option,
    json_option,
    mix_argument,
    store_option,
)
from omniload.mix.config import MixConfig
from omniload.mix.edits.history import History
from omniload.mix.journal.place import require_store
from omniload.mix.schedule import boundaries
from omniload.plan.forecast.forecast import warnings_of_a_step
from omniload.plan.forecast.sizes import SourceSizes
from omniload.plan.strategies import doubts_of_balance
from omniload.source.formats.opening import shards_of
from omniload.source.kept_findings import FoundSource
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import shard_cache_of
from omniload.source.token_cache.ahead import cached_units
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.opening import open_token_cache

__all__ = ["check"]

_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fullness:
    """Tokens of a source that are cached."""

    source: str
    """Name of the source."""
    units: int
    """Units that contain records and whose tokens are cached once they are made; 0 if they never are."""
    kept: int
    """Units with cached tokens; only a read shows whether the tokens are valid."""
    why: str
    """Why tokens of the source are not cached; empty if they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptShards:
    """Content of a shard cache on this machine."""

    path: str
    """Folder of the cache."""
    limit: int
    """Most bytes that the cache takes."""
    held: int
    """Bytes that the cache takes now, for this mix and others."""
    shards: int
    """Shards on stores that may be cached."""
    kept: int
    """Shards of which a part is cached."""
    size_bytes: int
    """Bytes of all shards that may be cached."""
    kept_bytes: int
    """Bytes of them that are cached; only a read shows whether they are sound."""
    never: dict[str, str]
    """Sources with shards on stores that are never cached, and why."""

    def said(self) -> str:
        """Return the content as a line."""
        left = "".join(
            f"; never of {name} ({why})" for name, why in list(self.never.items())[:_NAMED]
        )
        more = f" and {len(self.never) - _NAMED} more" if len(self.never) > _NAMED else ""
        return (
            f"shard cache: {self.path} takes {format_bytes(self.held)} of {format_bytes(self.limit)}; of this mix "
            f"{format_bytes(self.kept_bytes)} of {format_bytes(self.size_bytes)} are kept, in {self.kept:,} of "
            f"{counted(self.shards, 'shard')}{left}{more}"
        )


@click.command
@mix_argument
@dp_option
@cache_option
@json_option
@click.option("--all-faults", is_flag=True, help="Report every fault, not only the first 50.")
@store_option
def check(
    file: Path,
    *,
    dp: int,
    cache_dir: Path | None,
    as_json: bool,
    all_faults: bool,
    store_timeout: float,
) -> None:
    """Check a mix file and everything it names: files, footers, tokenizer, batch.

    All faults are reported together. The first records of every source, and of seven more of its files, are decoded;
    the result is reused until the files, the settings or the tokenizer change. The command writes only this result and
    the indexes of the sources, both in the cache folder.

    \b
    Example:
      omniload mix check examples/quickstart.yaml --dp 2
    """  # noqa: D301 -- click's own marker
    spec = open_spec(file, dp=dp, cache_dir=cache_dir, all_faults=all_faults or as_json)
    mix = spec.mix
    # This comes before the sources, which may take minutes, so that a missing store is reported immediately.
    doubts = _look_for_places(mix, spec.base_dir, lambda said, *at: with_line(said, at, file))
    found = find_sources(spec, file, sources_in_silence(mix, store_timeout, file))
    warnings = _warnings(mix, found, doubts, file)
    said_of = doubts_of_tokenizer(mix, tokenizer_of(mix.tokenizer, spec.base_dir))
    warnings += [with_line(said, ("tokenizer",), file) for said in said_of]
    tokens = _fullness_of_mix(mix, base_dir=spec.base_dir, cache_dir=spec.cache_dir)
    shards = _shards_kept(mix, spec.base_dir)
    if as_json:
        emit_json(
            {
                "file": str(file),
                "dp": dp,
                "rows_per_step": mix.rows_per_step,
                "sources": [asdict(source) for source in found],
                "warnings": warnings,
                "token_cache": None if tokens is None else [asdict(each) for each in tokens],
                "shard_cache": None if shards is None else asdict(shards),
                "shares": [
                    {"step": step, "shares": shares_at(mix, step)} for step in boundaries(mix)
                ],
                "stages_by_epochs": stages_by_epochs_json(History(mix)),
            }
        )
        return
    console = output()
    console.print(_sources_table(found))
    console.print(shares_table(mix))
    say(console, said_of_files(found))
    if dropped := said_of_dropped(mix, found, file):
        say(console, dropped)
    if tokens is not None:
        say(console, _said_of_tokens(tokens))
    if shards is not None:
        say(console, shards.said())
    say(console, f"{file}: valid; a step is {said_of_step(mix, dp)}")
    for warning in warnings:
        say(console, f"warning: {warning}", "yellow")


def _warnings(
    mix: MixConfig, found: Sequence[FoundSource], places: Sequence[str], file: Path
) -> list[str]:
    """Return warnings about a mix; those about places other than its sources come first."""
    doubts = [*places]
    doubts += [
        with_line(said, key_of_message(said, source.name), file)
        for source in found
        for said in source.doubts
    ]
    doubts += [with_line(said, ("splits",), file) for said in held_out_of_nothing(mix, found)]
    doubts += [with_line(said, ("tokenizer",), file) for said in joined_without_an_end(mix)]
    doubts += [
        with_line(said, key_of_message(said, name), file)
        for name, said in (*bears_none(mix, found), *read_alike(mix))
    ]
    doubts += [with_line(said, ("balance",), file) for said in doubts_of_balance(mix)]
    doubts += warnings_of_a_step(mix, _sizes(mix, found))
    doubts += sorted_files(mix, {source.name: source.differences for source in found})
    return doubts


def _look_for_places(mix: MixConfig, base_dir: Path, said_of: Callable[..., str]) -> list[str]:
    """Look for the places that a mix names in addition to its sources: stores, folders and interfaces.

    A store that does not exist is a fault of the file. A place that differs on each host, or that may answer later,
    only causes a warning, because the file may be right for the hosts of the run.

    Args:
        mix: The mix.
        base_dir: Folder that relative paths start at.
        said_of: Puts the file and the line of a key before a message.

    Returns:
        Warnings, one sentence each.

    Raises:
        OmniloadError: All faults that exist wherever the run is.
    """
    warnings: list[str] = []
    if url := mix.runtime.journal:
        at = ("runtime", "journal")
        try:
            require_store(url)
        except UnavailableError as error:
            warnings.append(said_of(f"runtime.journal: does not answer now: {error}", *at))
        except OmniloadError as error:
            # Whatever the class of the error, the checked file must be changed.
            raise ConfigError(said_of(f"runtime.journal: {error}", *at)) from error
    for key in ("bind", "metrics_bind"):
        bind = str(getattr(mix.runtime, key))
        # torchrun sets this variable; auto means the interface that leads to its address.
        toward = os.environ.get("MASTER_ADDR")
        if bind == "auto" and not toward:
            continue  # the launcher of the run sets the variable
        try:
            listening_address(bind, setting=f"runtime.{key}", toward=toward)
        except ConfigError as error:
            said = f"{error}; as it is, the run must be on hosts that have it"
            warnings.append(said_of(said, "runtime", key))
    if (shards := shard_cache_of(mix.loader.shard_cache, base_dir)) is not None:
        try:
            with suppress(FileNotFoundError):  # a run creates the folder
                shards.directory.require_ours()
        except (OmniloadError, OSError) as error:
            found = (
                f"{shards.directory.root} is no folder; name another path"
                if isinstance(error, NotADirectoryError)
                else error
            )
            said = f"loader.shard_cache: {found}; as it is, runs on this host read every shard from its store"
            warnings.append(said_of(said, "loader", "shard_cache"))
    if mix.loader.spill and not (folder := base_dir / mix.loader.spill).is_dir():
        said = f"loader.spill: {folder} is no folder here; make it on every host of the run, or name another"
        warnings.append(said_of(said, "loader", "spill"))
    warnings += [said_of(said, "loader", "token_cache") for said in _not_kept(mix, base_dir)]
    return warnings


def _not_kept(mix: MixConfig, base_dir: Path) -> Iterator[str]:
    """Yield a warning if tokens cannot be kept in the folder of the token cache, or where a run would create it."""
    cache = mix.loader.token_cache
    if cache is None or cache.is_url:
        return
    folder = path_from(base_dir, cache.path, "loader.token_cache.path")
    found = next(each for each in (folder, *folder.parents) if os.path.exists(each))  # noqa: PTH110 -- raises nothing
    if found.is_dir() and not os.access(found, os.W_OK | os.X_OK):
        yield (
            f"loader.token_cache: {found} cannot be written by user {os.geteuid()}; as it is, runs on this host make "
            "the tokens anew each time: name another folder, or have this one made writable"
        )


def _said_of_tokens(tokens: Sequence[_Fullness]) -> str:
    """Return how much of the sources a token cache contains, and for which sources it never contains anything."""
    units, kept = sum(each.units for each in tokens), sum(each.kept for each in tokens)
    never = [f"{each.source} ({each.why})" for each in tokens if each.why]
    left = f"; never of {', '.join(never[:_NAMED])}" if never else ""
    more = f" and {len(never) - _NAMED} more" if len(never) > _NAMED else ""
    return f"token cache: tokens of {kept:,} of {counted(units, 'unit')} are kept{left}{more}"


def _sizes(mix: MixConfig, found: Sequence[FoundSource]) -> SourceSizes:
    # If the first records give no token, the number per record is unknown, and the largest of the other sources, or a
    # row, causes no warning. Or a byte counts as a token, because the first record may be longer than the part that is
    # read of it, and the source may consist of a few such records.
    unknown = max(source.tokens_per_record for source in found) or float(mix.pack.length)
    return SourceSizes.of(
        mix,
        [float(source.records) for source in found],
        [s.tokens_per_record or max(unknown, s.size_bytes / s.records) for s in found],
        samples_per_record_S=[s.samples_per_record if s.tokens_per_record else 1.0 for s in found],
    )


def _sources_table(found: Sequence[FoundSource]) -> FittedTable:
    columns = [("source", False), ("format", False)]
    columns += [(heading, True) for heading in ("shards", "units", "records", "stored")]
    rows: list[list[Cell]] = [
        [
            Text(source.name, colour_of(s)),
            source.format,
            f"{source.shards:,}",
            f"{source.units:,}",
            f"{source.records:,}",
            format_bytes(source.size_bytes),
        ]
        for s, source in enumerate(found[:MOST_ROWS])
    ]
    kind = "source" if len(found) == 1 else "sources"
    return table(f"{len(found)} {kind}", columns, bounded(rows, len(found)))


def _fullness_of_mix(
    mix: MixConfig, *, base_dir: Path, cache_dir: Path | None
) -> list[_Fullness] | None:
    """Return how full the token cache of a mix is, by source; ``None`` if the mix has none.

    Raises:
        ConfigError: The key file is missing, or the store cannot be opened.
        UnavailableError: The place cannot be listed.
    """
    cache = open_token_cache(mix.loader.token_cache, mix.tokenizer, base_dir)
    if cache is None:
        return None
    return [_of_source(mix, name, cache, base_dir, cache_dir) for name in mix.names]


def _shards_kept(mix: MixConfig, base_dir: Path) -> _KeptShards | None:
    """Return the shards of a mix that are cached on this machine; ``None`` if it caches none.

    Raises:
        OmniloadError: See ``shards_of``.
    """
    cache = shard_cache_of(mix.loader.shard_cache, base_dir)
    if cache is None:
        return None
    never: dict[str, str] = {}
    sizes: list[tuple[int, int]] = []
    for name in mix.names:
        config = mix.sources[name].using(mix.columns_used)
        found = shards_of(name, config, base_dir=base_dir)
        files = [each for file in found for each in (file, *file.beside) if each.remote is not None]
        if files and config.type == "lance":
            never[name] = "Lance reads its data sets by itself"
            continue
        kept = [file.kept_in(cache).kept for file in files if file.size_bytes]
        if untold := kept.count(None):
            never[name] = (
                f"the store gives {untold:,} of them no ETag, nor a time of writing that is a minute old"
            )
        versions = [each.version for each in kept if each is not None]
        sizes += [(each.size_bytes, cache.directory.bytes_of(each)) for each in versions]
    return _KeptShards(
        path=str(cache.directory.root),
        limit=cache.directory.limit_bytes,
        held=cache.directory.held_bytes(),
        shards=len(sizes),
        kept=sum(kept > 0 for _, kept in sizes),
        size_bytes=sum(size for size, _ in sizes),
        # The last page of a shard counts in full.
        kept_bytes=sum(min(each) for each in sizes),
        never=never,
    )


def _of_source(
    mix: MixConfig, name: str, cache: TokenCache, base_dir: Path, cache_dir: Path | None
) -> _Fullness:
    found = cached_units(SourceSpec.drawn(mix, name, base_dir, cache_dir), cache)
    kept = int(found.is_kept_U.sum())
    return _Fullness(source=name, units=len(found.units_U), kept=kept, why=found.why)
