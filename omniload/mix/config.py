"""The data-mix file: sources, weights in stages, packing, batch, balance.

The file says what the user wrote. What only a run knows (ranks, mesh) is handed in
beside it, so one file serves any number of ranks.
"""

import difflib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from omniload.base.config import StrictModel, fault_at, raise_faults, validated
from omniload.base.settings.include import read_settings
from omniload.base.settings.quantities import Count
from omniload.mix.columns import ALWAYS_USED
from omniload.mix.runtime import BalanceConfig, LoaderConfig, PipelineConfig, RuntimeConfig
from omniload.mix.schema.amounts import faults_of_amounts
from omniload.mix.schema.caps import faults_of_caps, faults_of_waits
from omniload.mix.schema.cuts import documents_cut, no_sequences, packs_at_odds
from omniload.mix.schema.packing.source_packs import SourcePacking
from omniload.mix.schema.records import Overlong
from omniload.mix.schema.sources.own_columns import faults_of_columns
from omniload.mix.schema.splits import TRAIN, Split, Splits
from omniload.mix.schema.stages import LARGEST_STEP, Stage, WeightsConfig, came_with_version_2
from omniload.mix.schema.token_steps import names_tokens, with_steps
from omniload.mix.schema.tokenizers import BpeTokenizer, ByteTokenizer, TokenizerConfig
from omniload.mix.sources import (
    JsonlSource,
    Name,
    OnError,
    ParquetSource,
    ShuffleConfig,
    SourceConfig,
    TextSource,
)

__all__ = [
    "LARGEST_STEP",
    "BalanceConfig",
    "BatchConfig",
    "BpeTokenizer",
    "ByteTokenizer",
    "JsonlSource",
    "MixConfig",
    "OnError",
    "PackConfig",
    "ParquetSource",
    "PipelineConfig",
    "ShuffleConfig",
    "SourceConfig",
    "Stage",
    "TextSource",
    "TokenizerConfig",
    "WeightsConfig",
    "load_mix",
]

LARGEST_ROW = 1 << 24
"""Tokens of a row at most: 64 MiB of token ids, and more than any model attends to."""
LARGEST_BATCH = 1 << 32
"""Tokens of a step at most: 16 GiB of token ids, a hundred times the largest batches in use."""
MOST_ROWS = 1 << 20
"""Rows of a step, or of what waits for one, at most: the planner keeps a record of each."""
_LEAST_AHEAD, _MOST_AHEAD, _TOKENS_AHEAD = 4, 64, 1 << 22
"""Steps that are built ahead where the mix does not say how many, and the tokens that they hold about, between the two;
half as many with images, and no more of these than ``loader.memory`` holds: two steps at least."""
_TOKENS_AT_ONCE, _MOST_AT_ONCE = 1 << 21, 32
"""Tokens and steps of a window at most; a longer one costs little less a step, and its first waits for more."""
_SHOWN = 12
"""Names of sources that a message lists."""


class PackConfig(StrictModel):
    """How documents are packed into rows of fixed length."""

    length: Count = Field(ge=2, le=LARGEST_ROW)
    """Tokens in a row."""
    method: Literal["best_fit", "concat_and_split", "none"] = "best_fit"
    """``best_fit`` keeps documents whole. ``concat_and_split`` fills each row and cuts documents where a row ends.
    ``none`` gives every document a row of its own, padded on the right."""
    overlong: Overlong = "split"
    """What to do with a document longer than a row: ``split`` cuts it into pieces, ``truncate`` keeps its start,
    ``drop`` leaves it out and counts it, ``refuse`` ends the run at the step that would draw it. Sources may override
    it."""
    lookahead_rows: Count = Field(default=1, ge=0, le=MOST_ROWS)
    """Best fit chooses from this many more rows of documents than it fills; the others wait for the next step."""


class BatchConfig(StrictModel):
    """How much one step trains on."""

    tokens: Count = Field(ge=2, le=LARGEST_BATCH)
    """Tokens of a step over all ranks; a multiple of ``pack.length``."""
    micro_tokens: Count = Field(ge=2, le=LARGEST_BATCH)
    """Largest number of tokens in one microbatch of one rank; a multiple of ``pack.length``."""
    columns: tuple[str, ...] = ()
    """Columns that batches bring in addition to the tokens: ``scores`` and ``text`` of whole samples, and your own
    columns, which a source declares under ``columns``. Other columns are not read."""
    pipeline: PipelineConfig = PipelineConfig()
    """Which columns each pipeline stage uses, if the mesh has ``pp``."""


