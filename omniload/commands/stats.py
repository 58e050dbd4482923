"""``omniload mix stats``: facts about the documents of a mix, before training."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.actors.roles import planned_counts
from omniload.base.cli import FiniteRange
from omniload.base.errors import ConfigError
from omniload.client import Client
from omniload.commands.display import emit_json, output, progress
from omniload.commands.faults import sources_in_silence
from omniload.commands.mix_tables import (
    Rate,
    SourceStats,
    Stats,
    print_stats,
    sorted_files,
    stats_json,
)
from omniload.commands.opening import find_sources, open_spec
from omniload.commands.options import cache_option, json_option, mix_argument, store_option
from omniload.mix.config import MixConfig
from omniload.plan.forecast.forecast import forecast, steps_per_epoch
from omniload.plan.forecast.sizes import SourceSizes, rooms_left
from omniload.plan.forecast.stages import with_expected_steps
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import open_shard_cache
from omniload.source.survey.documents import (
    LengthHistogram,
    Survey,
    open_survey,
    said_of_longer,
    trained_on,
)
from omniload.source.survey.duplicates import DuplicateCounter
from omniload.source.survey.spread import Differences, Spread
from omniload.source.survey.tag_shares import TagCounts, shares_of_run, tags_counted

__all__ = ["stats"]

_THREADS = 2


@click.command
@mix_argument
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=5000,
    show_default=True,
    help="Number of documents of each source to look at, spread evenly over at most 16 of its units.",
)
@click.option(
    "--all", "every", is_flag=True, help="Look at every document, which reads all the data."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps of the run; by default as many as the tokens of all sources fill.",
)
@click.option(
    "--measure",
    "measure_s",
    type=FiniteRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds to run the data plane without a trainer, to measure tokens per second; 0 to skip this.",
)
@cache_option
@store_option
@json_option
def stats(  # noqa: PLR0913 -- one for each option
    file: Path,
    *,
    sample: int,
    every: bool,
    steps: int | None,
    measure_s: float,
    cache_dir: Path | None,
    store_timeout: float,
    as_json: bool,
) -> None:
    """Analyse the data of FILE before training on it.

    The command shows the lengths of documents in tokens, duplicate documents within a source or in two sources, tokens
    and steps of an epoch, how often each source is repeated, shares by the tags of samples that batches bring, and the
    tokens per second on this machine. An epoch of a source is every record of its split once.

    \b
    Example:
      omniload mix stats examples/quickstart.yaml
      omniload mix stats examples/quickstart.yaml --all --steps 1000 --measure 0
    """  # noqa: D301 -- click's own marker
    spec = open_spec(file, dp=1, cache_dir=cache_dir)
    # Called for its errors: a fault has a line in the file, and is reported before minutes of work on documents.
    find_sources(spec, file, sources_in_silence(spec.mix, store_timeout, file))
    surveys, looking = _survey(spec, None if every else sample)
    rate = _measure(spec, measure_s) if measure_s else None
    gathered = _gathered(spec.mix, surveys, looking, steps, rate)
    if as_json:
        emit_json({"file": str(file), **stats_json(gathered)})
        return
    print_stats(output(), file, gathered)


@dataclass(slots=True, kw_only=True)
class _Looking:
    """Facts known of the sources so far; several threads look at one source each."""

    spec: PlaneSpec
    counter: DuplicateCounter
    lengths: list[LengthHistogram]
    bad: list[int]
    longer: list[int]
    """Number of documents longer than a row, by source; 0 for a source that cuts such documents."""
    rows: list[int]
    """Number of rows that documents take if each has rows of its own, by source."""
    spreads: list[Spread]
    tags: list[list[TagCounts]]
    """Counts of tags for each source."""
    stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, number: int, survey: Survey, advance: Callable[[float], None]) -> None:
        mix = self.spec.mix
        length, overlong = mix.pack.length, mix.overlong_S[number]
        if mix.sources[mix.names[number]].concat_transform is not None:
            overlong = "split"  # joined documents are neither left out nor refused
        for looked in survey.looked():
            if self.stopped.is_set():
                return
            tokens_N = trained_on(looked.lengths_N, length, overlong)
            self.lengths[number].add(tokens_N)
            self.rows[number] += int(np.ceil(tokens_N / length).sum())
            for counts in self.tags[number]:
                counts.add(looked.tags, tokens_N)
            self.spreads[number].add(looked.unit, looked.lengths_N)
            self.bad[number] += looked.bad
            if overlong in ("drop", "refuse"):
                self.longer[number] += int((looked.lengths_N > length).sum())
            # Sources share one counter, because a document of one source is searched in all.
            with self._lock:
                self.counter.add(number, looked.hashes_N)
            advance(len(looked.lengths_N) + looked.bad)

    def said_of_longer(self, number: int, looked_at: int) -> str:
        """Return what happens to the documents longer than a row, of a source of which ``looked_at`` were looked at."""
        mix, documents = self.spec.mix, f"{looked_at:,} documents of {self.spec.mix.names[number]}"
        overlong = mix.overlong_S[number]
        return said_of_longer(self.longer[number], documents, mix.pack.length, overlong)


def _survey(spec: PlaneSpec, sample: int | None) -> tuple[list[Survey], _Looking]:
    names, mix = spec.mix.names, spec.mix
    looking = _Looking(
        spec=spec,
        counter=DuplicateCounter(len(names)),
        lengths=[LengthHistogram() for _ in names],
        bad=[0] * len(names),
        longer=[0] * len(names),
        rows=[0] * len(names),
        spreads=[Spread() for _ in names],
        tags=[[TagCounts(tag) for tag in tags_counted(mix.columns_used)] for _ in names],
    )
    shards = open_shard_cache(mix.loader.shard_cache, spec.base_dir)
    with ThreadPoolExecutor(_THREADS) as pool:
        surveys = list(
            pool.map(
                lambda name: open_survey(
                    SourceSpec.drawn(mix, name, spec.base_dir, spec.cache_dir),
                    shard_cache=shards,
                    sample=sample,
                ),
                names,
            )
        )
        with progress("documents", sum(survey.wanted for survey in surveys)) as advance:
            try:
                # The results are iterated although they are empty, because this raises errors of the threads.
                for _ in pool.map(
                    lambda s: looking.look(s, surveys[s], advance), range(len(names))
                ):
                    pass
            finally:
                # The pool waits for its threads, which would otherwise read to the end of their sources after Ctrl-C.
                looking.stopped.set()
    if barren := [
        n for n, lengths in zip(names, looking.lengths, strict=True) if not lengths.tokens
    ]:
        raise ConfigError(
            f"sources {barren}: the documents looked at give 0 tokens to train on; correct their text key, raise "
            "--sample, or remove them"
        )
    return surveys, looking


def _sizes_of(mix: MixConfig, surveys: Sequence[Survey], looking: _Looking) -> SourceSizes:
    """Return what sources hold, by the documents that were looked at."""
    drawn_S = np.asarray(
        [
            # Only records that could be decoded have a length.
            mix.sources[name].share_drawn * (1 - bad / max(survey.wanted, 1))
            for name, survey, bad in zip(mix.names, surveys, looking.bad, strict=True)
        ]
    )
    looked_S = [max(each.documents + each.empty, 1) for each in looking.lengths]
    return SourceSizes.of(
        mix,
        [float(survey.records) for survey in surveys],
        drawn_S * [lengths.mean for lengths in looking.lengths],
        [survey.behind for survey in surveys],
        drawn_S * looking.rows / looked_S,
        drawn_S * [lengths.documents for lengths in looking.lengths] / looked_S,
    )


def _gathered(
    mix: MixConfig,
    surveys: Sequence[Survey],
    looking: _Looking,
    steps: int | None,
    rate: Rate | None,
) -> Stats:
    """Combine the findings with the mix's use of them."""
    sizes = _sizes_of(mix, surveys, looking)
    per_step = sizes.tokens_per_step(mix)
    every_S = sizes.epoch_tokens_S
    first_S = sizes.tokens_of(np.ones(len(every_S)))
    num_steps = steps or max(1, round(float(first_S.sum()) / per_step))
    mix = with_expected_steps(mix, sizes, num_steps)
    expected = forecast(mix, sizes, num_steps)
    epochs = steps_per_epoch(mix, sizes)
    differences = {
        name: Differences(
            units=surveys[s].units,
            between=looking.spreads[s].between,
            along=looking.spreads[s].along,
        )
        for s, name in enumerate(mix.names)
    }
    return Stats(
        steps=expected.total.stop,
        tokens_per_step=per_step,
        sources=tuple(
            SourceStats(
                name=name,
                records=surveys[s].records,
                looked_at=surveys[s].wanted,
                bad=looking.bad[s],
                lengths=looking.lengths[s],
                epoch_tokens=round(float(every_S[s])),
                steps_per_epoch=epochs[s],
                epochs=float(expected.total.epochs_S[s]),
                # For a split, its part of all records counts, although every document was looked at.
                is_rough=surveys[s].wanted < surveys[s].records
                or mix.sources[name].share_drawn < 1,
                skips=mix.sources[name].on_error.policy == "skip",
                longer=looking.said_of_longer(s, surveys[s].wanted),
            )
            for s, name in enumerate(mix.names)
        ),
        duplicates=looking.counter.found(),
        rate=rate,
        padded=tuple(rooms_left(mix, sizes)),
        sorted=tuple(sorted_files(mix, differences)),
        tags=tuple(shares_of_run(looking.tags, expected.total.tokens_S)),
    )


