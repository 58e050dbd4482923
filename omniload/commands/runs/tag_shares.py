"""Shares of documents and tokens by tags of samples: as a table, as a line, and as JSON."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from omniload.base.state import JsonObject
from omniload.base.units import format_count
from omniload.commands.display import Cell, FittedTable, excerpt, table
from omniload.mix.columns import TagValue
from omniload.source.survey.tag_shares import Counted, TagShares

__all__ = ["said_of_tag", "tag_table", "tags_json", "tags_of_step"]

_MOST_SHOWN = 16
"""Most values in a table."""
_MOST_SAID = 6
"""Most values in a line."""
_WIDTH = 40


def tags_json(tags: Sequence[TagShares]) -> JsonObject:
    """Return shares as plain JSON, by tag and value."""
    return {
        each.name: {
            share.value: {
                "documents": share.documents,
                "tokens": share.tokens,
                "share": share.of_all,
            }
            for share in each.values
        }
        for each in tags
    }


def tag_table(shares: TagShares) -> FittedTable:
    """Lay out the shares of a tag in the tokens of a run, the largest first."""
    rows: list[list[Cell]] = [
        [
            excerpt(share.value or "(empty)", _WIDTH),
            f"{share.documents:,}",
            format_count(share.tokens),
            f"{share.of_all:.2%}",
        ]
        for share in shares.values[:_MOST_SHOWN]
    ]
    if left := shares.values[_MOST_SHOWN:]:
        of_left = shares.rest + sum(share.of_all for share in left)
        rows.append([f"and {len(left):,} more: --json", "", "", f"{of_left:.2%}"])
    columns = [(shares.name, False), ("documents", True), ("tokens", True)]
    return table(f"by {shares.name}", [*columns, ("of the run's tokens", True)], rows)


def said_of_tag(shares: TagShares) -> str:
    """Return the shares of a tag in the tokens of a step as a line."""
    said = [
        f"{excerpt(share.value or '(empty)', _WIDTH)} {share.of_all:.1%}"
        for share in shares.values[:_MOST_SAID]
    ]
    if left := shares.values[_MOST_SAID:]:
        said.append(f"{len(left):,} more {sum(share.of_all for share in left):.1%}")
    return f"tokens by {shares.name}: {', '.join(said)}"


def tags_of_step(pieces: Iterable[tuple[Mapping[str, TagValue], int]]) -> list[TagShares]:
    """Return the shares of each tag in some pieces, from their tags and tokens, except tags with fractions."""
    found: dict[str, dict[str, Counted]] = defaultdict(lambda: defaultdict(Counted))
    for columns, tokens in pieces:
        for name, value in columns.items():
            if not isinstance(value, float):
                said = value if isinstance(value, str) else str(value).lower()
                found[name][said].add(1, tokens)
    return [_shares_of(name, by_value) for name, by_value in sorted(found.items())]


def _shares_of(name: str, by_value: Mapping[str, Counted]) -> TagShares:
    total = max(1, sum(counted.tokens for counted in by_value.values()))
    parts = {value: (counted, counted.tokens / total) for value, counted in by_value.items()}
    return TagShares.of(name, parts)