class MixConfig(StrictModel):
    """A declared mix of sources."""

    version: Literal[1, 2]
    """Version of this format. Version 2 adds groups of weights, stages by tokens, forms of ramps, ``include`` and
    variables. A file of version 1 keeps its meaning. Later keys, such as ``where``, are valid in both versions; a
    release that does not know such a key refuses it by name."""
    seed: int = Field(ge=0, lt=1 << 63)
    """Decides every order. The same seed gives the same samples in every step."""
    sources: dict[Name, SourceConfig] = Field(min_length=1, max_length=32_767)
    """The sources by name, at most 32,767. The order of the keys has no effect, because sources are sorted by name."""
    mix: WeightsConfig
    """Weights of the sources over time."""
    pack: PackConfig
    """Packing of documents into rows."""
    batch: BatchConfig
    """Size of a step."""
    tokenizer: TokenizerConfig | None = None
    """Required if a source holds text."""
    splits: Splits = Field(default_factory=dict)
    """Shares of the documents to hold out, such as ``{eval: 0.01}``. A hash of each document's key or content decides
    its split. The shares are laid end to end in the order of the file, so add new splits at the end."""
    split: Split = TRAIN
    """The split to draw from; ``train`` is everything that no split holds out."""
    balance: BalanceConfig = BalanceConfig()
    """How work is shared equally among ranks."""
    loader: LoaderConfig = LoaderConfig()
    """Memory of source loaders, and the number of readers per source."""
    runtime: RuntimeConfig = RuntimeConfig()
    """How the data plane runs: in threads, or as actors."""

    @model_validator(mode="before")
    @classmethod
    def _version_1_means_what_it_meant(cls, content: object) -> object:
        if not isinstance(content, Mapping) or content.get("version") != 1:
            if isinstance(content, Mapping) and "include" in content:  # a file's is already merged
                raise fault_at(
                    "a mapping includes no files; give the path of the mix file", "include"
                )
            return content
        # Refused, because releases that know no other version read these files too, and must read the same mix.
        if "include" in content:
            raise fault_at("include came with version 2; write version: 2", "include")
        mix = content.get("mix")
        if isinstance(mix, Mapping) and "amounts" in mix:
            raise fault_at("amounts came with version 2; write version: 2", "mix", "amounts")
        stages = mix.get("stages") if isinstance(mix, Mapping) else None
        raise_faults(
            fault_at(
                f"{holds}, and the file is of version 1; write version: 2",
                *("mix", "stages", i, key),
            )
            for i, stage in enumerate(stages if isinstance(stages, list | tuple) else ())
            for key, holds in came_with_version_2(stage)
        )
        return content

    @model_validator(mode="before")
    @classmethod
    def _stages_begin_at_steps(cls, content: object) -> object:
        """Turn tokens into steps: weights are looked up by step, and a run goes on by steps."""
        mix = content.get("mix") if isinstance(content, Mapping) else None
        stages = mix.get("stages") if isinstance(mix, Mapping) else None
        if not isinstance(stages, list | tuple) or not any(map(names_tokens, stages)):
            return content
        assert isinstance(content, Mapping), "it has stages"
        assert isinstance(mix, Mapping), "it has stages"
        batch = content.get("batch")
        batch_tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
        dated: list[object] = []
        for i, stage in enumerate(stages):
            at = ("mix", "stages", i)
            try:
                dated.append(with_steps(stage, batch_tokens) if names_tokens(stage) else stage)
            except PydanticCustomError as fault:
                below = (fault.context or {}).get("at", ())
                raise fault_at(fault.message(), *at, *below) from fault
        return {**content, "mix": {**mix, "stages": dated}}

    def declared(self) -> dict[str, Any]:
        """Return what was declared, tokens of stages in place of the steps that they came to."""
        content = self.model_dump()
        written = content["mix"].get("stages", ())  # none where there are amounts
        for given, stage in zip(written, self.mix.stages, strict=False):
            if stage.from_tokens is not None:
                del given["from_step"]
                given["from_tokens"] = stage.from_tokens
            if stage.from_epochs is not None:
                del given["from_step"]
            if stage.ramp_tokens is not None:
                del given["ramp_steps"]
                given["ramp_tokens"] = stage.ramp_tokens
        if caps := self.mix.group_caps:
            content["mix"]["group_caps"] = [cap.model_dump() for cap in caps]
        return content

    @field_validator("sources")
    @classmethod
    def _sorted_by_name(cls, sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        """Number the sources by name alone: numbers break ties of the mix and order its sums."""
        return dict(sorted(sources.items()))

    @field_validator("batch")
    @classmethod
    def _micro_fits(cls, batch: BatchConfig) -> BatchConfig:
        if batch.micro_tokens > batch.tokens:
            raise fault_at(
                f"micro_tokens is {batch.micro_tokens}, more than tokens {batch.tokens}; lower it",
                "micro_tokens",
            )
        return batch

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        """Say at once whatever one key asks of another; each by itself is sound here."""
        raise_faults(
            self._faults_of_splits(),
            self._faults_of_names(),
            self.loader.faults_of_names(self.sources),
            faults_of_caps(self.sources, self.mix),
            self._faults_of_rows(),
            self._faults_of_text(),
            faults_of_columns(self.sources, self.batch.columns),
            documents_cut(self.sources, self.pack),
            no_sequences(self.sources, self.pack, self.mix.level),
            packs_at_odds(self.sources, self.pack, self.mix.level),
        )
        return self

    def _faults_of_splits(self) -> Iterator[PydanticCustomError]:
        """Hand down the splits: whoever is given a source is told what of it is drawn."""
        for name, source in self.sources.items():
            try:
                # The only change of the validated model: the dictionary belongs to it, and nobody has seen it yet.
                self.sources[name] = self.inherited(source)
            except PydanticCustomError as fault:
                below = (fault.context or {}).get("at", ())
                at = ("sources", name, *below) if below else ("split",)
                yield fault_at(f"sources.{name}.{fault.message()}", *at)

    def _faults_of_names(self) -> Iterator[PydanticCustomError]:
        if self.mix.amounts is not None:
            yield from faults_of_amounts(self.mix.amounts, self.sources, self.mix.repetition_caps)
            return
        for i, stage in enumerate(self.mix.stages):
            for name in sorted((stage.from_epochs or {}).keys() - self.sources.keys()):
                yield fault_at(
                    f"{name!r} is not among sources {sorted(self.sources)[:_SHOWN]}; wait for one of them",
                    *("mix", "stages", i, "from_epochs", name),
                )
            unknown = sorted(stage.weights.keys() - self.sources.keys())
            for n, name in enumerate(unknown):
                # Searching for a similar name takes time, so it is done only for the names that are shown.
                near = difflib.get_close_matches(name, self.sources, n=1) if n < _SHOWN else ()
                meant = f"did you mean {near[0]!r}? " if near else ""
                yield fault_at(
                    f"{name!r} is not among sources {sorted(self.sources)[:_SHOWN]}; {meant}declare the source or "
                    "remove the weight",
                    *("mix", "stages", i, "weights", name),
                )
        yield from faults_of_waits(self.sources, self.mix)
        weights = [each for stage in self.mix.stages for each in stage.weights.items()]
        named = {name for name, weight in weights if weight > 0}
        for name in sorted(self.sources.keys() - named):
            yield fault_at(
                f"{name!r} has no weight in any stage; give it one or remove it", "sources", name
            )

    def _faults_of_rows(self) -> Iterator[PydanticCustomError]:
        for key in ("tokens", "micro_tokens"):
            value = getattr(self.batch, key)
            if value % self.pack.length:
                yield fault_at(
                    f"batch.{key} is {value}, not a multiple of pack.length {self.pack.length}; "
                    f"use {max(1, round(value / self.pack.length)) * self.pack.length}",
                    *("batch", key),
                )
        if self.rows_per_step > MOST_ROWS:
            yield fault_at(
                f"batch.tokens {self.batch.tokens} is {self.rows_per_step} rows of pack.length {self.pack.length}, "
                f"more than {MOST_ROWS}; lower it, or use longer rows",
                *("batch", "tokens"),
            )
        waiting = self.pack.lookahead_rows * self.pack.length
        if waiting > LARGEST_BATCH:
            yield fault_at(
                f"pack.lookahead_rows {self.pack.lookahead_rows} of pack.length {self.pack.length} is {waiting} tokens "
                f"that wait for a row, more than {LARGEST_BATCH}; lower it to "
                f"{LARGEST_BATCH // self.pack.length} or less",
                *("pack", "lookahead_rows"),
            )

    def _faults_of_text(self) -> Iterator[PydanticCustomError]:
        texts = [name for name, source in self.sources.items() if source.holds_text]
        if texts and self.tokenizer is None:
            yield fault_at(
                f"sources.{texts[0]} holds text and there is no tokenizer; add one, such as "
                "tokenizer: {type: bytes}",
                *("sources", texts[0]),
            )

    def inherited(self, source: SourceConfig) -> SourceConfig:
        """Return a source with what it leaves to the mix.

        Raises:
            PydanticCustomError: It has no such split.
        """
        return source.within(self.splits, self.split)

    # Cached, like those below: every report and step asks for it, and a mix may have thousands of sources.
    @cached_property
    def names(self) -> tuple[str, ...]:
        """Source names, sorted; a source's number is its place here."""
        return tuple(self.sources)

    @cached_property
    def overlong_S(self) -> list[Overlong]:
        """What becomes of each source's documents that are longer than a row."""
        return [source.overlong or self.pack.overlong for source in self.sources.values()]

    @cached_property
    def columns_used(self) -> tuple[str, ...]:
        """Every column that becomes part of a batch; masks, pairs, images and documents wherever it has any."""
        own: dict[str, str] = {}
        for source in self.sources.values():
            for n, c in source.own_columns.items():
                own.setdefault(n, c.inside(n))  # the first decides, as the run was opened with it
        return (*ALWAYS_USED, *(own.get(name, name) for name in self.batch.columns))

    @cached_property
    def refusing_S(self) -> tuple[bool, ...] | None:
        """Of which sources such a document ends the run; ``None`` where of none."""
        found = tuple(overlong == "refuse" for overlong in self.overlong_S)
        return found if any(found) else None

    @cached_property
    def own_packing(self) -> SourcePacking | None:
        """How documents of each source become rows, where sources differ; else ``None``."""
        packs = (source.pack for source in self.sources.values())
        return SourcePacking.of(packs, self.pack.method)

    @property
    def rows_ahead(self) -> int:
        """Rows' worth of documents that a step draws beyond its own rows: wherever some stay whole."""
        whole = self.pack.method == "best_fit" or self.own_packing is not None
        return self.pack.lookahead_rows if whole else 0

    @cached_property
    def tags_S(self) -> tuple[dict[str, str], ...]:
        """Tags of each source."""
        return tuple(source.tags for source in self.sources.values())

    @property
    def rows_per_step(self) -> int:
        """Rows of one step over all ranks."""
        return self.batch.tokens // self.pack.length

    @cached_property
    def steps_ahead(self) -> int:
        """Steps that are built ahead of the slowest rank."""
        least, tokens = _LEAST_AHEAD, _TOKENS_AHEAD
        images = (source.images_transform for source in self.sources.values())
        if weight := max((each.values_per_token for each in images if each is not None), default=0):
            least, tokens = least // 2, min(tokens // 2, self.loader.memory // weight)
        fitting = max(least, tokens // self.batch.tokens)
        return self.runtime.prefetch_steps or min(fitting, _MOST_AHEAD)

    @cached_property
    def steps_at_once(self) -> int:
        """Steps that are planned, built and handed over together: what each costs beside its tokens is shared."""
        # At most half of the steps ahead, because one window is made while ranks take the other.
        most = min(_MOST_AT_ONCE, self.steps_ahead // 2)
        return max(1, min(_TOKENS_AT_ONCE // self.batch.tokens, most))

    @property
    def steps_held(self) -> int:
        """Steps that some rank may ask for at once: those ahead of the slowest, and what it may take again."""
        return self.steps_ahead + self.runtime.elastic

    @property
    def rows_per_microbatch(self) -> int:
        """Most rows in one microbatch."""
        return self.batch.micro_tokens // self.pack.length


def load_mix(path: str | Path) -> tuple[MixConfig, Path]:
    """Read a mix file; return the mix, and the folder that its relative paths start at.

    Raises:
        ConfigError: The file is missing or faulty; every fault with its line.
    """
    file = Path(path)
    root, verb = read_settings(file).root, "omniload mix check"
    return validated(root, MixConfig, name=str(file), verb=verb), file.resolve().parent
