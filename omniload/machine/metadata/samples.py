"""Metadata of samples beyond their length, as the planner keeps it: loss masks, images, documents and tags.

Tags are requested with a read, and reported with it. If no cost and no strategy reads a tag, the messages are the same
as without this feature::

    planner --ReadAheadWithTags--> source loader --ReportWithTags--> planner

Shape suffixes:
    N  samples of a report        P  pieces        W  words
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged, taken_across
from omniload.batch.rows import stops_with_next
from omniload.machine.held.blocks import SampleRange
from omniload.machine.images import ImageSpans
from omniload.machine.messages import ReadAhead, SamplesReported
from omniload.machine.metadata.reported import ReportedSpans, Reports
from omniload.mix.columns import (
    DOCUMENT_STARTS,
    LOSS_SPANS,
    NO_COLUMNS,
    column_kind,
    joined_ranges,
    name_outside,
    overlap_of,
)
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import Coded, SampleTable
from omniload.plan.costs.declared import column_of_tag
from omniload.plan.costs.words import INSTEAD, fault_of_words, shown
from omniload.plan.records import PieceFacts, PieceTags, documents_between

__all__ = [
    "MOST_WORDS",
    "LossSpans",
    "ReadAheadWithTags",
    "ReportWithTags",
    "ReportedTags",
    "SampleMetadata",
    "asked_with_tags",
    "reported_with_tags",
    "tags_in",
]

MOST_WORDS = 4_096
"""Most different texts of one tag per planner; with more texts, a tag names single documents and not kinds of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAheadWithTags(ReadAhead):
    """As ``ReadAhead``, and report some tags of the samples too."""

    tags: tuple[str, ...]
    """Whole-sample columns, by their internal names; the same in every read of a plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportWithTags(SamplesReported):
    """As ``SamplesReported``, with the requested tags."""

    tags: Mapping[str, Coded]
    """Tags by column, ``[N]`` of the table, except columns that the source lacks: its samples have the default."""


def asked_with_tags(read: ReadAhead, tags: tuple[str, ...]) -> ReadAhead:
    """Return the read with a request for these tags; without tags, the read itself."""
    if not tags:
        return read
    return ReadAheadWithTags(
        **{f.name: getattr(read, f.name) for f in fields(ReadAhead)}, tags=tags
    )


def reported_with_tags(
    report: SamplesReported, blocks: Sequence[SampleRange], tags: Sequence[str], source: str
) -> SamplesReported:
    """Return the report with the tags of its samples; without tags, the report itself.

    Args:
        report: The report.
        blocks: The blocks that it reports, in order.
        tags: Whole-sample columns, by their internal names.
        source: Name of the source, for messages.

    Raises:
        ConfigError: A text is longer than a report may carry, or ends in NUL.
    """
    if not tags:
        return report
    # A block without samples may lack columns that the others have.
    given = [block for block in blocks if len(block.table)]
    had = [tag for tag in tags if any(tag in block.others for block in given)]
    return ReportWithTags(
        **{f.name: getattr(report, f.name) for f in fields(SamplesReported)},
        tags={tag: _coded(tag, given, source) for tag in had},
    )


def tags_in(report: SamplesReported) -> Mapping[str, Coded]:
    """Return the tags of a report's samples."""
    return report.tags if isinstance(report, ReportWithTags) else NO_COLUMNS


def _coded(tag: str, blocks: Sequence[SampleRange], source: str) -> Coded:
    parts = [block.others.get(tag, block.tokens.lengths_N) for block in blocks]
    values_N = joined_ranges(tag, parts).packed()
    if column_kind(tag).dtype != np.uint8:
        return Coded(values_N=values_N.values_V)
    if fault := fault_of_words(values_N):
        raise ConfigError(
            f"sources.{source}: balance reads columns.{name_outside(tag)} of every sample, and one has {fault}"
        )
    return Coded.of_texts(values_N)