@contextmanager
def _bad_records_untold() -> Iterator[None]:
    """Keep a planner from logging bad records epoch after epoch, because the survey has counted them."""
    log = logging.getLogger(planned_counts.__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _refusing_none(mix: MixConfig) -> MixConfig:
    """Return a mix that cuts or leaves out the documents that ``mix`` refuses, to know the rate of the others."""
    if mix.refusing_S is None:
        return mix
    sources = {
        name: source.model_copy(
            update={
                "overlong": "drop" if source.images_transform or source.pair_columns else "split"
            }
        )
        if refuses
        else source
        for (name, source), refuses in zip(mix.sources.items(), mix.refusing_S, strict=True)
    }
    return mix.model_copy(update={"sources": sources})


def _measure(spec: PlaneSpec, seconds: float) -> Rate | None:
    """Take batches of one rank for a while; batches built before the first request do not count."""
    at_s: list[float] = []
    tokens: list[int] = []
    with (
        progress("measuring", seconds) as advance,
        _bad_records_untold(),
        # Without an end of its own, because the clock below limits it.
        LocalPlane(replace(spec, mix=_refusing_none(spec.mix), num_steps=None)) as plane,
        Client(plane.handle(0)) as client,
    ):
        # Measured from the first batch on, because opening may take longer than the rest. A rate needs two batches.
        while len(at_s) < 2 or at_s[-1] - at_s[0] < seconds:
            batch = client.next_batch()
            if batch is None:
                break
            at_s.append(time.perf_counter())
            tokens.append(sum(batch.tokens_by_source.values()))
            advance(at_s[-1] - at_s[-2] if len(at_s) > 1 else 0.0)
    if len(at_s) < 2:
        return None  # the data ends with the first step
    # Batches built before the first request arrive at once, and say nothing about the rate.
    first = min(spec.mix.steps_ahead, len(at_s) // 2)
    taken_s = at_s[-1] - at_s[first - 1]
    return Rate(
        tokens_per_s=sum(tokens[first:]) / taken_s, steps=len(at_s) - first, seconds=taken_s
    )
