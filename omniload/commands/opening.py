"""Opens what a mix file names, as far as a command needs it: files and their indexes."""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.actors.plane import PlaneSpec
from omniload.actors.roles.first_look import gives_any
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.base.config import every_fault
from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.units import format_bytes
from omniload.commands.display import progress
from omniload.commands.faults import (
    FIRST_RECORDS,
    doubt_of_lengths,
    doubt_of_words,
    of_source,
    outcome_of,
    raise_together,
    require_words,
    why_nothing,
    with_line,
)
from omniload.mix.config import MixConfig, SourceConfig, TokenizerConfig, load_mix
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.strategies import require_balance, tags_of_samples
from omniload.plan.world import require_rows
from omniload.source.access.index_folders import index_folder
from omniload.source.columns import as_binary, take, text_array
from omniload.source.distinct.drawn_before import drawn_before
from omniload.source.files import ShardFile
from omniload.source.formats.format import Format, Records
from omniload.source.formats.opening import OpenFormat, open_shards, shards_of
from omniload.source.kept_findings import (
    FoundSource,
    keep_findings,
    kept_findings,
    key_of_source,
    key_of_tokenizer,
)
from omniload.source.parsing.beginnings import mends_all
from omniload.source.parsing.image_cells import ENCODED
from omniload.source.parsing.token_lists import said_of_place
from omniload.source.spec import SourceSpec
from omniload.source.survey.spread import Spread, evenly, unevenness
from omniload.source.tokenize import Tokenizer, doubt_of_ids, open_tokenizer
from omniload.source.transforms.opening import open_pipeline

__all__ = ["find_sources", "open_spec", "tokenizer_of"]

_OPENERS = 8
_LATER_FILES = 7
"""Number of files after the first of which some records are decoded, if no index has seen their columns."""
_IMAGES_BYTES = 64 << 20
"""Largest unit with images, in bytes, whose first images a check decodes."""
_ALL_RECORDS, _ALL_BYTES = 4096, 8 << 20
"""Largest source that is read whole if its first records give nothing."""
_IMAGE_AMONG_MESSAGES = re.compile(rb'"type":\s*"image(_url)?"|<image>')


def open_spec(
    file: Path,
    *,
    dp: int,
    cache_dir: Path | None,
    ahead: int | None = None,
    all_faults: bool = False,
) -> PlaneSpec:
    """Read a mix file for ``dp`` ranks.

    Args:
        file: The mix file.
        dp: Data-parallel ranks.
        cache_dir: Folder of indexes; the mix file's own by default.
        ahead: Steps to plan ahead, if that should differ from the file.
        all_faults: Whether to report each fault, however many there are.

    Raises:
        ConfigError: The file is missing or has faults.
    """
    with every_fault() if all_faults else nullcontext():
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


def tokenizer_of(config: TokenizerConfig | None, base_dir: Path) -> Tokenizer | None:
    """Open the tokenizer of a mix, if it has one.

    Raises:
        ConfigError: Its file is missing or no tokenizer.
    """
    return None if config is None else open_tokenizer(config, base_dir)


