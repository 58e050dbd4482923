"""Opening what a mix file names, as far as a question needs it: files and their indexes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from omniload.actors.plane import PlaneSpec, require_rows
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.base.config import line_of
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.commands.display import progress
from omniload.mix.config import MixConfig, load_mix
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.strategies import require_strategy
from omniload.source.columns import as_binary, take, text_array
from omniload.source.files import ShardFile
from omniload.source.formats.format import Format
from omniload.source.formats.opening import open_shards, shards_of
from omniload.source.index import IndexCache, index_folder
from omniload.source.kept_findings import (
    FoundSource,
    keep_findings,
    kept_findings,
    key_of_source,
    key_of_tokenizer,
)
from omniload.source.tokenize import Tokenizer, open_tokenizer
from omniload.source.transforms.opening import open_pipeline

__all__ = [
    "find_sources",
    "open_spec",
    "raise_together",
    "tokenizer_of",
]

_OPENERS = 8
_FIRST_RECORDS = 64
"""Records whose tokens are counted."""
_GRAVITY = (IntegrityError, ConfigError, StateError, UnavailableError, OmniloadError)


def open_spec(
    file: Path, *, dp: int, cache_dir: Path | None, ahead: int | None = None
) -> PlaneSpec:
    """Read a mix file for ``dp`` ranks.

    Args:
        file: The mix file.
        dp: Data-parallel ranks.
        cache_dir: Folder of indexes; the mix file's own by default.
        ahead: Steps to plan ahead, where that should not be as the file says.

    Raises:
        ConfigError: The file is missing or faulty.
    """
    mix, base_dir = load_mix(file)
    if ahead is not None:
        runtime = mix.runtime.model_copy(update={"prefetch_steps": ahead})
        mix = mix.model_copy(update={"runtime": runtime})
    return PlaneSpec(
        mix=mix,
        base_dir=base_dir,
        tree=ClientPlaceTree.of(dp=dp),
        cache_dir=cache_dir or index_folder(file),
    )


def tokenizer_of(mix: MixConfig, base_dir: Path) -> Tokenizer | None:
    """Open the tokenizer of a mix, if it has one.

    Raises:
        ConfigError: Its file is missing or no tokenizer.
    """
    return None if mix.tokenizer is None else open_tokenizer(mix.tokenizer, base_dir)


def find_sources(spec: PlaneSpec, file: Path | None = None) -> list[FoundSource]:
    """Find and index every source, several at a time, and test the tokenizer and the batch.

    Args:
        spec: What to open.
        file: The mix file, for messages.

    Returns:
        The sources, sorted by name.

    Raises:
        OmniloadError: Everything that is wrong, in one error; see ``raise_together``.
    """
    mix = spec.mix
    tokenizer = _outcome(lambda: tokenizer_of(mix, spec.base_dir))
    with (
        progress("opening sources", len(mix.names)) as advance,
        LimitedCalls("omniload-listing") as calls,
        DaemonPool(_OPENERS, "omniload-opening") as pool,
    ):
        finder = _Finder(spec, calls, can_encode=not isinstance(tokenizer, OmniloadError))
        found = pool.map(
            lambda name: _named(_outcome(lambda: finder.find(name)), name, file),
            mix.names,
            advance=advance,
        )
    finder.keep([source for source in found if isinstance(source, FoundSource)])
    results = [
        _outcome(lambda: require_rows(spec)),
        _outcome(lambda: require_strategy(mix.balance)),
        tokenizer,
        *found,
    ]
    raise_together([result for result in results if isinstance(result, OmniloadError)])
    return [result for result in results if isinstance(result, FoundSource)]


class _Finder:
    """Finds sources, each on its own, in any thread; what was found before stands while nothing has changed."""

    def __init__(self, spec: PlaneSpec, calls: LimitedCalls, *, can_encode: bool) -> None:
        self._spec, self._calls, self._can_encode = spec, calls, can_encode
        self._tokenizer = key_of_tokenizer(spec.mix.tokenizer, spec.base_dir)
        self._kept = kept_findings(spec.cache_dir)
        self._keys: dict[str, str] = {}

    def find(self, name: str) -> FoundSource:
        """Find a source; raises what is wrong with it."""
        spec, config = self._spec, self._spec.mix.sources[name]
        files = shards_of(name, config, base_dir=spec.base_dir, calls=self._calls)
        if config.transforms and self._can_encode:
            open_pipeline(name, config, spec.mix.tokenizer, spec.base_dir, spec.mix.pack.length)
        key = self._keys[name] = key_of_source(config, files, self._tokenizer)
        kept_key, found = self._kept.get(name, ("", None))
        if found is None or kept_key != key:
            found = _looked_at(spec, name, files)
        return found

    def keep(self, found: Sequence[FoundSource]) -> None:
        """Keep what was found, where it is not what was kept."""
        now = {source.name: (self._keys[source.name], source) for source in found}
        # Without a tokenizer nothing is known of the tokens of text.
        if self._can_encode and now != self._kept:
            keep_findings(self._spec.cache_dir, now)


def _outcome(check: Callable[[], object]) -> object:
    """Return what ``check`` returns, or the error it raises."""
    try:
        return check()
    except OmniloadError as error:
        return error


def _named(result: object, source: str, file: Path | None) -> object:
    """Say of an error whose source it is, where its message names a file only, and the line of the key to change."""
    if not isinstance(result, OmniloadError):
        return result
    key, said = f"sources.{source}", str(result)
    if key not in said:
        said = f"{key}: {said}"
    below = said.removeprefix(f"{key}.").partition(":")[0] if said.startswith(f"{key}.") else ""
    at = ("sources", source, below) if below.isidentifier() else ("sources", source)
    line = None if file is None else line_of(file, *at)
    if line is not None:
        said = f"{file}:{line}: {said}"
    named = type(result)(said)
    named.__cause__ = result
    return named


def raise_together(errors: Sequence[OmniloadError]) -> None:
    """Raise what was found wrong as one error, each message on a line of its own.

    Its class is that of the error that is least likely to go away by itself.
    """
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    gravest = min(errors, key=lambda error: _GRAVITY.index(type(error)))
    raise type(gravest)("\n".join(str(error) for error in errors)) from gravest


def _looked_at(spec: PlaneSpec, name: str, files: tuple[ShardFile, ...]) -> FoundSource:
    """Index a source and decode its first records."""
    config = spec.mix.sources[name]
    cache = IndexCache(folder=spec.cache_dir, source=name) if spec.cache_dir else None
    opened = open_shards(name, config, files, cache=cache)
    units = opened.format.units()
    records = int(units.rows_U.sum())
    if records == 0:
        raise ConfigError(
            f"sources.{name}: {', '.join(config.paths)} holds no record; remove the source or add data"
        )
    tokens_per_record = _tokens_per_record(spec, name, opened.format) * config.share_drawn
    return FoundSource(
        name=name,
        format=config.type,
        shards=len(opened.files),
        units=len(units),
        records=records,
        size_bytes=sum(file.size_bytes for file in opened.files),
        tokens_per_record=tokens_per_record,
    )


def _tokens_per_record(spec: PlaneSpec, name: str, record_format: Format) -> float:
    """Decode the first records of a source, have its transforms try them, and return their tokens on average.

    Raises:
        ConfigError: One of them cannot be used; with the policy ``skip``, none of them can.
    """
    records = record_format.first_records()
    source = spec.mix.sources[name]
    skips = source.on_error.policy == "skip"
    if records.reason and not (skips and not records.bad_B.all()):
        raise _unusable(name, records.reason)
    rows = np.flatnonzero(records.usable_B)[:_FIRST_RECORDS]
    if not len(rows):
        return 0.0
    # A record that conditions leave out counts for nothing.
    share = 1.0 if records.kept_B is None else float(records.kept_B.mean())
    if not record_format.holds_text and not source.transforms:
        return share * float(records.column.lengths_N[rows].mean())
    tokenizer = tokenizer_of(spec.mix, spec.base_dir)
    if record_format.holds_text and tokenizer is None:
        return 0.0  # told already by whoever asks for the tokenizer
    if source.transforms and source.images_transform is None:
        pipeline = open_pipeline(name, source, spec.mix.tokenizer, spec.base_dir)
        samples = pipeline.of_records(records, rows)
        if samples.bad_N is not None and not (skips and not samples.bad_N.all()):
            raise _unusable(name, f"one of the first records {samples.reason}")
        return share * float(samples.tokens.lengths_N.mean())
    assert tokenizer is not None, "it holds text"
    column = records.column
    texts = take(as_binary(column), rows, column.values_V.dtype)
    return share * float(tokenizer.encode(text_array(texts)).lengths_N.mean())


def _unusable(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"sources.{name}: {reason}; correct the type or the key, mend the record, or leave out what cannot "
        "be read with on_error: {policy: skip}"
    )
