"""What sources of preference pairs ask of the rest of a mix."""

from collections.abc import Iterator, Mapping

from pydantic_core import PydanticCustomError

from omniload.base.config import fault_at
from omniload.mix.sources import SourceBase

__all__ = ["pairs_cut"]


def pairs_cut(
    sources: Mapping[str, SourceBase], method: str, overlong: str
) -> Iterator[PydanticCustomError]:
    """Yield packing that would cut a pair: half of one says nothing.

    Args:
        sources: The sources by name.
        method: ``pack.method``.
        overlong: ``pack.overlong``.
    """
    name = next((n for n, source in sources.items() if source.pair_columns), None)
    if name is None:
        return
    if method == "concat_and_split":
        yield fault_at(
            f"method is concat_and_split, which cuts documents anywhere, and sources.{name} holds preference pairs, "
            "which stay whole; use best_fit or none",
            *("pack", "method"),
        )
    if overlong != "drop":
        yield fault_at(
            f"overlong is {overlong}, which cuts a pair of sources.{name} that is longer than a row; use drop, and a "
            "length that most pairs fit into",
            *("pack", "overlong"),
        )
