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

    @classmethod
    def of(
        cls,
        mix: MixConfig,
        records_S: Sequence[float] | NDArray[np.float64],
        tokens_per_record_S: Sequence[float] | NDArray[np.float64],
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
        return cls(samples_S=samples_S, tokens_per_sample_S=tokens_per_sample_S)


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
