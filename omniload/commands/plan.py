"""``omniload mix plan``: what a run will draw and how even its work is, before it starts."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import click
from rich.console import Console, RenderableType
from rich.text import Text

from omniload.actors.plane import PlaneSpec
from omniload.base.config import line_of
from omniload.base.errors import ConfigError
from omniload.base.state import JsonObject
from omniload.base.units import counted, format_bytes, format_count
from omniload.commands.display import Cell, colour_of, emit_json, output, progress, say, table
from omniload.commands.faults import sources_in_silence
from omniload.commands.mix_tables import shares_table, sorted_files, stages_by_epochs_json, sureness
from omniload.commands.opening import find_sources, open_spec
from omniload.commands.options import (
    cache_option,
    dp_option,
    json_option,
    mix_argument,
    store_option,
)
from omniload.machine.loader_groups import (
    TOKENS_PER_S,
    LoaderShare,
    SourceCost,
    costs_of,
    partition,
)
from omniload.mix.config import MixConfig
from omniload.mix.edits.history import History
from omniload.mix.schedule import boundaries, weights_at
from omniload.mix.schema.caps import require_amounts
from omniload.mix.schema.weights import GroupCap
from omniload.plan.forecast.forecast import Forecast, Span, warnings_of
from omniload.plan.forecast.sizes import PADDING, SourceSizes
from omniload.plan.forecast.stages import first_refused_step, require_end, with_expected_steps
from omniload.simulation.rehearsal import FirstSteps, Refusal, steps_of_a_forecast
from omniload.source.estimate import SourceProfile, profile
from omniload.source.kept_profile import KeptProfile
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import open_shard_cache

__all__ = ["plan"]

_PROFILERS = 2
_SHOWN = 20
"""Most sources shown; those with the most work come first."""


@click.command
@mix_argument
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps of the run; by default all steps until the mix ends, if it ends.",
)
@click.option(
    "--rehearse",
    type=click.IntRange(min=1),
    help="Steps to really plan; by default up to 64, or all steps of a short run, up to 16 million tokens.",
)
@click.option(
    "--resources", is_flag=True, help="Show which loaders would run, and why, and plan no step."
)
@dp_option
@cache_option
@store_option
@json_option
def plan(  # noqa: PLR0913 -- one for each option
    file: Path,
    *,
    steps: int | None,
    rehearse: int | None,
    resources: bool,
    dp: int,
    cache_dir: Path | None,
    store_timeout: float,
    as_json: bool,
) -> None:
    """Predict what a run will draw, before anything starts.

    Tokens and epochs of each source are estimated from its number of records and a sample of their lengths; for a short
    run, they come from all its steps. Packing and balance come from steps that are really planned. If a fault would end
    the run, the steps before the fault are planned, and the command ends with that fault.

    \b
    Example:
      omniload mix plan examples/quickstart.yaml --steps 60 --dp 2
      omniload mix plan examples/quickstart.yaml --resources
    """  # noqa: D301 -- click's own marker
    # One step ahead, so that the planner plans no more than is looked at.
    spec = open_spec(file, dp=dp, cache_dir=cache_dir, ahead=1)
    if steps is None and not resources and spec.mix.mix.stop == "never":
        raise click.UsageError(
            "what a run draws depends on its length, and this mix does not end by itself: give its length, such as "
            f"--steps 1000. Without a length, omniload mix check {file} checks the file, and --resources tells which "
            "loaders there will be"
        )
    find_sources(spec, file, sources_in_silence(spec.mix, store_timeout, file))
    profiles = _profiles(spec)
    if resources:
        _say_resources(spec.mix, profiles, as_json)
        return
    rehearsed = steps_of_a_forecast(spec, profiles, progress, steps=steps, rehearse=rehearse)
    asked, sizes = steps, rehearsed.sizes(spec.mix, profiles)
    steps, refusal = _until(spec.mix, file, rehearsed, sizes, asked)
    mix = with_expected_steps(spec.mix, sizes, steps)
    expected = rehearsed.forecast(mix, sizes, steps)
    if refusal is None:
        _require_amounts(spec.mix, file, rehearsed, expected)
    look_sorted = [*sorted_files(spec.mix, {each.name: each.differences for each in profiles})]
    warnings = [*warnings_of(spec.mix, expected, rehearsed.steps), *look_sorted]
    error: float | None = 0.0
    if refusal is None and (asked is None or expected.ends_early):
        error = rehearsed.end_is_within(spec.mix, profiles, expected.total)
    if (error and look_sorted) or not (refusal is None or refusal.is_seen):
        error = None  # later documents may have other lengths, or no planned step met the fault
    if as_json:
        content = _json(mix, profiles, expected, rehearsed)
        refused = None if refusal is None else refusal.as_json()
        emit_json(content | {"steps_error": error, "warnings": warnings, "refused": refused})
    else:
        console = output()
        _print_plan(console, mix, profiles, expected, rehearsed, error)
        for warning in warnings:
            say(console, f"warning: {warning}", "yellow")
    if refusal is not None:
        raise refusal.raised(asked)


def _until(
    mix: MixConfig,
    file: Path,
    rehearsed: FirstSteps,
    sizes: SourceSizes,
    steps: int | None,
) -> tuple[int, Refusal | None]:
    """Return the number of steps of a run, and why it is less than asked for, if a fault ends the run earlier.

    Raises:
        ConfigError: The run has no step, or does not end by itself although it should.
    """
    if rehearsed.refusal is not None:
        return rehearsed.refusal.step, rehearsed.refusal
    if rehearsed.is_whole:
        return steps or len(rehearsed.steps), None
    steps = steps or require_end(mix, sizes)
    found = first_refused_step(mix, sizes, steps, _groups(mix, file))
    if found is None:
        return steps, None
    step, error = found
    if not step:
        raise error
    return step, Refusal(step=step, error=error, is_seen=False)


def _require_amounts(mix: MixConfig, file: Path, rehearsed: FirstSteps, expected: Forecast) -> None:
    """Refuse fewer steps than the amounts of a mix take."""
    if mix.mix.amounts is not None and expected.wanted_S is not None:
        part = float(expected.total.tokens_S.sum() / expected.wanted_S.sum())
        if rehearsed.is_whole:
            part = rehearsed.part_drawn or 0.0
        where = f"{file}:{line_of(file, 'mix', 'amounts') or 1}"
        require_amounts(where, mix.mix.amounts, part, expected.total.stop)


def _say_resources(mix: MixConfig, profiles: Sequence[SourceProfile], as_json: bool) -> None:
    costs, runtime = costs_of(mix, _kept_by_name(profiles)), mix.runtime
    shares = partition(costs, num_loaders=runtime.loaders, max_loaders=runtime.scaling.most)
    if as_json:
        emit_json(_resources_json(mix, costs, shares))
    else:
        _print_resources(output(), mix, costs, shares)


def _groups(mix: MixConfig, file: Path) -> dict[str, tuple[str, GroupCap]]:
    """Return, for each source, the group that caps its epochs, and the line of the group."""
    places = {name: mix.mix.place_of(cap) for name, cap in mix.mix.repetition_caps.items()}
    return {
        name: (f"{file}:{line_of(file, *at) or 1}: {'.'.join(map(str, at))}", cap)
        for (name, at), cap in zip(places.items(), mix.mix.repetition_caps.values(), strict=True)
    }


def _profiles(spec: PlaneSpec) -> list[SourceProfile]:
    shards = open_shard_cache(spec.mix.loader.shard_cache, spec.base_dir)

    def measure(name: str) -> SourceProfile:
        source = SourceSpec.drawn(spec.mix, name, spec.base_dir, spec.cache_dir)
        return profile(source, shard_cache=shards)

    with (
        progress("measuring sources", len(spec.mix.names)) as advance,
        ThreadPoolExecutor(_PROFILERS) as pool,
    ):
        found = []
        # In the order of the names, whichever is done first: from here on, sources are identified by number.
        for measured in pool.map(measure, spec.mix.names):
            found.append(measured)
            advance(1)
    if barren := [source.name for source in found if source.tokens == 0]:
        raise ConfigError(
            f"sources {barren}: the sampled records give 0 tokens; correct their text key or remove them"
        )
    return found


def _wanted(mix: MixConfig, expected: Forecast) -> dict[str, object]:
    """Return the amounts of a mix that has any, and the number of tokens that each means."""
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
    mix: MixConfig, profiles: Sequence[SourceProfile], expected: Forecast, rehearsed: FirstSteps
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
        "stages_by_epochs": stages_by_epochs_json(History(mix)),
        "stages": [
            {"from_step": span.start, "to_step": span.stop, "sources": by_name(span)}
            for span in expected.stages
        ],
        "total": by_name(expected.total),
        **_wanted(mix, expected),
        "rehearsed": {"waste": rehearsed.waste, "steps": [asdict(s) for s in rehearsed.steps]},
    }


def _print_plan(
    console: Console,
    mix: MixConfig,
    profiles: Sequence[SourceProfile],
    expected: Forecast,
    rehearsed: FirstSteps,
    error: float | None,
) -> None:
    """Print what a run will draw, and what its first steps would be."""
    console.print(shares_table(mix))
    columns = [("source", False), ("records", True), ("tokens", True)]
    if mix.mix.amounts is not None:
        columns.append(("wanted", True))
    columns += [(f"steps {s.start:,} to {s.stop - 1:,}", True) for s in expected.stages]
    columns += [(heading, True) for heading in ("drawn", "share", "samples", "epochs")]
    rows = [list(_source_cells(mix, s, profiles[s], expected)) for s in range(len(profiles))]
    within = (
        " (nobody knows within what)" if error is None else f" ±{2 * error:.0%}" if error else ""
    )
    after = f"expected after {counted(expected.total.stop, 'step')}{within}"
    console.print(table(after, columns, rows))
    console.print(_figures_table(rehearsed))


def _source_cells(
    mix: MixConfig, s: int, source: SourceProfile, expected: Forecast
) -> Iterator[Cell]:
    yield Text(source.name, colour_of(s))
    yield f"{source.records:,}"
    yield f"{'' if source.exact else '~'}{format_count(source.tokens)}{sureness(source)}"
    if mix.mix.amounts is not None:
        yield str(mix.mix.amounts[source.name])
    for stage in expected.stages:
        yield f"{format_count(stage.tokens_S[s])}, {stage.epochs_S[s]:.2f} epochs"
    total = expected.total
    yield format_count(total.tokens_S[s])
    yield f"{total.shares_S[s]:.2%}"
    yield format_count(total.samples_S[s])
    yield Text(f"{total.epochs_S[s]:.2f}", "yellow" if total.epochs_S[s] > 1 else "")


def _figures_table(rehearsed: FirstSteps) -> RenderableType:
    steps = rehearsed.steps
    quotients: list[tuple[str, list[float]]] = [
        ("heaviest rank over the mean, rows in order", [step.imbalance_before for step in steps]),
        ("the same, balanced", [step.imbalance for step in steps]),
        ("the least that these rows allow", [step.bound for step in steps]),
        ("heaviest microbatch over the mean", [step.microbatch_imbalance for step in steps]),
        ("the least of that", [step.microbatch_bound for step in steps]),
    ]
    rows: list[list[Cell]] = [
        [name, f"{fmean(values):.4f}", f"{max(values):.4f}"] for name, values in quotients
    ]
    wastes = [1 - step.tokens / step.capacity for step in steps]
    rows.append([PADDING, f"{rehearsed.waste:.2%}", f"{max(wastes):.2%}"])
    columns = [("", False), ("mean", True), ("worst step", True)]
    which = "all" if rehearsed.is_whole else "the first"
    return table(f"{which} {counted(len(steps), 'step')}, planned", columns, rows)


def _kept_by_name(profiles: Sequence[SourceProfile]) -> dict[str, KeptProfile]:
    """Return the cached parts of each profile, by the name of its source."""
    return {
        p.name: KeptProfile(
            preprocess_s_per_token=p.preprocess_s_per_token, block_bytes=p.block_bytes
        )
        for p in profiles
    }


def _print_resources(
    console: Console, mix: MixConfig, costs: Sequence[SourceCost], shares: Sequence[LoaderShare]
) -> None:
    """Print the loaders, then the sources."""
    rows: list[list[Cell]] = [
        [
            f"loader-{number}",
            _named(mix, share.sources),
            f"{share.busy:.2f}",
            format_bytes(share.memory_bytes),
            str(share.threads),
            f"+{share.readers}" if share.readers else "",
            share.why,
        ]
        for number, share in enumerate(shares)
    ]
    columns = [("loader", False), ("sources", False), ("cores", True), ("decoded", True)]
    columns += [("threads", True), ("readers", True), ("why", False)]
    rate = f"{format_count(TOKENS_PER_S)} tokens a second"
    limit = format_bytes(mix.loader.memory)
    console.print(
        table(f"loaders at {rate}; each holds {limit} at most, the rest on disk", columns, rows)
    )
    console.print(_sources_table(mix, costs))


def _sources_table(mix: MixConfig, costs: Sequence[SourceCost]) -> object:
    by_work = sorted(range(len(costs)), key=lambda s: -costs[s].busy)
    rows: list[list[Cell]] = [
        [
            Text(mix.names[s], colour_of(s)),
            f"{costs[s].preprocess_s:.4f}",
            f"{costs[s].transfer_s:.4f}",
            format_bytes(costs[s].memory_bytes),
            str(costs[s].readers),
        ]
        for s in by_work[:_SHOWN]
    ]
    columns = [
        ("source", False),
        ("preparing P, cores", True),
        ("transfer T, cores", True),
        ("memory M", True),
        ("readers", True),
    ]
    left = len(costs) - len(rows)
    # After the start, their number follows measurements, unless ``loader.readers`` gives it.
    title = "costs at the greatest share, readers to begin with"
    title += f"; {counted(left, 'lighter source')} left out" if left else ""
    return table(title, columns, rows)


def _named(mix: MixConfig, sources: Sequence[int]) -> str:
    names = ", ".join(mix.names[s] for s in sources[:3])
    return names if len(sources) <= 3 else f"{len(sources)}: {names}, ..."


def _resources_json(
    mix: MixConfig, costs: Sequence[SourceCost], shares: Sequence[LoaderShare]
) -> JsonObject:
    """Return the same as plain JSON."""
    return {
        "tokens_per_s": TOKENS_PER_S,
        "memory_bytes": mix.loader.memory,
        "loaders": [
            asdict(share) | {"sources": [mix.names[s] for s in share.sources]} for share in shares
        ],
        "sources": {name: asdict(cost) for name, cost in zip(mix.names, costs, strict=True)},
    }
