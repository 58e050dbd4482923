"""``omniload mix plan``: what a run will draw and how even its work is, before it starts."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import click
import numpy as np

from omniload.actors.plane import PlaneSpec
from omniload.base.config import line_of
from omniload.base.errors import ConfigError
from omniload.commands.display import emit_json, output, progress, say
from omniload.commands.opening import find_sources, open_spec
from omniload.commands.options import cache_option, dp_option, json_option, mix_argument
from omniload.commands.plan_tables import Rehearsed, print_plan
from omniload.commands.rehearsal import Rehearsal
from omniload.commands.resources import kept_by_name, print_resources, resources_json
from omniload.machine.loader_groups import costs_of, partition
from omniload.mix.config import MixConfig
from omniload.mix.schedule import boundaries, weights_at
from omniload.mix.schema.caps import require_amounts, require_repetitions
from omniload.plan.forecast import (
    Forecast,
    SourceSizes,
    Span,
    StepFigures,
    figures_of,
    forecast,
    warnings_of,
)
from omniload.source.estimate import SourceProfile, profile

__all__ = ["plan"]

_REHEARSED_TOKENS = 16_000_000
"""Tokens that may be read to measure packing and balance: about ten seconds of tokenising."""
_MOST_REHEARSED = 64
_PROFILERS = 2


@click.command
@mix_argument
@click.option("--steps", type=click.IntRange(min=1), required=True, help="Steps of the run.")
@click.option(
    "--rehearse",
    type=click.IntRange(min=1),
    help="Steps to plan for real; by default up to 64, as long as they hold 16 million tokens.",
)
@click.option(
    "--resources", is_flag=True, help="Say which loaders there would be, and why, and plan no step."
)
@dp_option
@cache_option
@json_option
def plan(  # noqa: PLR0913 -- one for each option
    file: Path,
    *,
    steps: int,
    rehearse: int | None,
    resources: bool,
    dp: int,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Say what a run will draw, before anything starts.

    Tokens, samples and epochs of each source come from its counted records and a sample of
    their lengths. Packing and balance come from the first steps, planned for real.

    \b
    Example:
      omniload mix plan examples/quickstart.yaml --steps 60 --dp 2
      omniload mix plan examples/quickstart.yaml --steps 60 --resources
    """  # noqa: D301 -- click's own marker
    spec = open_spec(file, dp=dp, cache_dir=cache_dir, ahead=1)
    find_sources(spec)
    profiles = _profiles(spec)
    if resources:
        costs = costs_of(spec.mix, kept_by_name(profiles))
        runtime = spec.mix.runtime
        shares = partition(costs, num_loaders=runtime.loaders, max_loaders=runtime.scaling.most)
        if as_json:
            emit_json(resources_json(spec.mix, costs, shares))
        else:
            print_resources(output(), spec.mix, costs, shares)
        return
    most = rehearse or _most_rehearsed(spec.mix)
    rehearsed = _rehearse(replace(spec, num_steps=min(steps, most)), dp)
    sizes = _sizes(profiles, rehearsed)
    expected = forecast(
        spec.mix,
        sizes,
        steps,
        tokens_per_step=rehearsed.tokens_per_step,
    )
    wanted = dict(zip(spec.mix.names, expected.total.epochs_S.tolist(), strict=True))
    require_repetitions(spec.mix.sources, wanted, expected.total.stop)
    if spec.mix.mix.amounts is not None:
        assert expected.wanted_S is not None, "it has amounts"
        part = float(expected.total.tokens_S.sum() / expected.wanted_S.sum())
        where = f"{file}:{line_of(file, 'mix', 'amounts') or 1}"
        require_amounts(where, spec.mix.mix.amounts, part, steps)
    warnings = warnings_of(spec.mix.names, expected, rehearsed.steps)
    if as_json:
        emit_json(_json(spec.mix, profiles, expected, rehearsed) | {"warnings": warnings})
        return
    console = output()
    print_plan(console, spec.mix, profiles, expected, rehearsed)
    for warning in warnings:
        say(console, f"warning: {warning}", "yellow")


