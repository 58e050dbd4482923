"""An evaluation's mix: a split of a training mix, gone through once."""

from omniload.base.config import checked
from omniload.base.errors import ConfigError
from omniload.mix.columns import COLUMNS
from omniload.mix.config import MixConfig
from omniload.mix.schema.splits import TRAIN

__all__ = ["held_out"]

_SEED = 0
_OF_TRAINING = {"max_fraction", "max_repetition", "drawn_before"}
"""What is held out is gone through once, whatever its sources share and whatever another loader had drawn."""


def held_out(mix: MixConfig, split: str) -> MixConfig:
    """Return the mix that hands out every document of a split exactly once.

    Its order is the same for every training run: a seed of its own, one weight for all sources
    and no stages. Packing, rows and tokenizer are those of the training mix.

    Args:
        mix: The training mix.
        split: A split that some of its sources have; the others are left out.

    Raises:
        ConfigError: No source has such a split, or what serves training does not serve the evaluation.
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
    # Validated anew and not copied: what was sound for training may not be for one time through.
    return checked(
        mix.model_dump()
        | {
            "seed": _SEED,
            "split": split,
            "sources": {
                name: source.model_dump(exclude=_OF_TRAINING) for name, source in drawn.items()
            },
            "mix": weights,
            # Readers of a source that is left out would be refused, as of a name that is not there.
            "loader": mix.loader.model_dump()
            | {"readers": {n: count for n, count in mix.loader.readers.items() if n in drawn}},
            # And so would columns of yours that no other source has.
            "batch": mix.batch.model_dump()
            | {"columns": [n for n in mix.batch.columns if n in known]},
        },
        MixConfig,
        name=f"split {split!r}",
    )
