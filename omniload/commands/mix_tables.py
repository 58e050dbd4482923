"""Tables of a mix that several verbs show, and how many sources a table lists."""

from rich.table import Table
from rich.text import Text

from omniload.commands.display import Cell, bar, colour_of, table
from omniload.mix.config import MixConfig
from omniload.mix.schedule import boundaries, weights_at

__all__ = ["MOST_ROWS", "bounded", "shares_at", "shares_table"]

_BAR_WIDTH = 8
MOST_ROWS = 64
"""Sources that a table lists; laying out a thousand takes longer than finding them, and nobody reads them."""


def shares_table(mix: MixConfig) -> Table:
    """Lay out the normalised weight of each source at every step where weights start or stop to change, or amounts."""
    if (amounts := mix.mix.amounts) is not None:
        wanted: list[list[Cell]] = [
            [Text(name, colour_of(s)), str(amounts[name])]
            for s, name in enumerate(mix.names[:MOST_ROWS])
        ]
        columns = [("source", False), ("of the run", True)]
        return table("amounts", columns, bounded(wanted, len(mix.names)))
    steps = boundaries(mix)
    shares = [shares_at(mix, step) for step in steps]
    rows: list[list[Cell]] = [
        [Text(name, colour_of(s)), *(_share_cell(at[name], s) for at in shares)]
        for s, name in enumerate(mix.names[:MOST_ROWS])
    ]
    columns = [("source", False), *((f"step {step:,}", False) for step in steps)]
    return table(f"shares by {mix.mix.level}", columns, bounded(rows, len(mix.names)))


def bounded(rows: list[list[Cell]], count: int) -> list[list[Cell]]:
    """Return the first rows of a table of ``count``, and one that says how many there are beside them."""
    if count <= len(rows):
        return rows
    return [*rows, [f"and {count - len(rows):,} more: --json", *([""] * (len(rows[0]) - 1))]]


def shares_at(mix: MixConfig, step: int) -> dict[str, float]:
    """Return the normalised weight of each source at a step, by name."""
    return dict(zip(mix.names, weights_at(mix.mix.stages, mix.names, step), strict=True))


def _share_cell(share: float, source: int) -> Text:
    return Text.assemble(f"{share:7.2%} ", (bar(share, _BAR_WIDTH), colour_of(source)))
