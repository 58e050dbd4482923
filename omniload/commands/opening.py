"""Opening what a mix file names, as far as a question needs it: files and their indexes."""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.actors.plane import PlaneSpec, require_rows
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
from omniload.source.columns import as_binary, take, text_array
from omniload.source.distinct.drawn_before import drawn_before
from omniload.source.files import ShardFile
from omniload.source.formats.format import Format, Records
from omniload.source.formats.opening import OpenFormat, open_shards, shards_of
from omniload.source.index import index_folder
from omniload.source.kept_findings import (
    FoundSource,
    keep_findings,
    kept_findings,
    key_of_source,
    key_of_tokenizer,
)
from omniload.source.parsing.beginnings import mends_all
from omniload.source.parsing.image_cells import ENCODED
from omniload.source.spec import SourceSpec
from omniload.source.survey.documents import open_survey, trained_on
from omniload.source.survey.spread import Spread, evenly, unevenness
from omniload.source.tokenize import Tokenizer, doubt_of_ids, open_tokenizer
from omniload.source.transforms.opening import open_pipeline

__all__ = ["find_sources", "open_spec", "tokenizer_of"]

_OPENERS = 8
_LATER_FILES = 7
"""Files beyond the first of which some records are decoded, where no index has seen their columns."""
_IMAGES_BYTES = 64 << 20
"""Bytes of a unit with images up to which a check decodes its first ones."""
_ALL_RECORDS, _ALL_BYTES = 4096, 8 << 20
"""What a source holds at most that is read whole, where its first records give nothing."""
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
        ahead: Steps to plan ahead, where that should not be as the file says.
        all_faults: Whether each fault is said, however many there are.

    Raises:
        ConfigError: The file is missing or faulty.
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
        spec: What to open.
        file: The mix file, for messages.
        refused: What is wrong with sources that are not to be opened, with their lines; one that several have is told
            once.

    Returns:
        The sources, sorted by name.

    Raises:
        OmniloadError: Everything that is wrong, in one error; see ``raise_together``.
    """
    mix, refused = spec.mix, refused or {}
    tokenizer = outcome_of(lambda: tokenizer_of(mix.tokenizer, spec.base_dir))
    with (
        progress("opening sources", len(mix.names)) as advance,
        LimitedCalls("omniload-listing") as calls,
        DaemonPool(_OPENERS, "omniload-opening", reads=True) as pool,
    ):
        # A tokenizer that cannot be opened is told once, by itself: pipelines would say it for every source.
        finder = _Finder(spec, calls, can_encode=not isinstance(tokenizer, OmniloadError))
        names = [name for name in mix.names if name not in refused]
        outcomes = pool.map(
            lambda name: outcome_of(lambda: finder.find(name)), names, advance=advance
        )
    # By one thread: each that asked for a line of the file while no other had composed its tree would do so.
    found = [of_source(each, name, file) for each, name in zip(outcomes, names, strict=True)]
    # Before anything is raised: once one source is mended, the sound ones are not looked at again.
    finder.keep([source for source in found if isinstance(source, FoundSource)])
    if isinstance(tokenizer, OmniloadError):
        # Sources that want it say the same: one line of the file is to be changed.
        said = str(tokenizer)
        # Compared as it was raised: what a source says of it begins with the source.
        found = [each for each in found if str(getattr(each, "__cause__", "")) != said]
        tokenizer = type(tokenizer)(with_line(said, ("tokenizer",), file))
    outcomes_of_all = (
        outcome_of(lambda: require_rows(spec), file),
        outcome_of(lambda: require_balance(mix), file),
        tokenizer,
        *found,
        *dict.fromkeys(refused.values()),
    )
    raise_together([each for each in outcomes_of_all if isinstance(each, OmniloadError)])
    return [each for each in found if isinstance(each, FoundSource)]


class _Finder:
    """Finds sources, each on its own, in any thread; what was found before stands while nothing has changed."""

    def __init__(self, spec: PlaneSpec, calls: LimitedCalls, *, can_encode: bool) -> None:
        self._spec, self._calls, self._can_encode = spec, calls, can_encode
        pack, tokenizer = spec.mix.pack, key_of_tokenizer(spec.mix.tokenizer, spec.base_dir)
        # How many tokens the first records have, and whether they fit a row, rests on these beside the files.
        self._rests_on = f"{tokenizer}, {pack.length}, {pack.overlong}, {pack.method}"
        self._tags = _tags_read(spec.mix)
        if self._tags:
            self._rests_on += f", {self._tags}"
        self._kept = kept_findings(spec.cache_dir)
        self._keys: dict[str, str] = {}

    def find(self, name: str) -> FoundSource:
        """Find a source; raises what is wrong with it, or with a column that it names and no batch brings."""
        source = SourceSpec.of(self._spec.mix, name, self._spec.base_dir, self._spec.cache_dir)
        config = source.config
        files = shards_of(name, config, base_dir=source.base_dir, calls=self._calls)
        if config.transforms and self._can_encode:
            open_pipeline(source)
        key = self._keys[name] = key_of_source(config, files, self._rests_on)
        kept_key, found = self._kept.get(name, ("", None))
        # What lies in a file of its own, or is for a reader to say, a key says nothing of.
        if found is None or kept_key != key or config.rests_on_more:
            found = _looked_at(self._spec.mix, source, files, self._tags)
        return found

    def keep(self, found: Sequence[FoundSource]) -> None:
        """Keep what was found, where it is not what was kept."""
        now = {source.name: (self._keys[source.name], source) for source in found}
        # Without a tokenizer nothing is known of the tokens of text.
        if self._can_encode and now != self._kept:
            keep_findings(self._spec.cache_dir, now)


def _tags_read(mix: MixConfig) -> tuple[str, ...]:
    try:
        return tags_of_samples(mix)
    except ConfigError:
        return ()  # told by whoever requires the balance


def _looked_at(
    mix: MixConfig, source: SourceSpec, files: tuple[ShardFile, ...], tags: tuple[str, ...]
) -> FoundSource:
    """Index a source and decode its first records."""
    name, config = source.name, source.config
    opened = open_shards(source, files)
    records, units = opened.require_records(source), opened.format.units()
    # For its refusal: lists that name records which are not there are told by a check, not by the first step.
    drawn_before(source, units, opened.files)
    first, unseen = _first_of(config, opened)
    begins = opened.files[int(units.shards_U[np.flatnonzero(units.rows_U)[0]])].path
    lengths_N, spoilt = _first_lengths(source, opened.format, first, begins)
    words = require_words(name, first, tags)
    looked, later = _first_of_later_files(source, opened, tags)
    # A record that conditions leave out counts for nothing.
    kept = 1.0 if first.kept_B is None or not len(first.kept_B) else float(first.kept_B.mean())
    known_N = np.zeros(0, np.int64) if lengths_N is None else lengths_N
    mean = float(known_N.mean()) if len(known_N) else 0.0
    size_bytes = sum(file.size_bytes for file in opened.files)
    is_small = records <= _ALL_RECORDS and size_bytes <= _ALL_BYTES
    gives_any = partial(_gives_any, mix, source) if is_small and lengths_N is not None else None
    doubts = [why_nothing(mix, name, first, lengths_N, records, gives_any)]
    if not doubts[0]:
        # Every one: one that is meant so, and stays, must not hide another.
        every = (
            words,
            doubt_of_lengths(mix, config, lengths_N),
            unseen,
            opened.format.doubt() or _ids_unknown(source, opened.format, first),
            _images_not_read(config, first),
            _doubt_of_conversations(source, first),
            _left_out(first, spoilt) or later,
        )
        doubts = [f"sources.{name}: {said}" for said in every if said]
    spread, times = Spread(), 1.0
    if config.images_transform is None:  # images are the most of what a unit takes
        firsts_N = first.column.lengths_N[first.usable_B]
        spread = Spread.of([firsts_N])
        if (sizes_U := opened.format.sizes_U()) is not None:
            times = unevenness(sizes_U, units.rows_U, firsts_N)
    # A share of less than a record is most likely none, so the mix is not to count on its tokens.
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
        times=times,
        along=spread.along,
        firsts=0 if unseen else len(known_N),
        longer=0 if unseen else int((known_N > mix.pack.length).sum()),
        doubts=tuple(filter(None, doubts)),
    )


def _gives_any(mix: MixConfig, source: SourceSpec) -> bool:
    """Read all of a source, and tell whether a record gives a sample that rows take."""
    is_cut = source.config.concat_transform is not None
    overlong = "split" if is_cut else source.config.overlong or mix.pack.overlong
    every = open_survey(source, sample=None).looked()
    return any(trained_on(e.lengths_N, mix.pack.length, overlong).any() for e in every)


def _first_of_later_files(
    source: SourceSpec, opened: OpenFormat, tags: tuple[str, ...]
) -> tuple[int, str]:
    """Return of how many files some records are decoded, and what is wrong with some in later ones, or with their tags.

    Raises:
        ConfigError: One cannot be used, and is not to be skipped.
    """
    skips, looked, said = source.config.on_error.policy == "skip", 1, ""
    files = np.flatnonzero(opened.format.units().records_F(len(opened.files)))[1:]
    for file in files[evenly(len(files), _LATER_FILES)].tolist() if len(files) else ():
        first = opened.format.first_records_of(file)
        if first is None:
            continue
        looked += 1
        # With skip, of whatever part of a file: others have what can be used.
        if first.reason and not skips:
            raise _unusable(source.name, first.reason, skips=skips)
        path = opened.files[file].path
        said = said or doubt_of_words(first, tags, path) or _left_out(first, (), path)
    return looked, said


def _left_out(first: Records, spoilt: Sequence[str], path: str = "") -> str:
    """Say what is wrong with those of the first records that are left out; empty where there are none.

    Args:
        first: The first records, of the source or of the file that ``path`` names.
        spoilt: Those that no sample can be made of.
        path: One of its later files.
    """
    count, reason = np.count_nonzero(first.bad_B) + len(spoilt), first.reason or "".join(spoilt[:1])
    whose = f"{path}'s" if path else "its"
    said = f"{count:,} of {whose} first {len(first.bad_B):,} records are left out, as on_error says"
    return f"{said}; the first: {reason}" if count else ""


def _ids_unknown(source: SourceSpec, record_format: Format, first: Records) -> str:
    """Say that the first token ids are none of the mix's tokenizer; empty where they are, or where it has none."""
    tokenizer = (
        None if record_format.holds_text else tokenizer_of(source.tokenizer, source.base_dir)
    )
    return "" if tokenizer is None else doubt_of_ids(first.column.values_V, tokenizer)


