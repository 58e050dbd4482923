"""What sources of images ask of the rest of a mix."""

from collections.abc import Mapping

from omniload.base.config import fault_at
from omniload.mix.sources import SourceBase

__all__ = ["require_images_whole"]


def require_images_whole(sources: Mapping[str, SourceBase], method: str, overlong: str) -> None:
    """Refuse packing that would cut images, and sources whose patches differ.

    Args:
        sources: The sources by name.
        method: ``pack.method``.
        overlong: ``pack.overlong``.

    Raises:
        ValueError: Says where.
    """
    found = {
        name: transform
        for name, source in sources.items()
        if (transform := source.images_transform) is not None
    }
    if found and method == "concat_and_split":
        raise fault_at(
            f"method is concat_and_split, which cuts documents anywhere, and sources.{next(iter(found))} holds "
            "images, which are never cut; use best_fit or none",
            *("pack", "method"),
        )
    if found and overlong == "truncate":
        raise fault_at(
            f"overlong is truncate, which may cut an image of sources.{next(iter(found))}; use split or drop",
            *("pack", "overlong"),
        )
    for name, transform in found.items():
        first, other = next(iter(found.items()))
        if (transform.patch, transform.merge) != (other.patch, other.merge):
            raise fault_at(
                f"patch and merge are {transform.patch} and {transform.merge}, and {other.patch} and {other.merge} "
                f"in sources.{first}; a model takes patches of one size",
                *("sources", name, "transforms", 0),
            )
