"""How much the sources of a mix hold, in samples as the mix draws them.

Shape suffixes:
    S  sources
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.schedule import amount_tokens_S

__all__ = ["SourceSizes", "repetitions_of"]

_MOST_EPOCHS = 4
"""Times that a source is gone through, beyond which a user is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSizes:
    """What the sources hold."""

    samples_S: NDArray[np.float64]
    """Samples in an epoch; above 0."""
    tokens_per_sample_S: NDArray[np.float64]
    """Mean tokens of a sample that are trained on; above 0."""
    behind_S: NDArray[np.float64] | float = 0.0
    """Part of the first epoch that another loader, or a run before, had drawn of it; from 0 to below 1."""

    @classmethod
    def of(
        cls,
        mix: MixConfig,
        records_S: Sequence[float] | NDArray[np.float64],
        tokens_per_record_S: Sequence[float] | NDArray[np.float64],
        behind_S: Sequence[float] | float = 0.0,
    ) -> Self:
        """Return the sizes of sources whose records are counted, and their tokens measured.

        A record is a sample, but where documents are joined: there a sample has the length that is asked for, or all of
        an epoch. That the last of each unit is shorter is left out, as the number of units is not known here.
        """
        records_S = np.asarray(records_S, np.float64)
        tokens_S = np.asarray(tokens_per_record_S, np.float64)
        joined = [source.concat_transform for source in mix.sources.values()]
        lengths_S = np.asarray([0 if each is None else each.tokens for each in joined])
        epoch_S = records_S * tokens_S
        tokens_per_sample_S = np.where(lengths_S > 0, np.minimum(lengths_S, epoch_S), tokens_S)
        samples_S = np.where(lengths_S > 0, epoch_S / tokens_per_sample_S, records_S)
        return cls(
            samples_S=samples_S,
            tokens_per_sample_S=tokens_per_sample_S,
            behind_S=np.asarray(behind_S, np.float64),
        )

    @property
    def epoch_tokens_S(self) -> NDArray[np.float64]:
        """Tokens of a whole epoch."""
        return self.samples_S * self.tokens_per_sample_S

    def tokens_of(self, epochs_S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the tokens of so many epochs, the first of which is a short one where something lies behind."""
        left_out_S = np.minimum(epochs_S, 1.0) * self.behind_S
        tokens_S: NDArray[np.float64] = (epochs_S - left_out_S) * self.epoch_tokens_S
        return tokens_S

    def wanted_S(self, mix: MixConfig) -> NDArray[np.float64] | None:
        """Return the tokens that the amount of each source comes to; ``None`` where the mix has weights."""
        amounts = mix.mix.amounts
        tokens_S = amount_tokens_S(mix, self.samples_S, self.tokens_per_sample_S)
        if tokens_S is None or amounts is None:
            return None
        by_epochs_S = [amounts[name].kind == "epochs" for name in mix.names]
        return np.where(by_epochs_S, self.tokens_of(tokens_S / self.epoch_tokens_S), tokens_S)


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