def _images_not_read(config: SourceConfig, first: Records) -> str:
    """Say that the first conversations seem to have images that are not read; empty where they do not."""
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
    """Say what seems not to be meant in what a template makes of the first conversations; empty where nothing does."""
    if not source.config.is_nested:
        return ""
    rows = np.flatnonzero(first.usable_B)[:FIRST_RECORDS]
    return open_pipeline(source.uncut).doubt(first, rows)


def _first_of(config: SourceConfig, opened: OpenFormat) -> tuple[Records, str]:
    """Return the first records of a source, with their images where it has any, and what of them was not looked at."""
    if not config.image_members:
        return opened.format.first_records(), ""
    units = opened.format.units()
    unit = units.first_filled()
    assert unit is not None, "it has records"
    files = units.files_of(unit)
    # Images stand beside their text: a unit is the least that is read of them.
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
    """Return the tokens of each of the first records that can be used, its transforms tried; ``None``: not known.

    And what is wrong, record by record, where no sample can be made. ``path`` names the file that they are of.

    Raises:
        ConfigError: One of them cannot be used; with the policy ``skip``, none of them can.
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
        return None, []  # told already by whoever asks for the tokenizer
    if config.transforms and (not config.image_members or ENCODED in records.others):
        pipeline = open_pipeline(source.uncut)
        samples = pipeline.of_records(records, rows)
        bad = [] if samples.bad_N is None else rows[samples.bad_N].tolist()
        spoilt = [f"{path}: {record_format.name_of_record(row)}: {samples.reason}" for row in bad]
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
