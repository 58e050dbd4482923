"""What ``omniload mix plan --resources`` says: the loaders of a mix, and the costs that they come from."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from omniload.base.state import JsonObject
from omniload.base.units import format_bytes, format_count
from omniload.commands.display import Cell, colour_of, table
from omniload.machine.loader_groups import TOKENS_PER_S, LoaderShare, SourceCost
from omniload.mix.config import MixConfig
from omniload.source.estimate import SourceProfile
from omniload.source.kept_profile import KeptProfile

__all__ = ["kept_by_name", "print_resources", "resources_json"]

_SHOWN = 20
"""Sources that are shown, those of the most work first."""


def kept_by_name(profiles: Sequence[SourceProfile]) -> dict[str, KeptProfile]:
    """Return what is kept of each profile, by the name of its source."""
    return {
        p.name: KeptProfile(
            preprocess_s_per_token=p.preprocess_s_per_token, block_bytes=p.block_bytes
        )
        for p in profiles
    }


def print_resources(
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
        ("P, cores", True),
        ("T, cores", True),
        ("M", True),
        ("readers", True),
    ]
    left = len(costs) - len(rows)
    title = "costs at the greatest share" + (f"; {left} lighter sources left out" if left else "")
    return table(title, columns, rows)


def _named(mix: MixConfig, sources: Sequence[int]) -> str:
    names = ", ".join(mix.names[s] for s in sources[:3])
    return names if len(sources) <= 3 else f"{len(sources)}: {names}, ..."


def resources_json(
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
