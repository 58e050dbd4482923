"""Which transforms go together, and what settings of a source ask of what it holds."""

from typing import Any, Protocol

from omniload.base.config import fault_at
from omniload.mix.columns import LOSS_MASK
from omniload.mix.schema.conditions import Where
from omniload.mix.schema.records import Dedupe
from omniload.mix.schema.transforms import (
    ChatTransform,
    ClampTransform,
    ImagesTransform,
    MapTransform,
    MiddleTransform,
    PreferenceTransform,
    TransformConfig,
    encoding_of,
    is_of_text,
)

__all__ = ["require_columns", "require_transforms_fit"]

_MAKES_TOKENS = (ChatTransform, PreferenceTransform, ImagesTransform)


class _Described(Protocol):
    """What a source says of itself, as ``SourceBase`` does."""

    @property
    def transforms(self) -> tuple[TransformConfig, ...]: ...
    @property
    def holds_text(self) -> bool: ...
    @property
    def holds_objects(self) -> bool: ...
    @property
    def is_nested(self) -> bool: ...
    @property
    def image_members(self) -> tuple[str, ...]: ...
    @property
    def pair_columns(self) -> tuple[str, ...]: ...
    @property
    def key_column(self) -> str | None: ...
    @property
    def where(self) -> Where: ...
    @property
    def dedupe(self) -> Dedupe | None: ...


def require_columns(source: _Described) -> None:
    """Refuse conditions and keys where records have no columns to read them from.

    Raises:
        PydanticCustomError: Says which.
    """
    if source.where and not source.holds_objects:
        raise fault_at(
            f"where reads columns, and the source is of type {_type_of(source)}; use jsonl, parquet or arrow",
            "where",
        )
    if source.dedupe == "key" and source.key_column is None:
        remedy = "name the column" if source.holds_objects else "use jsonl, parquet or arrow"
        raise fault_at(
            f"dedupe is key, and the source names none under key; {remedy}, or say content",
            "dedupe",
        )


def require_transforms_fit(source: _Described) -> None:
    """Refuse transforms that do not fit each other, or what the source holds.

    Raises:
        PydanticCustomError: Says which.
    """
    for i, transform in enumerate(source.transforms):
        at = ("transforms", i)
        before = source.transforms[:i]
        if isinstance(transform, _MAKES_TOKENS) and not (
            source.holds_text and all(map(is_of_text, before))
        ):
            why = (
                "comes after another"
                if source.holds_text
                else "needs text, and the source holds token ids"
            )
            raise fault_at(
                f"transforms[{i}]: {transform.type} {why}; make it the first transform of a source of text",
                *at,
            )
        if isinstance(transform, MapTransform):
            _require_mapped(source, i)
        if isinstance(transform, PreferenceTransform) and not source.holds_objects:
            raise fault_at(
                f"transforms[{i}]: preference reads several keys of a record, and the source is of type "
                f"{_type_of(source)}; use jsonl, parquet or arrow",
                *at,
            )
        if isinstance(transform, ClampTransform) and source.pair_columns:
            raise fault_at(
                f"transforms[{i}]: clamp would cut a pair; leave it out, and long pairs by filter",
                *at,
            )
        if isinstance(transform, MiddleTransform):
            _require_plain(source, i, "fim rearranges tokens")
    _require_patches(source)


def _require_mapped(source: _Described, i: int) -> None:
    """Refuse a function of text where there is none, and one of tokens that something else goes with."""
    at = ("transforms", i)
    if not is_of_text(source.transforms[i]):
        _require_plain(source, i, "map gives other tokens")
        return
    if not source.holds_text:
        raise fault_at(
            f"transforms[{i}]: map is of text, and the source holds token ids; say of: tokens", *at
        )
    if not all(map(is_of_text, source.transforms[:i])):
        raise fault_at(
            f"transforms[{i}]: map is of text, and comes behind what makes tokens of it; put it first, or say of: "
            "tokens",
            *at,
        )


def _require_plain(source: _Described, i: int, does: str) -> None:
    """Refuse to change tokens that something else goes with."""
    masked = source.is_nested or LOSS_MASK in getattr(source, "columns", {})
    if masked or source.image_members:
        has = "a mask of them" if masked else "images between them"
        raise fault_at(
            f"transforms[{i}]: {does}, and the source has {has}; use it on plain text or token ids",
            *("transforms", i),
        )


def _require_patches(source: _Described) -> None:
    """Refuse images that nothing makes patches of, and a transform that finds none."""
    first = encoding_of(source.transforms)
    if isinstance(first, ImagesTransform) and not source.image_members:
        i = source.transforms.index(first)
        raise fault_at(
            f"transforms[{i}]: images needs a source that holds some; name them under images, in a source of type "
            "webdataset, parquet or arrow",
            *("transforms", i),
        )
    if source.image_members and not isinstance(first, ImagesTransform):
        raise fault_at(
            f"images is {list(source.image_members)} and no transform makes patches of them; add "
            "{type: images, placeholder: ...} under transforms, or leave images out",
            "images",
        )


def _type_of(source: Any) -> str:  # noqa: ANN401 -- each type of source has it as a key of its own
    return str(getattr(source, "type", "another"))
