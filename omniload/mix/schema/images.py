"""What sources of images ask of the rest of a mix."""

from collections.abc import Iterator, Mapping

from pydantic_core import PydanticCustomError

from omniload.base.config import fault_at
from omniload.mix.sources import SourceBase

__all__ = ["images_cut"]


def images_cut(
    sources: Mapping[str, SourceBase], method: str, overlong: str
) -> Iterator[PydanticCustomError]:
    """Yield packing that would cut images, and sources whose patches differ.

    Args:
        sources: The sources by name.
        method: ``pack.method``.
        overlong: ``pack.overlong``.
    """
    found = {
        name: transform
        for name, source in sources.items()
        if (transform := source.images_transform) is not None
    }
    if found and method == "concat_and_split":
        yield fault_at(
            f"method is concat_and_split, which cuts documents anywhere, and sources.{next(iter(found))} holds "
            "images, which are never cut; use best_fit or none",
            *("pack", "method"),
        )
    if found and overlong == "truncate":
        yield fault_at(
            f"overlong is truncate, which may cut an image of sources.{next(iter(found))}; use split or drop",
            *("pack", "overlong"),
        )
    for name, transform in found.items():
        first, other = next(iter(found.items()))
        if (transform.patch, transform.merge) != (other.patch, other.merge):
            yield fault_at(
                f"patch and merge are {transform.patch} and {transform.merge}, and {other.patch} and {other.merge} "
                f"in sources.{first}; a model takes patches of one size",
                *("sources", name, "transforms", 0),
            )