def find_sources(
    spec: PlaneSpec, file: Path | None = None, refused: Mapping[str, OmniloadError] | None = None
) -> list[FoundSource]:
    """Find and index every source, several at a time, and test the tokenizer and the batch.

    Args:
        spec: The run whose sources are found.
        file: The mix file, for messages.
        refused: Faults of sources that must not be opened, with their lines; a shared fault is reported once.

    Returns:
        The sources, sorted by name.

    Raises:
        OmniloadError: All faults, in one error; see ``raise_together``.
    """
    mix, refused = spec.mix, refused or {}
    tokenizer = outcome_of(lambda: tokenizer_of(mix.tokenizer, spec.base_dir))
    with (
        progress("opening sources", len(mix.names)) as advance,
        LimitedCalls("omniload-listing") as calls,
        DaemonPool(_OPENERS, "omniload-opening", reads=True) as pool,
    ):
        # A tokenizer that cannot be opened is reported once, by itself; pipelines would report it for every source.
        finder = _Finder(spec, calls, can_encode=not isinstance(tokenizer, OmniloadError))
        names = [name for name in mix.names if name not in refused]
        outcomes = pool.map(
            lambda name: outcome_of(lambda: finder.find(name)), names, advance=advance
        )
    # One thread parses the file here; otherwise each thread that asks for a line before that would parse it too.
    found = [of_source(each, name, file) for each, name in zip(outcomes, names, strict=True)]
    # Kept before anything is raised, so that the sound sources are not looked at again after a fault is fixed.
    finder.keep([source for source in found if isinstance(source, FoundSource)])
    if isinstance(tokenizer, OmniloadError):
        # Sources that need it raise the same error, because one line of the file must be changed.
        said = str(tokenizer)
        # The original error is compared, because a source's own message begins with the source.
        found = [each for each in found if str(getattr(each, "__cause__", "")) != said]
        tokenizer = type(tokenizer)(with_line(said, ("tokenizer",), file))
    outcomes_of_all = (
        outcome_of(lambda: require_rows(spec.mix, spec.tree), file),
        outcome_of(lambda: require_balance(mix), file),
        tokenizer,
        *found,
        *dict.fromkeys(refused.values()),
    )
    raise_together([each for each in outcomes_of_all if isinstance(each, OmniloadError)])
    return [each for each in found if isinstance(each, FoundSource)]


class _Finder:
    """Finds sources, each by itself and in any thread; earlier results are used if nothing has changed."""

    def __init__(self, spec: PlaneSpec, calls: LimitedCalls, *, can_encode: bool) -> None:
        self._spec, self._calls, self._can_encode = spec, calls, can_encode
        pack, tokenizer = spec.mix.pack, key_of_tokenizer(spec.mix.tokenizer, spec.base_dir)
        # Besides the files, these settings decide how many tokens the first records have, and whether they fit a row.
        self._rests_on = f"{tokenizer}, {pack.length}, {pack.overlong}, {pack.method}"
        self._tags = _tags_read(spec.mix)
        if self._tags:
            self._rests_on += f", {self._tags}"
        self._kept = kept_findings(spec.cache_dir)
        self._keys: dict[str, str] = {}

    def find(self, name: str) -> FoundSource:
        """Find a source; raise what is wrong with it, or with a column that it names and no batch brings."""
        source = SourceSpec.of(self._spec.mix, name, self._spec.base_dir, self._spec.cache_dir)
        config = source.config
        files = shards_of(name, config, base_dir=source.base_dir, calls=self._calls)
        if config.transforms and self._can_encode:
            open_pipeline(source)
        key = self._keys[name] = key_of_source(config, files, self._rests_on)
        kept_key, found = self._kept.get(name, ("", None))
        # The key does not cover the content of further files, or what only a reader can report.
        if found is None or kept_key != key or config.rests_on_more:
            found = _looked_at(self._spec.mix, source, files, self._tags)
        return found

    def keep(self, found: Sequence[FoundSource]) -> None:
        """Keep the results if they differ from the kept ones."""
        now = {source.name: (self._keys[source.name], source) for source in found}
        # Without a tokenizer, the tokens of text are unknown.
        if self._can_encode and now != self._kept:
            keep_findings(self._spec.cache_dir, now)


def _tags_read(mix: MixConfig) -> tuple[str, ...]:
    try:
        return tags_of_samples(mix)
    except ConfigError:
        return ()  # reported by the code that requires the balance


