"""Sources of a changed mix: checks of names, checks of an added source, and the weights after an edit."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from pydantic_core import PydanticCustomError

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, SourceConfig, Stage
from omniload.mix.edits.edit import AddSource, Edit, FitCost
from omniload.mix.schema.cuts import documents_cut, no_sequences, packs_at_odds
from omniload.mix.schema.sources.own_columns import faults_of_columns
from omniload.mix.schema.weights import LARGEST_NUMBER

__all__ = ["edited_mix", "require_fits", "require_known", "weighted"]

_SHOWN = 12


def require_known(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a source that the mix does not have.

    Raises:
        ConfigError: A name is unknown; the message names it, and the closest known name.
    """
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            more = f" and {len(known) - _SHOWN:,} more" if len(known) > _SHOWN else ""
            raise ConfigError(
                f"source {name!r} is not in the mix{meant}, which has {', '.join(known[:_SHOWN])}{more}; "
                "correct the name (of a group give its sources, or edit the mix file under `omniload mix watch`), or "
                "add the source with `omniload mix add`"
            )


def require_fits(base: MixConfig, latest: MixConfig, name: str, source: SourceConfig) -> None:
    """Refuse a source that could not have been in the mix file, or whose kind of samples the run was not opened for.

    Args:
        base: The mix of the file.
        latest: The mix with every edit.
        name: Name of the source.
        source: Declaration of the source.

    Raises:
        ConfigError: The source does not fit; the message says what to do instead.
    """
    if name in latest.sources:
        gives = "an amount" if latest.mix.amounts else "a weight"
        raise ConfigError(
            f"source {name!r} is in the mix already; choose another name, or give it {gives} with "
            f"`omniload mix set RUN {name}={gives.split()[1].upper()}`"
        )
    if source.pair_columns and not any(s.pair_columns for s in latest.sources.values()):
        raise ConfigError(
            f"source {name!r} holds preference pairs, and the run has none: its trainer would train on both "
            "answers; put the source into the mix file and start a run with a loss for pairs"
        )
    if source.images_transform and not any(s.images_transform for s in latest.sources.values()):
        raise ConfigError(
            f"source {name!r} holds images, and the run has none: its trainer would train on their placeholders as "
            "on words; put the source into the mix file and start a run that encodes images"
        )
    # Checked together with all others, because patches of images must all have one size.
    every = {**latest.sources, name: source}
    try:
        base.inherited(source)
        for fault in (
            *documents_cut(every, latest.pack),
            *no_sequences(every, latest.pack, latest.mix.level),
            *packs_at_odds({name: source}, latest.pack, latest.mix.level),
            *faults_of_columns(every, latest.batch.columns),
        ):
            raise fault
    except PydanticCustomError as fault:
        # The key of a column is given, because its message lacks it; the other messages name their keys themselves.
        below = (fault.context or {}).get("at", ())[2:]
        key = ".".join(map(str, below)) + " " if "columns" in below else ""
        raise ConfigError(f"source {name!r}: {key}{fault.message()}") from fault


def edited_mix(before: MixConfig, edit: Edit) -> MixConfig:
    """Return a mix with one more edit; a fitted cost applies only if the mix has costs fitted."""
    if edit.amounts is not None:
        # As in a file, the weights list the sources that are drawn from, for code that asks only for these.
        stage = Stage(from_step=0, weights=dict.fromkeys(edit.amounts, 1.0))
        weights = before.mix.model_copy(update={"stages": (stage,), "amounts": edit.amounts})
    elif isinstance(edit.change, FitCost):
        if not before.balance.fit_every:
            return before
        fitted = {"linear": edit.change.linear, "quadratic": edit.change.quadratic}
        return before.model_copy(update={"balance": before.balance.model_copy(update=fitted)})
    elif edit.stages:
        # An edit contains everything that applies from its step on, so how it came about does not matter.
        kept = [stage for stage in before.mix.stages if stage.from_step < edit.step]
        weights = before.mix.model_copy(update={"stages": (*kept, *edit.stages)})
    else:
        return before  # it skips something, or undoes a skip
    sources, change = before.sources, edit.change
    if isinstance(change, AddSource):
        sources = {**sources, change.name: before.inherited(change.source)}
    return before.model_copy(update={"mix": weights, "sources": sources})


def weighted(stage: Stage, weights: Mapping[str, float], step: int) -> Stage:
    """Return a stage with other weights.

    Raises:
        ConfigError: No weight is above 0.
    """
    left = {name: weight for name, weight in weights.items() if weight > 0}
    if not left:
        begins = stage.begins if stage.waits else f"from step {max(stage.from_step, step)}"
        raise ConfigError(
            f"no source would have a weight {begins} on; give one to another source first"
        )
    # Only ratios matter, and the weight of an added source in the scale of a stage may exceed the largest valid
    # weight.
    beyond = max(1.0, max(left.values()) / LARGEST_NUMBER)
    left = {name: min(weight / beyond, LARGEST_NUMBER) for name, weight in left.items()}
    return Stage(
        from_step=stage.from_step,
        from_epochs=stage.from_epochs,
        weights=left,
        ramp_steps=stage.ramp_steps,
        ramp=stage.ramp,
        ramp_done=stage.ramp_done,
    )
