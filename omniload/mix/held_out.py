"""The mix of an evaluation: a split of a training mix, with one pass over it."""

from omniload.base.config import checked
from omniload.base.errors import ConfigError
from omniload.mix.columns import COLUMNS
from omniload.mix.config import MixConfig
from omniload.mix.schema.splits import TRAIN

__all__ = ["held_out"]

_SEED = 0
_OF_TRAINING = {"max_fraction", "max_repetition", "drawn_before"}
"""Keys of the training mix that an evaluation ignores: it passes once over a split, whatever the shares of its
sources are and whatever another loader had drawn."""


def held_out(mix: MixConfig, split: str) -> MixConfig:
    """Return the mix that hands out every document of a split exactly once.

    The order is the same for every training run, because the mix has its own seed, one weight for all sources and no
    stages. Packing, rows and tokenizer are those of the training mix.

    Args:
        mix: The training mix.
        split: A split that some of its sources have; the other sources are left out.

    Raises:
        ConfigError: No source has such a split, or a setting that suits training does not suit the evaluation.
    """
    names = {name for source in mix.sources.values() for name in source.splits or ()}
    drawn = {
        name: source.model_copy(update={"split": split})
        for name, source in mix.sources.items()
        if split in (source.splits or ())
    }
    if not drawn:
        raise ConfigError(
            f"split is {split!r}, and the mix holds out {', '.join(sorted(names)) or 'nothing'}; "
            + (
                f"{TRAIN} is what is trained on: open the mix without split"
                if split == TRAIN
                else f"declare it, as in splits: {{{split}: 0.01}}"
            )
        )
    weights = {
        "level": mix.mix.level,
        "stop": "each_once",
        "stages": [{"from_step": 0, "weights": dict.fromkeys(drawn, 1.0)}],
    }
    known = {*COLUMNS, *(n for source in drawn.values() for n in source.own_columns)}
    # Validated again instead of copied, because settings that are valid for training may be invalid for a single pass.
    return checked(
        mix.model_dump()
        | {
            "seed": _SEED,
            "split": split,
            "sources": {
                name: source.model_dump(exclude=_OF_TRAINING) for name, source in drawn.items()
            },
            "mix": weights,
            # A number of readers for a source that is left out would be refused as an unknown name.
            "loader": mix.loader.model_dump()
            | {"readers": {n: count for n, count in mix.loader.readers.items() if n in drawn}},
            # A custom column that no remaining source has would be refused as well.
            "batch": mix.batch.model_dump()
            | {"columns": [n for n in mix.batch.columns if n in known]},
        },
        MixConfig,
        name=f"split {split!r}",
    )