def _looked_at(
    mix: MixConfig, source: SourceSpec, files: tuple[ShardFile, ...], tags: tuple[str, ...]
) -> FoundSource:
    """Index a source and decode its first records."""
    name, config = source.name, source.config
    opened = open_shards(source, files)
    records, units = opened.require_records(source), opened.format.units()
    # Called for its errors: lists that name missing records are reported by a check, and not by the first step.
    drawn_before(source, units, opened.files)
    first, unseen = _first_of(config, opened)
    begins = opened.files[int(units.shards_U[np.flatnonzero(units.rows_U)[0]])].path
    lengths_N, spoilt = _first_lengths(source, opened.format, first, begins)
    words = require_words(name, first, tags)
    looked, later = _first_of_later_files(source, opened, tags)
    # A record that conditions leave out counts as nothing.
    kept = 1.0 if first.kept_B is None or not len(first.kept_B) else float(first.kept_B.mean())
    known_N = np.zeros(0, np.int64) if lengths_N is None else lengths_N
    mean, gives = (float(known_N.mean()), float((known_N > 0).mean())) if len(known_N) else (0, 1)
    size_bytes = sum(file.size_bytes for file in opened.files)
    is_small = records <= _ALL_RECORDS and size_bytes <= _ALL_BYTES
    is_readable = is_small and lengths_N is not None and config.images_transform is None
    read_all = partial(_gives_any, mix, source) if is_readable else None
    doubts = [why_nothing(mix, name, first, lengths_N, records, read_all)]
    if not doubts[0]:
        # All warnings are kept, because an intended one that stays must not hide another.
        every = (
            words,
            doubt_of_lengths(mix, config, lengths_N),
            unseen,
            opened.format.doubt() or _ids_unknown(source, opened.format, first),
            _images_not_read(config, first),
            _doubt_of_conversations(source, first),
            _left_out(first, spoilt) or later,
            first.rounded,
        )
        doubts = [f"sources.{name}: {said}" for said in every if said]
    spread, times = Spread(), 1.0
    if config.images_transform is None:  # images are the largest part of a unit
        firsts_N = first.column.lengths_N[first.usable_B]
        spread = Spread.of([firsts_N])
        if (sizes_U := opened.format.sizes_U()) is not None:
            times = unevenness(sizes_U, units.rows_U, firsts_N)
    # A share of less than one record most likely gives none, so the mix must not count on its tokens.
    drawn = config.share_drawn if records * config.share_drawn >= 1 else 0.0
    return FoundSource(
        name=name,
        format=config.type,
        shards=len(opened.files),
        looked=looked,
        units=len(units),
        records=records,
        size_bytes=size_bytes,
        tokens_per_record=kept * mean * drawn,
        samples_per_record=kept * gives * drawn,
        times=times,
        along=spread.along,
        firsts=0 if unseen else len(known_N),
        longer=0 if unseen else int((known_N > mix.pack.length).sum()),
        doubts=tuple(filter(None, doubts)),
    )


def _gives_any(mix: MixConfig, source: SourceSpec) -> bool:
    """Read all of a source as a run does; return whether a record gives a sample that fits a row."""
    from omniload.source.record_source import open_source  # noqa: PLC0415 -- few checks need it

    opened = open_source(source)
    return gives_any(opened.read(0, opened.positions_per_epoch), mix, source.name)


def _first_of_later_files(
    source: SourceSpec, opened: OpenFormat, tags: tuple[str, ...]
) -> tuple[int, str]:
    """Return the number of files with decoded records, and warnings about records in later files or about their tags.

    Raises:
        ConfigError: A record cannot be used, and must not be skipped.
    """
    skips, looked, said = source.config.on_error.policy == "skip", 1, ""
    files = np.flatnonzero(opened.format.units().records_F(len(opened.files)))[1:]
    for file in files[evenly(len(files), _LATER_FILES)].tolist() if len(files) else ():
        first = opened.format.first_records_of(file)
        if first is None:
            continue
        looked += 1
        # With ``skip``, a bad part of a file is acceptable, because other files have usable records.
        if first.reason and not skips:
            raise _unusable(source.name, first.reason, skips=skips)
        path = opened.files[file].path
        said = said or doubt_of_words(first, tags, path) or _left_out(first, (), path)
    return looked, said


def _left_out(first: Records, spoilt: Sequence[str], path: str = "") -> str:
    """Return a warning about the first records that are left out; empty if there are none.

    Args:
        first: First records of the source, or of the file that ``path`` names.
        spoilt: Records that give no sample, with the reasons.
        path: One of the source's later files.
    """
    count, reason = np.count_nonzero(first.bad_B) + len(spoilt), first.reason or "".join(spoilt[:1])
    whose = f"{path}'s" if path else "its"
    said = f"{count:,} of {whose} first {len(first.bad_B):,} records are left out, as on_error says"
    return f"{said}; the first: {reason}" if count else ""


def _ids_unknown(source: SourceSpec, record_format: Format, first: Records) -> str:
    """Return a warning if the first token ids are unknown to the mix's tokenizer; empty without a tokenizer."""
    tokenizer = (
        None if record_format.holds_text else tokenizer_of(source.tokenizer, source.base_dir)
    )
    return "" if tokenizer is None else doubt_of_ids(first.column.values_V, tokenizer)