@dataclass(frozen=True, slots=True)
class _Values:
    """Tags of the samples of a report, by column; texts are stored as numbers."""

    by_tag: Mapping[str, NDArray[Any]]

    def between(self, first: int, last: int) -> "_Values":
        return _Values({tag: values_N[first:last] for tag, values_N in self.by_tag.items()})


@dataclass(slots=True)
class ReportedTags(Reports[_Values]):
    """Tags of the samples in a planner's queues."""

    tags: tuple[str, ...] = ()
    """Whole-sample columns, by their internal names, that costs and strategies read."""
    _numbers: dict[str, dict[str, int]] = field(default_factory=dict, init=False)
    """For each text tag, the number of every word; a word has the same number in all reports."""

    def __post_init__(self) -> None:
        for tag in self.tags:
            if column_kind(tag).dtype == np.uint8:
                self._numbers[tag] = {_default_text(tag): 0}

    def add(self, source: int, table: SampleTable, tags: Mapping[str, Coded]) -> None:
        """Add the tags of the samples of ``table``; ``tags`` may continue beyond them.

        Raises:
            ConfigError: A tag has more different texts than a planner keeps.
        """
        held = {tag: coded for tag, coded in tags.items() if tag in self.tags}
        if held:
            parts = {t: self._own(t, coded.between(0, len(table))) for t, coded in held.items()}
            self.keep(source, table, _Values(parts))

    def _own(self, tag: str, coded: Coded) -> NDArray[Any]:
        if coded.words is None:
            return coded.values_N
        numbers = self._numbers[tag]
        own = [numbers.setdefault(word, len(numbers)) for word in coded.words]
        if len(numbers) > MOST_WORDS:
            raise ConfigError(
                f"balance reads columns.{name_outside(tag)}, which has more than {MOST_WORDS:,} different texts by "
                f"now, {shown(coded.words[-1])} among them; {INSTEAD}"
            )
        own_W = np.array(own, np.uint16)  # uint16 holds all 4,096 numbers
        return own_W.take(coded.values_N)

    def of(self, pieces: PieceTable) -> PieceTags:
        """Return the tags of each piece's sample, ``[P]``, by the names that costs and strategies use.

        Texts become an array of strings of this step alone, so that nothing in it depends on other steps.
        """
        if not self.tags:
            return {}
        found = {tag: self._defaults(tag, len(pieces)) for tag in self.tags}
        for at, keys_P, reports in self.of_pieces(pieces):
            for each in reports:
                here, rows = each.rows_of(keys_P)
                for tag, values_N in each.held_N.by_tag.items() if len(here) else ():
                    found[tag][at[here]] = values_N[rows]
        return {column_of_tag(tag): self._told(tag, values_P) for tag, values_P in found.items()}

    def _defaults(self, tag: str, count: int) -> NDArray[Any]:
        if tag in self._numbers:
            return np.zeros(count, np.uint16)
        kind = column_kind(tag)
        return np.full(count, 0 if kind.default is None else kind.default, kind.dtype)

    def _told(self, tag: str, values_P: NDArray[Any]) -> NDArray[Any]:
        if (numbers := self._numbers.get(tag)) is None:
            return values_P
        # Counting instead of sorting, because there are few numbers and many pieces.
        there = np.bincount(values_P, minlength=len(numbers)).nonzero()[0]
        words, places_W = list(numbers), np.zeros(len(numbers), np.int64)
        places_W[there] = np.arange(len(there))
        texts = np.array([words[number] for number in there.tolist()], np.str_)
        texts_P: NDArray[Any] = texts[places_W[values_P]]
        return texts_P


def _default_text(tag: str) -> str:
    default = column_kind(tag).default
    return default if isinstance(default, str) else ""


