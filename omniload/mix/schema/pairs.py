"""What sources of preference pairs ask of the rest of a mix."""

from collections.abc import Mapping

from omniload.base.config import fault_at
from omniload.mix.sources import SourceBase

__all__ = ["require_pairs_whole"]


def require_pairs_whole(sources: Mapping[str, SourceBase], method: str, overlong: str) -> None:
    """Refuse packing that would cut a pair: half of one says nothing.

    Args:
        sources: The sources by name.
        method: ``pack.method``.
        overlong: ``pack.overlong``.

    Raises:
        PydanticCustomError: Says where.
    """
    name = next((n for n, source in sources.items() if source.pair_columns), None)
    if name is None:
        return
    if method == "concat_and_split":
        raise fault_at(
            f"method is concat_and_split, which cuts documents anywhere, and sources.{name} holds preference pairs, "
            "which stay whole; use best_fit or none",
            *("pack", "method"),
        )
    if overlong != "drop":
        raise fault_at(
            f"overlong is {overlong}, which cuts a pair of sources.{name} that is longer than a row; use drop, and a "
            "length that most pairs fit into",
            *("pack", "overlong"),
        )
