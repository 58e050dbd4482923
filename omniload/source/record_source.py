"""The source of records: reads records through a format, makes samples of them and returns the samples by position.

Shape suffixes:
    N  samples        R  records of a block, or of a read
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.base.errors import IntegrityError
from omniload.base.log import ONCE, get_logger
from omniload.base.ragged import numbers_of
from omniload.mix.fingerprint import SourceFacts
from omniload.mix.order import Order, Span
from omniload.mix.schema.splits import TRAIN
from omniload.source.block import Block, DecodedBlocks, UnitReader
from omniload.source.block_memory import BlockMemory
from omniload.source.distinct.drawn_before import drawn_before
from omniload.source.distinct.mask import RecordRules, distinct_records
from omniload.source.formats.format import Format, Records
from omniload.source.formats.held_files import HeldFiles
from omniload.source.formats.opening import ShardDigests, open_format
from omniload.source.parsing.token_lists import said_of_place
from omniload.source.parts.sample_block import BadOfSpan, SampleBlock, joined
from omniload.source.parts.share import WHOLE, Part, Share
from omniload.source.source import Source
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import ShardCache
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.source_tokens import SourceTokens
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.opening import open_pipeline
from omniload.source.transforms.pipeline import Pipeline
from omniload.source.transforms.sequences import Sequences, sequences_of

__all__ = ["RecordSource", "open_source"]

_LOG = get_logger(__name__)


_MOST_AHEAD = 2
"""Maximum number of blocks to decode ahead: the plane would pass a third block between two reports of its position."""
_AT_ONCE = 256
"""Records that are tokenised at once when tokens are made before a run."""
_EVERY_RECORD, _UNKNOWN = RecordRules(), ShardDigests()
_NONE, _NO_BAD = np.empty(0, np.int64), BadOfSpan()


class RecordSource(Source):
    """Reads records through a format, in the order of the source, one decoded block at a time.

    Not thread-safe, because a read replaces the decoded block.
    """

    def __init__(
        self,
        name: str,
        order: Order,
        record_format: Format,
        *,
        pipeline: Pipeline,
        rules: RecordRules = _EVERY_RECORD,
        digests: ShardDigests = _UNKNOWN,
    ) -> None:
        self.name = name
        self.facts = SourceFacts(
            positions_per_epoch=order.positions_per_epoch,
            order_digest=order.fingerprint,
            shards_digest=digests.names,
            content_digest=digests.contents,
            transforms_digest=pipeline.digest,
            drawn_before_digest="" if rules.drawn_before is None else rules.drawn_before.digest,
        )
        self.shards = digests.paths
        self._order, self._format = order, record_format
        self._pipeline, self._rules = pipeline, rules
        self._reader = UnitReader(
            read=record_format.read_unit,
            note=self._judge,
            drawn=rules.drawn_of,
            takes_bad=rules.on_error.policy == "skip",
            wants_keys=bool(rules.splits),
        )
        self._reason = ""
        """Fault of the last record that was left out; empty before the first."""
        self._has_told_rounded = False
        self._memory, self._blocks = BlockMemory(), DecodedBlocks()
        self._files: HeldFiles | None = None
        self._sequences: tuple[object, Sequences] | None = None

    def keeping(self, tokens: SourceTokens | None) -> Self:
        """Take samples from the entries of a token cache, and add new ones to the cache."""
        self._reader = replace(self._reader, tokens=tokens)
        return self

    def looking_at(self, files: HeldFiles) -> Self:
        """Check the files of units that are already in memory, too, whenever samples are drawn from those units."""
        self._files = files
        return self

    def share(self, memory: BlockMemory) -> None:
        """Decode blocks within a budget that is shared with other sources, beginning with the next block."""
        self._memory = memory

    @override
    def give_way(self) -> None:
        if self._memory.is_over():
            self.release()

    @override
    def shard_at(self, position: int) -> int:
        units_N = self._order.locate(position, position + 1).units_N
        return int(self._order.shards_of(units_N)[0])

    @override
    def place_at(self, position: int) -> tuple[str, str]:
        # A sequence joins several records of its unit, so its position belongs to none of them.
        if self._pipeline.concat is not None:
            return self.shards[self.shard_at(position)], ""
        found = self._order.locate(position, position + 1)
        unit, row = int(found.units_N[0]), int(found.rows_N[0])
        return self._places(unit, self._format.found_at)(row)

    @override
    def block_stop(self, position: int) -> int:
        return self._order.whole(next(self._order.spans(position, position + 1))).stop

    @override
    def decode_ahead(self, start: int, stop: int, without: tuple[int, ...] = ()) -> int:
        # Otherwise the sequences of two blocks would be in memory for as long as reads draw from the second.
        most = _MOST_AHEAD if self._pipeline.concat is None else 1
        spans = list(islice(self._order.spans(start, max(stop, start + 1)), most))
        shares = [self._share_of(span, WHOLE, without).units for span in spans]
        self._blocks.let_go(but=shares)
        for span, units in zip(spans, shares, strict=True):
            if units and self._pipeline.concat is None:
                self._decoded(units, beside=shares)
            elif units:
                self._joined(span, units, WHOLE, without)
        return self._order.whole(spans[-1]).stop

    @override
    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> SampleBlock:
        return self.read_part(start, stop, WHOLE, without)

    def read_part(
        self, start: int, stop: int, part: Part, without: tuple[int, ...] = ()
    ) -> SampleBlock:
        """Return the samples of a range, limited to the units of one part; see ``read``."""
        blocks = [
            block
            for span in self._order.spans(start, stop)
            if (block := self._read_span(span, part, without)) is not None
        ]
        return joined(blocks, start, stop)

    def make_tokens(self, unit: int) -> tuple[int | None, bool]:
        """Make the tokens of all records of a unit that a run draws, and keep them in the token cache.

        Returns:
            The number of tokens, ``None`` if the cache has a whole entry already, and whether it has one now.

        Raises:
            OmniloadError: As for ``read``.
        """
        block, is_kept = self._decoded((unit,)), True
        tokens = None
        if block.filling is not None:
            tokens = 0
            rows_R = np.flatnonzero(block.usable_R)
            for first in range(0, len(rows_R), _AT_ONCE):
                rows_N = rows_R[first : first + _AT_ONCE]
                samples = block.encoded(rows_N, self._pipeline)
                if samples.bad_N is not None:
                    self._judge_samples(block, rows_N, samples)
                tokens += len(samples.tokens.values_V)
            is_kept = block.filling.keep_whole_units()
        self.release()
        return tokens, is_kept

    def release(self) -> None:
        """Release the decoded block; the next read decodes it again."""
        self._blocks.let_go()
        self._sequences = None
        self._order.let_go()

    def _read_span(self, span: Span, part: Part, without: tuple[int, ...]) -> SampleBlock | None:
        """Return a part's samples of a span; ``None`` if the part has no unit of the block."""
        share = self._share_of(span, part, without)
        if not share.units:
            return None
        # With a thousand sources, the plane first waits for one or two records of each source, so only their units are
        # decoded at first. The whole block follows. The token cache and joined sequences need whole blocks.
        kept = self._pipeline.concat is not None or self._reader.tokens is not None
        if self._blocks.is_new and part is WHOLE and not kept:
            share = share.narrowed(self._format.units().rows_U)
        # Nothing else would check the files of units in memory, no matter how many epochs draw from them.
        if self._files is not None:
            self._files.require_unchanged(share.units)
        if self._pipeline.concat is None:
            return self._made(span, share)
        made = self._joined(span, share.units, part, without)
        return made.of_span(span, share, partial(self._bad_of, share))

    def _made(self, span: Span, share: Share) -> SampleBlock:
        block, rows = self._decoded(share.units), share.rows
        left_N = self._rules.leaves(span.epoch, rows, block.places_of)
        positions = share.positions_N(span.start)
        bad_rows = bad = _NONE
        # This is the case for nearly every block. For short records, per-record checks would dominate the time of a
        # read.
        is_whole = block.is_whole and left_N is np.True_
        if not is_whole:
            rows = rows_N = numbers_of(rows)
            if not (usable_N := block.usable_R[rows_N] & left_N).all():
                is_bad_N = block.bad_R[rows_N]
                bad_rows, bad = rows_N[is_bad_N], positions[is_bad_N]
                rows, positions = rows_N[usable_N], positions[usable_N]
        encoded = block.encoded(rows, self._pipeline)
        if block.filling is not None and block.filling.is_whole:
            self._blocks.keep_tokens(block)
        # The cache is filled before this point, because transforms of tokens depend on the position and an entry serves
        # every epoch.
        samples = self._pipeline.of(encoded, positions)
        if samples.bad_N is not None:
            self._judge_samples(block, numbers_of(rows), samples)
            bad_rows = np.concatenate((bad_rows, numbers_of(rows)[samples.bad_N]))
            bad = np.concatenate((bad, positions[samples.bad_N]))
        subs = np.zeros(len(positions), np.int32)
        if (cut := self._pipeline.cut(samples)) is not None:
            samples, of_record, subs = cut
            positions = positions[of_record]
        return SampleBlock.of(span, samples, positions, subs, self._bad_of(share, bad_rows, bad))

    def _joined(
        self, span: Span, units: tuple[int, ...], part: Part, without: tuple[int, ...]
    ) -> Sequences:
        """Return the sequences of the block of a span: the sequences in memory, or new ones that replace them."""
        whole = self._order.whole(span)
        # Sequences depend only on the units, unless documents depend on the position or are left out of the first
        # epoch.
        by_position = whole.start if self._pipeline.goes_by_position else 0
        key = (units, by_position, span.epoch == 0 and self._rules.drawn_before is not None)
        if self._sequences is None or self._sequences[0] != key:
            self._sequences = None  # two of them would take twice the memory
            block = self._decoded(units)
            made = sequences_of(
                block,
                (whole, self._share_of(whole, part, without)),
                self._rules.leaves(span.epoch, range(len(block.usable_R)), block.places_of),
                self._pipeline,
                memory=self._memory,
                judge=partial(self._judge_samples, block),
            )
            # The records are no longer needed. An entry of the token cache is kept, so the next epoch reads it, or
            # decodes.
            self._blocks.let_go()
            self._sequences = key, made
        return self._sequences[1]

    def _share_of(self, span: Span, part: Part, without: tuple[int, ...]) -> Share:
        held = self._order.block_of(span.epoch, span.block)
        asked = held.rows[span.offset : span.offset + span.stop - span.start]
        left_out_U = np.isin(self._order.shards_of(held.units_U), without) if without else None
        row_counts = self._format.units().rows_U
        return Share.of(part, span.block, held.units_U, row_counts, asked, left_out_U)

    def _bad_of(
        self, share: Share, rows_N: NDArray[np.int64], positions_N: NDArray[np.int64]
    ) -> BadOfSpan:
        """Describe bad records by their rows among the units of a share."""
        if not len(rows_N):
            return _NO_BAD
        begins_U = np.cumsum([0, *self._format.units().rows_U[list(share.units)].tolist()])
        in_order = np.argsort(positions_N)
        at_N = np.searchsorted(begins_U, rows_N[in_order], side="right") - 1
        places_U = [self._places(unit) for unit in share.units]
        records_N = (rows_N[in_order] - begins_U[at_N]).tolist()
        found = (places_U[u](row) for u, row in zip(at_N, records_N, strict=True))
        return BadOfSpan(
            positions_N=positions_N[in_order],
            places=tuple(map(said_of_place, found)),
            reason=self._reason,
        )

    def _places(
        self, unit: int, place_of: Callable[[str, int, int, int], tuple[str, str]] | None = None
    ) -> Callable[[int], tuple[str, str]]:
        """Return a function from a row of a unit to the place of its record, as ``place_of`` of the format names it."""
        shard = int(self._order.shards_of(np.asarray([unit], np.int64))[0])
        path = self.shards[shard] if self.shards else ""
        first = self._order.number_in_shard(unit, 0)  # once, because it goes through all units
        return partial(place_of or self._format.place_of, path, unit, first)

    def _judge_samples(self, block: Block, rows_N: NDArray[np.int64], samples: Samples) -> None:
        """Raise an error for records that could not be made into samples, or warn of them, as ``on_error`` says."""
        assert samples.bad_N is not None
        units, records = block.places_of(rows_N[samples.bad_N])
        place = self._places(int(units[0]))(int(records[0]))
        self._tell(f"{said_of_place(place)}: {samples.reason}")

    def _decoded(self, units: tuple[int, ...], beside: Sequence[tuple[int, ...]] = ()) -> Block:
        return self._blocks.of(units, self._reader, self._memory, beside)

    def _judge(self, records: Records) -> None:
        if records.reason:
            self._tell(records.reason)
        if records.rounded and not self._has_told_rounded:
            self._has_told_rounded = True
            _LOG.warning("sources.%s: %s", self.name, records.rounded, extra=ONCE)

    def _tell(self, reason: str) -> None:
        """Raise an error for bad records or warn of them, as ``on_error`` says. The planner limits their number."""
        if self._rules.on_error.policy == "raise":
            raise self._unmendable(reason)
        # The warning about the first record helps to find similar records; a count alone does not say what is wrong.
        if not self._reason:
            said = "sources.%s: %s; the record is left out, because on_error says so"
            _LOG.warning(said, self.name, reason, extra=ONCE)
        self._reason = reason

    def _unmendable(self, reason: str) -> IntegrityError:
        return IntegrityError(
            f"{reason}; fix it, or set on_error: {{policy: skip}} in sources.{self.name} to leave such records out"
        )