def _images_not_read(config: SourceConfig, first: Records) -> str:
    """Return a warning if the first conversations seem to have images that are not read; empty if they do not."""
    if not config.is_nested or config.images_transform is not None:
        return ""
    texts = first.column.values_V[: first.column.offsets[min(len(first.column), FIRST_RECORDS)]]
    if not _IMAGE_AMONG_MESSAGES.search(texts.tobytes()):
        return ""
    return (
        "the first conversations have images among their messages, which are not read: say image in their transform, "
        "and put one of type images behind it"
    )


def _doubt_of_conversations(source: SourceSpec, first: Records) -> str:
    """Return a warning if a template's result for the first conversations seems unintended; empty otherwise."""
    if not source.config.is_nested:
        return ""
    rows = np.flatnonzero(first.usable_B)[:FIRST_RECORDS]
    return open_pipeline(source.uncut).doubt(first, rows)


def _first_of(config: SourceConfig, opened: OpenFormat) -> tuple[Records, str]:
    """Return the first records of a source, with images if it has any, and a note on what was not looked at."""
    if not config.image_members:
        return opened.format.first_records(), ""
    units = opened.format.units()
    unit = units.first_filled()
    assert unit is not None, "it has records"
    files = units.files_of(unit)
    # Images are stored next to their text, so a whole unit is the least that can be read of them.
    size_bytes = sum(opened.files[file].size_bytes for file in files)
    if not units.are_whole_files:
        size_bytes //= int((units.shards_U == units.shards_U[unit]).sum())
    if size_bytes <= _IMAGES_BYTES:
        return opened.format.read_unit(unit), ""
    return opened.format.first_records(), (
        f"no image of it was looked at: its first unit has about {format_bytes(size_bytes)}, more than "
        f"{format_bytes(_IMAGES_BYTES)}; omniload mix plan decodes some of it, and the run tells of one that is broken"
    )


def _first_lengths(
    source: SourceSpec, record_format: Format, records: Records, path: str
) -> tuple[NDArray[np.integer[Any]] | None, list[str]]:
    """Return tokens of the usable first records of ``path``, ``None`` if unknown, and faults of those without a sample.

    Raises:
        ConfigError: A record cannot be used; with the policy ``skip``, no record can be used.
    """
    name, config = source.name, source.config
    skips = config.on_error.policy == "skip"
    if records.reason and not (skips and not records.bad_B.all()):
        raise _unusable(name, records.reason, skips=skips)
    rows = np.flatnonzero(records.usable_B)[:FIRST_RECORDS]
    if not len(rows):
        return np.zeros(0, np.int64), []
    if not record_format.holds_text and not config.transforms:
        return records.column.lengths_N[rows], []
    tokenizer = tokenizer_of(source.tokenizer, source.base_dir)
    if record_format.holds_text and tokenizer is None:
        return None, []  # reported already by the code that asks for the tokenizer
    if config.transforms and (not config.image_members or ENCODED in records.others):
        pipeline = open_pipeline(source.uncut)
        samples = pipeline.of_records(records, rows)
        bad = [] if samples.bad_N is None else rows[samples.bad_N].tolist()
        spoilt = [
            f"{said_of_place((path, record_format.name_of_record(row)))}: {samples.reason}"
            for row in bad
        ]
        if spoilt and not (skips and len(bad) < len(rows)):
            raise _unusable(name, spoilt[0], skips=skips)
        return samples.tokens.lengths_N, spoilt
    assert tokenizer is not None, "it holds text"
    texts = take(as_binary(records.column), rows, records.column.values_V.dtype)
    return tokenizer.encode(text_array(texts)).lengths_N, []


def _unusable(name: str, reason: str, *, skips: bool) -> ConfigError:
    of_all = "none of its first records can be used: " if skips else ""
    remedy = "" if skips else ", or leave out what cannot be read with on_error: {policy: skip}"
    mend = "" if mends_all(reason) else f"; correct the type or the key, mend the record{remedy}"
    return ConfigError(f"sources.{name}: {of_all}{reason}{mend}")