@dataclass(slots=True)
class LossSpans(ReportedSpans):
    """Trained spans in samples of sources with a loss mask: the first token of a span, and the first one after it."""

    column: ClassVar[str] = LOSS_SPANS

    def labels_left_out(self, pieces: PieceTable) -> int:
        """Return how many labels of a step's pieces are not trained on; each token but a piece's first is a label."""
        masked, places, rows, spans = [], [], [], []
        for at, keys_P, reported in self.of_pieces(pieces):
            masked.append(at)
            for each in reported:
                here, found = each.rows_of(keys_P)
                if len(here):
                    places.append(at[here])
                    rows.append(found)
                    spans.append(each.held_N)
        if not masked:
            return 0
        # For all sources at once, because a small step has a few pieces each of many sources.
        starts_P, stops_P = pieces.starts_P + 1, stops_with_next(pieces)
        at = np.concatenate(masked)
        # Start with all labels of these pieces; those that spans cover are subtracted below.
        left_out = int((stops_P[at] - starts_P[at]).sum())
        if spans:
            at = np.concatenate(places)
            left_out -= overlap_of(taken_across(spans, rows), starts_P[at], stops_P[at])
        return left_out


@dataclass(slots=True)
class _DocumentStarts(ReportedSpans):
    """Beginnings of documents inside samples that join several documents but keep their attention separate."""

    column: ClassVar[str] = DOCUMENT_STARTS

    def documents_of(self, pieces: PieceTable) -> Ragged | None:
        """Return the lengths of the documents of each piece; ``None`` if each piece is one document.

        A sample of several documents is never cut.
        """
        if not self._of_source:  # nearly every mix
            return None
        ends_P = np.cumsum(pieces.lengths_P, dtype=np.int64)
        begins_P, starts = ends_P - pieces.lengths_P, []
        for at, keys_P, reported in self.of_pieces(pieces):
            for here, rows, found in ((*each.rows_of(keys_P), each.held_N) for each in reported):
                found_P = found.take(rows)
                starts.append(np.repeat(begins_P[at[here]], found_P.lengths_N) + found_P.values_V)
        return documents_between(begins_P, ends_P, starts)


@dataclass(slots=True)
class SampleMetadata:
    """Reported metadata of samples beyond their length, from the planner's floor on.

    Sources that report none cost nothing.
    """

    tags: tuple[str, ...] = ()
    """Whole-sample columns, by their internal names, that costs and strategies read."""
    _loss_spans: LossSpans = field(default_factory=LossSpans, init=False)
    _image_spans: ImageSpans = field(default_factory=ImageSpans, init=False)
    _starts: _DocumentStarts = field(default_factory=_DocumentStarts, init=False)
    _tags: ReportedTags = field(init=False)

    def __post_init__(self) -> None:
        self._tags = ReportedTags(tags=self.tags)

    def add(self, source: int, table: SampleTable, tags: Mapping[str, Coded] = NO_COLUMNS) -> None:
        """Add a report of a source; ``tags`` are those of its samples.

        Raises:
            ConfigError: A tag has more different texts than a planner keeps.
        """
        for spans in (self._loss_spans, self._image_spans, self._starts):
            spans.add(source, table)
        self._tags.add(source, table, tags)

    def forget(self, source: int, position: int) -> None:
        """Forget a source's samples from ``position`` on, because they will be reported again."""
        for spans in (self._loss_spans, self._image_spans, self._starts):
            spans.forget(source, position)
        self._tags.forget(source, position)

    def release(self, floors: Mapping[int, int]) -> None:
        """Release samples before these positions."""
        for spans in (self._loss_spans, self._image_spans, self._starts):
            spans.release(floors)
        self._tags.release(floors)

    def of(self, pieces: PieceTable) -> PieceFacts:
        """Return the metadata of the pieces of a step."""
        return PieceFacts(
            labels_left_out=self._loss_spans.labels_left_out(pieces),
            images=self._image_spans.table_of(pieces),
            documents=self._starts.documents_of(pieces),
            tags=self.tags_of(pieces),
        )

    def tags_of(self, pieces: PieceTable) -> PieceTags:
        """Return the tags of pieces whose samples a rank may still ask for."""
        return self._tags.of(pieces)