def open_source(
    spec: SourceSpec,
    *,
    token_cache: TokenCache | None = None,
    shard_cache: ShardCache | None = None,
    calls: LimitedCalls | None = None,
) -> RecordSource:
    """Open a source to draw from it.

    Args:
        spec: The source as the mix declares it.
        token_cache: Cache of the tokens of text; ``None`` makes the tokens each time.
        shard_cache: Cache of remote shards on this node; ``None`` reads shards from their stores each time.
        calls: Runs the listing of files, for a caller that opens many sources; by default a thread of this call does.

    Raises:
        ConfigError: Files or columns are missing, the source has no record, or text has no tokenizer.
        IntegrityError: A shard is truncated or corrupt.
        UnavailableError: A store did not answer.
    """
    name, config = spec.name, spec.config
    opened = open_format(spec, shard_cache=shard_cache, calls=calls)
    opened.require_records(spec)
    record_format, units = opened.format, opened.format.units()
    pipeline = open_pipeline(spec)
    order = Order(units.rows_U, units.shards_U, seed=spec.seed, source=name, shuffle=config.shuffle)
    tokens = SourceTokens.of(
        token_cache,
        config,
        tokenizer=spec.tokenizer,
        pipeline_digest=pipeline.digest,
        opened=opened,
    )
    source = RecordSource(
        name,
        order,
        record_format,
        pipeline=pipeline,
        rules=RecordRules(
            on_error=config.on_error,
            splits=config.splits or {},
            split=config.split or TRAIN,
            distinct=distinct_records(spec, record_format, opened.files),
            drawn_before=drawn_before(spec, units, opened.files),
        ),
        digests=opened.shard_digests(),
    )
    return source.looking_at(opened.held_files()).keeping(tokens)
