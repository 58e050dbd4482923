"""``omniload mix check``: is the file valid, and is what it names there?"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
from rich.table import Table
from rich.text import Text

from omniload.base.units import format_bytes
from omniload.commands.display import Cell, bar, colour_of, emit_json, output, say, table
from omniload.commands.opening import find_sources, open_spec
from omniload.commands.options import cache_option, dp_option, json_option, mix_argument
from omniload.mix.config import MixConfig
from omniload.mix.schedule import boundaries, weights_at
from omniload.plan.forecast import SourceSizes, warnings_of_a_step
from omniload.source.kept_findings import FoundSource
from omniload.source.token_cache.fullness import Fullness, fullness_of_mix

__all__ = ["check", "shares_table"]

_BAR_WIDTH = 8
_NAMED = 3
_MOST_ROWS = 64
"""Sources that a table lists; laying out a thousand takes longer than finding them, and nobody reads them."""


@click.command
@mix_argument
@dp_option
@cache_option
@json_option
def check(file: Path, dp: int, cache_dir: Path | None, as_json: bool) -> None:
    """Check a mix file and everything it names: files, footers, tokenizer, batch.

    All faults are reported at once. The first records of every source are decoded, and not again until
    its files, its settings or the tokenizer change. Nothing is written but that and the indexes of the
    sources, in the cache folder.

    \b
    Example:
      omniload mix check examples/quickstart.yaml --dp 2
    """  # noqa: D301 -- click's own marker
    spec = open_spec(file, dp=dp, cache_dir=cache_dir)
    found = find_sources(spec, file)
    mix = spec.mix
    warnings = warnings_of_a_step(mix, _sizes(found))
    tokens = fullness_of_mix(mix, base_dir=spec.base_dir, cache_dir=spec.cache_dir)
    if as_json:
        emit_json(
            {
                "file": str(file),
                "dp": dp,
                "rows_per_step": mix.rows_per_step,
                "sources": [asdict(source) for source in found],
                "warnings": warnings,
                "token_cache": None if tokens is None else [asdict(each) for each in tokens],
                "shares": [
                    {"step": step, "shares": _shares(mix, step)} for step in boundaries(mix)
                ],
            }
        )
        return
    console = output()
    console.print(_sources_table(found))
    console.print(shares_table(mix))
    ranks = f"{dp} data-parallel rank{'s' if dp > 1 else ''}"
    rows = f"{mix.rows_per_step} rows of {mix.pack.length:,} tokens"
    if tokens is not None:
        say(console, _said_of_tokens(tokens))
    say(console, f"{file}: valid; a step is {rows} over {ranks}")
    for warning in warnings:
        say(console, f"warning: {warning}", "yellow")


def _said_of_tokens(tokens: Sequence[Fullness]) -> str:
    """Say how much of the sources a token cache holds, and of which it holds nothing, ever."""
    units, kept = sum(each.units for each in tokens), sum(each.kept for each in tokens)
    never = [f"{each.source} ({each.why})" for each in tokens if each.why]
    left = f"; never of {', '.join(never[:_NAMED])}" if never else ""
    more = f" and {len(never) - _NAMED} more" if len(never) > _NAMED else ""
    return f"token cache: tokens of {kept:,} of {units:,} units are kept{left}{more}"


def _sizes(found: Sequence[FoundSource]) -> SourceSizes:
    # Where the first records give no token, nothing is known; the largest of the others warns of nothing.
    unknown = max(source.tokens_per_record for source in found) or 1.0
    return SourceSizes(
        samples_S=np.asarray([float(source.records) for source in found]),
        tokens_per_sample_S=np.asarray([source.tokens_per_record or unknown for source in found]),
    )


def shares_table(mix: MixConfig) -> Table:
    """Lay out the normalised weight of each source at every step where weights start or stop to change, or amounts."""
    if (amounts := mix.mix.amounts) is not None:
        wanted: list[list[Cell]] = [
            [Text(name, colour_of(s)), str(amounts[name])] for s, name in enumerate(mix.names)
        ]
        return table("amounts", [("source", False), ("of the run", True)], _bounded(wanted))
    steps = boundaries(mix)
    shares = [_shares(mix, step) for step in steps]
    rows: list[list[Cell]] = [
        [Text(name, colour_of(s)), *(_share_cell(at[name], s) for at in shares)]
        for s, name in enumerate(mix.names)
    ]
    columns = [("source", False), *((f"step {step:,}", False) for step in steps)]
    return table(f"shares by {mix.mix.level}", columns, _bounded(rows))


def _bounded(rows: list[list[Cell]]) -> list[list[Cell]]:
    """Return the first rows of a long table, and one that says how many there are beside them."""
    if len(rows) <= _MOST_ROWS:
        return rows
    more = f"and {len(rows) - _MOST_ROWS:,} more: --json"
    return [*rows[:_MOST_ROWS], [more, *([""] * (len(rows[0]) - 1))]]


def _shares(mix: MixConfig, step: int) -> dict[str, float]:
    return dict(zip(mix.names, weights_at(mix.mix.stages, mix.names, step), strict=True))


def _share_cell(share: float, source: int) -> Text:
    return Text.assemble(f"{share:7.2%} ", (bar(share, _BAR_WIDTH), colour_of(source)))


def _sources_table(found: Sequence[FoundSource]) -> Table:
    columns = [("source", False), ("format", False)]
    columns += [(heading, True) for heading in ("shards", "units", "records", "stored")]
    rows: list[list[Cell]] = [
        [
            Text(source.name, colour_of(s)),
            source.format,
            f"{source.shards:,}",
            f"{source.units:,}",
            f"{source.records:,}",
            format_bytes(source.size_bytes),
        ]
        for s, source in enumerate(found)
    ]
    return table(f"{len(found)} sources", columns, _bounded(rows))
