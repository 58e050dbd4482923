"""Which keys, transforms and columns of a source go together."""

from typing import TYPE_CHECKING

from omniload.base.config import fault_at
from omniload.mix.columns import LOSS_MASK, column_kind, name_outside
from omniload.mix.schema.messages import ChatTransform, CompletionTransform, MessageTransform
from omniload.mix.schema.transforms import (
    ClampTransform,
    ConcatTransform,
    FilterTransform,
    ImagesTransform,
    MapTransform,
    MiddleTransform,
    PreferenceTransform,
    encoding_of,
    is_of_text,
)

if TYPE_CHECKING:
    from omniload.mix.schema.source_base import SourceBase

__all__ = ["require_columns", "require_transforms_fit"]

_MAKES_TOKENS = MessageTransform | ImagesTransform
_USE = "use jsonl, csv, parquet, arrow, lance, mds or webdataset"
"""Whose records have columns."""


def require_columns(source: "SourceBase") -> None:
    """Refuse conditions and keys where records have no columns to read them from.

    Raises:
        PydanticCustomError: Says which.
    """
    if source.where and not source.has_columns:
        raise fault_at(
            f"where reads columns, and the source is of type {_type_of(source)}; {_USE}", "where"
        )
    if source.dedupe == "key" and source.key_column is None:
        raise fault_at(
            f"dedupe is key, and the source names none under {source.key_field}; "
            f"{'name the column' if source.has_columns else _USE}, or say content",
            "dedupe",
        )


def require_transforms_fit(source: "SourceBase") -> None:
    """Refuse transforms that do not fit each other, or what the source holds.

    Raises:
        PydanticCustomError: Says which.
    """
    first = encoding_of(source.transforms)
    for i, transform in enumerate(source.transforms):
        at = ("transforms", i)
        before = source.transforms[:i]
        # Behind maps of text alone: whatever else stands before it has made tokens of the text.
        if isinstance(transform, _MAKES_TOKENS) and not (
            source.holds_text and (all(map(is_of_text, before)) or _goes_into_messages(source, i))
        ):
            raise fault_at(f"transforms[{i}]: {_why_not_of_text(source, i)}", *at)
        if isinstance(transform, MapTransform):
            _require_mapped(source, i)
        if transform is first and source.beside_columns and not source.reads_beside:
            what = " with tools" if isinstance(transform, ChatTransform) else ""
            raise fault_at(
                f"transforms[{i}]: {transform.type}{what} reads several keys of a record, and the source is of type "
                f"{_type_of(source)}; use jsonl, csv, parquet, arrow or lance",
                *at,
            )
        key = getattr(source, "column", None) or getattr(source, "text", None)
        if isinstance(transform, CompletionTransform) and key in transform.beside:
            raise fault_at(
                f"transforms[{i}]: prompt is {key!r}, which text of the source names too, as the key of the answer; "
                "name two keys",
                *at,
            )
        if isinstance(transform, ClampTransform) and source.pair_columns:
            raise fault_at(
                f"transforms[{i}]: clamp would cut a pair; leave it out, and long pairs by filter",
                *at,
            )
        if isinstance(transform, MiddleTransform):
            _require_plain(source, i, "fim rearranges tokens")
        if isinstance(transform, ConcatTransform):
            _require_joinable(source, i)
    _require_patches(source)


def _why_not_of_text(source: "SourceBase", i: int) -> str:
    """Say why a transform that makes tokens of text cannot do so there, and what to do."""
    type_ = source.transforms[i].type
    first = "make it the first transform of a source of text"
    if not source.holds_text:
        return f"{type_} needs text, and the source holds token ids; {first}"
    others = [each.type for each in source.transforms[:i] if isinstance(each, _MAKES_TOKENS)]
    if not others:
        return f"{type_} comes after another; {first}"
    if {type_, *others} == {"completion", "images"}:
        return "completion reads no images; write messages, and use chat with images behind it"
    if isinstance(source.transforms[i], MessageTransform) and others == ["images"]:
        return f"{type_} comes after images, which go into its messages; put images right behind it"
    # To put it first helps nobody here: the other one would be refused in its place.
    return f"{type_} comes after another, {others[0]}, and one transform makes tokens of a record; leave one out"


