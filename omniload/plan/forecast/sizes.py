"""How much the sources of a mix hold, in samples as the mix draws them, and how much a step draws.

Shape suffixes:
    S  sources
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.schedule import amounts_S, weights_at

__all__ = ["PADDING", "Sampled", "SourceSizes", "repetitions_of", "rooms_left"]

PADDING = "padding, places of the rows that hold no token"
"""Label of the share of padding, as commands print it."""

_WHOLE = 1e-9
"""Tolerance for a whole number of epochs."""
_WORTH_A_WARNING = 0.01
"""Share of padding above which a user is warned."""
_SHOWN = 8
"""Sources that a message names."""
_MOST_EPOCHS = 4
"""Epochs of a source above which a user is warned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """How well the tokens of sources are known that were sampled, ``[S]`` each."""

    errors_S: NDArray[np.float64]
    """Half-width of the uncertainty of an epoch's tokens, as a fraction of them; NaN if unknown."""
    varies_S: NDArray[np.float64]
    """Standard deviation of the tokens of a record, as a part of their mean."""
    between_S: NDArray[np.float64]
    """Part of that which lies between units, from 0 to 1."""
    records_S: NDArray[np.float64]
    """Records; above 0."""
    units_S: NDArray[np.float64]
    """Units that hold them; above 0."""

    def errors_of(self, epochs_S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the half-width of the uncertainty of the tokens of ``epochs_S`` epochs, in epochs.

        Whole epochs are as well known as one; a part of one has lengths of its own, fewer of them the less alike units
        are.
        """
        part_S = epochs_S % 1.0
        part_S = np.where(part_S > 1 - _WHOLE, 0.0, part_S)
        inverse_S = (1 - self.between_S) / self.records_S + self.between_S / self.units_S
        # The sum of a share p of n values, drawn without replacement, has the variance of one times p * (1 - p) * n.
        of_part_S = self.varies_S * np.sqrt(part_S * (1 - part_S) * np.minimum(inverse_S, 1.0))
        return np.hypot(epochs_S * self.errors_S, of_part_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSizes:
    """Sizes of the sources, and of a step of them."""

    samples_S: NDArray[np.float64]
    """Samples in an epoch; above 0."""
    tokens_per_sample_S: NDArray[np.float64]
    """Mean tokens of a sample that are trained on; above 0."""
    rows_per_sample_S: NDArray[np.float64] | None = None
    """Mean rows that a sample takes which lies alone in them; ``None`` has one of the mean length stand for all."""
    behind_S: NDArray[np.float64] | float = 0.0
    """Part of the first epoch that another loader, or a run before, had drawn of it; from 0 to below 1."""
    records_S: NDArray[np.float64] | None = None
    """Records in an epoch, of which amounts in epochs are; ``None`` where each is a sample."""
    planned_tokens: float | None = None
    """Tokens that a planned step trains on; ``None`` where none was planned."""

    @classmethod
    def of(
        cls,
        mix: MixConfig,
        records_S: Sequence[float] | NDArray[np.float64],
        tokens_per_record_S: Sequence[float] | NDArray[np.float64],
        behind_S: Sequence[float] | float = 0.0,
        rows_per_record_S: Sequence[float] | NDArray[np.float64] | None = None,
        samples_per_record_S: Sequence[float] | NDArray[np.float64] | float = 1.0,
    ) -> Self:
        """Return the sizes of sources from their counted records, and their measured tokens and own rows.

        A record is a sample, or none if conditions, splits or transforms leave it out; weights and amounts count only
        samples. Where documents are joined, a sample has the requested length, or all of an epoch. The last sample of
        each unit is shorter, which is ignored, because the number of units is unknown here.
        """
        records_S = np.asarray(records_S, np.float64)
        tokens_S = np.asarray(tokens_per_record_S, np.float64)
        kept_S = np.asarray(samples_per_record_S, np.float64)
        joined = [source.concat_transform for source in mix.sources.values()]
        lengths_S = np.asarray([0 if each is None else each.tokens for each in joined])
        epoch_S = records_S * tokens_S
        # For a source that gave no sample, assume that each record gives one.
        per_sample_S = np.divide(tokens_S, kept_S, out=tokens_S.copy(), where=kept_S > 0)
        tokens_per_sample_S = np.where(lengths_S > 0, np.minimum(lengths_S, epoch_S), per_sample_S)
        rows_S = None
        if rows_per_record_S is not None:
            of_joined_S = np.ceil(tokens_per_sample_S / mix.pack.length)
            per_record_S = np.asarray(rows_per_record_S, np.float64)
            of_each_S = np.divide(per_record_S, kept_S, out=per_record_S.copy(), where=kept_S > 0)
            rows_S = np.where(lengths_S > 0, of_joined_S, of_each_S)
        return cls(
            rows_per_sample_S=rows_S,
            samples_S=epoch_S / tokens_per_sample_S,
            tokens_per_sample_S=tokens_per_sample_S,
            behind_S=np.asarray(behind_S, np.float64),
            records_S=records_S,
        )

    def that_gave(
        self,
        tokens_S: NDArray[np.int64],
        samples_S: NDArray[np.int64],
        epochs_S: NDArray[np.float64],
    ) -> Self:
        """Return the sizes that follow from the tokens and samples seen in ``epochs_S`` epochs of each source."""
        sized_S = self.tokens_of(epochs_S)
        was_seen_S = (tokens_S > 0) & (sized_S > 0) & (samples_S > 0)
        times_S = np.divide(tokens_S, sized_S, out=np.ones(len(sized_S)), where=was_seen_S)
        per_sample_S = self.tokens_per_sample_S.copy()
        np.divide(tokens_S, samples_S, out=per_sample_S, where=was_seen_S)
        return replace(
            self,
            samples_S=self.epoch_tokens_S * times_S / per_sample_S,
            tokens_per_sample_S=per_sample_S,
            records_S=self.samples_S if self.records_S is None else self.records_S,
        )

    @property
    def epoch_tokens_S(self) -> NDArray[np.float64]:
        """Tokens of a whole epoch."""
        return self.samples_S * self.tokens_per_sample_S

    def tokens_of(self, epochs_S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the tokens of ``epochs_S`` epochs; the first is shorter if a part of it lies behind."""
        left_out_S = np.minimum(epochs_S, 1.0) * self.behind_S
        tokens_S: NDArray[np.float64] = (epochs_S - left_out_S) * self.epoch_tokens_S
        return tokens_S

    def tokens_per_step(self, mix: MixConfig) -> float:
        """Return the tokens that a step trains on, over all sources: those of a planned step, or an estimate.

        The estimate goes by the weights of the first stage. It counts the room that is left in rows of one document
        each, and not that in rows of one source, which only a planned step shows.
        """
        if self.planned_tokens is not None:
            return self.planned_tokens
        if mix.pack.method == "none":
            # Each row is one sample here, however much room it leaves, so a step has the tokens of that many samples.
            return mix.rows_per_step * float(self.tokens_per_sample_S.mean())
        if mix.own_packing is None:
            return float(mix.batch.tokens)
        shares_S = self.wanted_S(mix)
        if shares_S is None:
            shares_S = np.asarray(weights_at(mix.mix.stages, mix.names, 0))
            if mix.mix.counted == "sample":
                shares_S = shares_S * self.tokens_per_sample_S
        rooms_S = np.where(mix.own_packing.alone_S, 1 / self.filled_S(mix), 1.0)
        return mix.batch.tokens * float(shares_S.sum() / (shares_S * rooms_S).sum())

    def filled_S(self, mix: MixConfig) -> NDArray[np.float64]:
        """Return which part of its rows each source fills where its samples lie alone: the rest is padding."""
        whole_S = self.tokens_per_sample_S / mix.pack.length
        rows_S = (
            np.maximum(whole_S, 1.0) if self.rows_per_sample_S is None else self.rows_per_sample_S
        )
        filled_S: NDArray[np.float64] = whole_S / rows_S
        return filled_S

    def wanted_S(self, mix: MixConfig) -> NDArray[np.float64] | None:
        """Return the tokens that the amount of each source comes to; ``None`` where the mix has weights."""
        amounts = mix.mix.amounts
        if amounts is None:
            return None
        records_S = self.samples_S if self.records_S is None else self.records_S
        units_S = np.asarray(amounts_S(mix, [round(n) for n in records_S.tolist()]), np.float64)
        tokens_S = {
            "tokens": units_S,
            "samples": units_S * self.tokens_per_sample_S,
            "epochs": self.tokens_of(units_S / records_S),
        }
        kinds = enumerate(amounts[name].kind for name in mix.names)
        return np.asarray([tokens_S[kind][s] for s, kind in kinds])


def rooms_left(mix: MixConfig, sizes: SourceSizes) -> list[str]:
    """Return what a user should know of rows that sources have to themselves, each with its remedy."""
    packing = mix.own_packing
    if packing is None:
        return []
    found = [
        f"{mix.names[s]} lies alone in its rows, of which about {1 - filled:.0%} is {PADDING}; say rows: own, or "
        "shared, where its documents may lie beside others"
        for s, filled in enumerate(sizes.filled_S(mix).tolist())
        if packing.alone_S[s] and 1 - filled > _WORTH_A_WARNING
    ]
    if own := [mix.names[s] for s in np.flatnonzero(packing.own_S)]:
        found.append(
            f"{', '.join(own[:_SHOWN])} {'has' if len(own) == 1 else 'have'} rows of their own, which may not "
            "be full; omniload mix plan says how much of them is padding, and a larger pack.lookahead_rows leaves less"
        )
    return found


def repetitions_of(names: Iterable[str], epochs_S: Iterable[float]) -> list[str]:
    """Return what a user should know of sources that are gone through too often, each with its remedy.

    Source:
        Muennighoff et al., "Scaling Data-Constrained Language Models" (2023): up to about four epochs
        repetition costs little, beyond that it helps less and less.
    """
    return [
        f"{name} is gone through {epochs:.1f} times, more than {_MOST_EPOCHS}; "
        "lower its weight, add data or train for fewer steps"
        for name, epochs in zip(names, epochs_S, strict=True)
        if epochs > _MOST_EPOCHS
    ]
