"""What an edit makes of a mix: its weights or amounts from a step on, and a source more."""

from collections.abc import Mapping

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, Stage
from omniload.mix.edits.edit import AddSource, Edit

__all__ = ["edited_mix", "weighted"]


def edited_mix(before: MixConfig, edit: Edit) -> MixConfig:
    """Return a mix with one more edit."""
    if edit.amounts is not None:
        # As in a file: who asks only which sources are drawn from finds them among the weights.
        stage = Stage(from_step=0, weights=dict.fromkeys(edit.amounts, 1.0))
        weights = before.mix.model_copy(update={"stages": (stage,), "amounts": edit.amounts})
    elif edit.stages:
        kept = [stage for stage in before.mix.stages if stage.from_step < edit.step]
        weights = before.mix.model_copy(update={"stages": (*kept, *edit.stages)})
    else:
        return before  # it skips something, or lets it be drawn after all
    sources, change = before.sources, edit.change
    if isinstance(change, AddSource):
        sources = {**sources, change.name: before.inherited(change.source)}
    return before.model_copy(update={"mix": weights, "sources": sources})


def weighted(stage: Stage, weights: Mapping[str, float], step: int) -> Stage:
    """Return a stage of other weights.

    Raises:
        ConfigError: None of them is above 0.
    """
    left = {name: weight for name, weight in weights.items() if weight > 0}
    if not left:
        raise ConfigError(
            f"no source would have a weight from step {max(stage.from_step, step)} on; give one to another source first"
        )
    return Stage(
        from_step=stage.from_step,
        weights=left,
        ramp_steps=stage.ramp_steps,
        ramp=stage.ramp,
        ramp_done=stage.ramp_done,
    )