def _goes_into_messages(source: "SourceBase", i: int) -> bool:
    """Whether a transform is that of the images of conversations or pairs, which stands right behind theirs."""
    transforms = source.transforms
    return (
        i > 0
        and isinstance(transforms[i], ImagesTransform)
        and isinstance(transforms[i - 1], ChatTransform | PreferenceTransform)
        and encoding_of(transforms) is transforms[i - 1]
    )


def _require_mapped(source: "SourceBase", i: int) -> None:
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


def _require_joinable(source: "SourceBase", i: int) -> None:
    """Refuse to join documents that something of a whole sample goes with, and to change what was joined."""
    at = ("transforms", i)
    whole = [
        f"columns.{name_outside(name)}"
        for name in source.columns_read
        if not column_kind(name).aligned
    ]
    holds_images = source.image_members or source.images_transform
    held = "preference pairs" if source.pair_columns else "images" if holds_images else None
    if held or whole:
        raise fault_at(
            f"transforms[{i}]: concat joins documents and cuts them anywhere, and the source has {held or whole[0]}, "
            f"which belong{'' if held else 's'} to whole samples; leave {'concat' if held else 'one of them'} out",
            *at,
        )
    for behind in source.transforms[i + 1 :]:
        if not isinstance(behind, FilterTransform):
            raise fault_at(
                f"transforms[{i}]: {behind.type} comes behind concat, and is of documents; put it before, as a filter "
                "alone goes by the length of what was joined",
                *at,
            )


def _require_plain(source: "SourceBase", i: int, does: str) -> None:
    """Refuse to change tokens that something else goes with."""
    masked = source.is_nested or LOSS_MASK in source.columns_read
    # A value of the whole record stays what it is.
    own = next((name for name, said in source.own_columns.items() if not said.is_tag), None)
    if masked or source.image_members or own:
        between = f"columns.{own} with a value for each" if own else "images between them"
        has = "a mask of them" if masked else between
        raise fault_at(
            f"transforms[{i}]: {does}, and the source has {has}; use it on plain text or token ids",
            *("transforms", i),
        )


def _require_patches(source: "SourceBase") -> None:
    """Refuse images that nothing makes patches of, and a transform that finds none."""
    first, images = encoding_of(source.transforms), source.images_transform
    if isinstance(first, ChatTransform | PreferenceTransform):
        _require_marker(source, first)
    elif images is not None and not source.image_members:
        i = source.transforms.index(images)
        raise fault_at(
            f"transforms[{i}]: images needs a source that holds some; name them under images, in a source of type "
            "webdataset, parquet or arrow",
            *("transforms", i),
        )
    if source.image_members and images is None:
        raise fault_at(
            f"images is {list(source.image_members)} and no transform makes patches of them; add "
            "{type: images, placeholder: ...} under transforms, or leave images out",
            "images",
        )


def _require_marker(source: "SourceBase", first: ChatTransform | PreferenceTransform) -> None:
    """Refuse images among messages of which it is not known where the template puts them."""
    i, images = source.transforms.index(first), source.images_transform
    if images is None and (words := first.image_words) is not None:
        raise fault_at(
            f"transforms[{i}]: image is {words.marker!r}, and no transform makes patches of images; add "
            f"{{type: images, placeholder: ...}} behind {first.type}, or leave image out",
            *("transforms", i, "image"),
        )
    if images is None:
        return
    if isinstance(first, PreferenceTransform) and first.form == "text":
        if first.image is not None:
            raise fault_at(
                f"transforms[{i}]: form is text, in which no template writes anything for an image; leave image out, "
                "for images stand where marker of images does",
                *("transforms", i, "image"),
            )
        return
    if first.image is None:
        raise fault_at(
            f"transforms[{i}]: {first.type} has images behind it and no image; say there what the template writes for "
            'an image, such as image: "<|image_pad|>"',
            *("transforms", i),
        )


def _type_of(source: "SourceBase") -> str:
    # Each type of source has it as a key of its own.
    return str(getattr(source, "type", "another"))