def _most_rehearsed(mix: MixConfig) -> int:
    return int(np.clip(_REHEARSED_TOKENS // mix.batch.tokens, 1, _MOST_REHEARSED))


def _profiles(spec: PlaneSpec) -> list[SourceProfile]:
    def measure(name: str) -> SourceProfile:
        return profile(
            name,
            spec.mix.sources[name],
            tokenizer=spec.mix.tokenizer,
            base_dir=spec.base_dir,
            cache_dir=spec.cache_dir,
        )

    with (
        progress("measuring sources", len(spec.mix.names)) as advance,
        ThreadPoolExecutor(_PROFILERS) as pool,
    ):
        found = []
        for measured in pool.map(measure, spec.mix.names):
            found.append(measured)
            advance(1)
    if barren := [source.name for source in found if source.tokens == 0]:
        raise ConfigError(
            f"sources {barren}: the sampled records give 0 tokens; correct their text key or remove them"
        )
    return found


def _rehearse(spec: PlaneSpec, dp: int) -> Rehearsed:
    rehearsal, mix = Rehearsal(spec), spec.mix
    drawn_S = np.zeros(len(mix.names))
    steps: list[StepFigures] = []
    assert spec.num_steps is not None, "a rehearsal is bounded"
    with progress("planning steps", spec.num_steps) as advance:
        for planned in islice(rehearsal.plans(), spec.num_steps):
            steps.append(figures_of(mix, planned, dp))
            drawn_S += planned.tokens_S
            advance(1)
    if not steps:
        raise ConfigError(
            f"mix.stop {mix.mix.stop!r} ends the run before step 0; use a smaller batch or more data"
        )
    all_S = drawn_S + rehearsal.overlong_S
    return Rehearsed(
        steps=tuple(steps),
        kept_S=np.divide(drawn_S, all_S, out=np.ones_like(all_S), where=drawn_S > 0),
    )


def _sizes(profiles: Sequence[SourceProfile], rehearsed: Rehearsed) -> SourceSizes:
    tokens_S = np.asarray([source.tokens_per_record for source in profiles])
    return SourceSizes(
        samples_S=np.asarray([float(source.records) for source in profiles]),
        tokens_per_sample_S=tokens_S * rehearsed.kept_S,
    )


def _wanted(mix: MixConfig, expected: Forecast) -> dict[str, object]:
    """Return the amounts of a mix that has any, and the tokens that they come to."""
    if mix.mix.amounts is None or expected.wanted_S is None:
        return {}
    tokens = dict(zip(mix.names, expected.wanted_S.tolist(), strict=True))
    return {
        "amounts": {
            name: amount.model_dump() | {"expected_tokens": tokens[name]}
            for name, amount in sorted(mix.mix.amounts.items())
        }
    }


def _json(
    mix: MixConfig, profiles: Sequence[SourceProfile], expected: Forecast, rehearsed: Rehearsed
) -> dict[str, object]:
    def by_name(span: Span) -> dict[str, object]:
        return {
            name: {
                "tokens": span.tokens_S[s],
                "samples": span.samples_S[s],
                "share": span.shares_S[s],
                "epochs": span.epochs_S[s],
            }
            for s, name in enumerate(mix.names)
        }

    return {
        "steps": expected.total.stop,
        "ends_early": expected.ends_early,
        "sources": [asdict(source) | {"tokens": source.tokens} for source in profiles],
        "shares": [
            {"step": k, "shares": weights_at(mix.mix.stages, mix.names, k)} for k in boundaries(mix)
        ],
        "stages": [
            {"from_step": span.start, "to_step": span.stop, "sources": by_name(span)}
            for span in expected.stages
        ],
        "total": by_name(expected.total),
        **_wanted(mix, expected),
        "rehearsed": {"waste": rehearsed.waste, "steps": [asdict(s) for s in rehearsed.steps]},
    }
