"""The keys that a source of any type has, and what they ask of each other: which transforms go together."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from omniload.base.config import fault_at
from omniload.mix.schema.cuts import require_joinable, require_plain
from omniload.mix.schema.messages import ChatTransform, MessageTransform
from omniload.mix.schema.packing.source_packs import SourcePack
from omniload.mix.schema.records import (
    Dedupe,
    OnError,
    Overlong,
    ShuffleConfig,
    Where,
)
from omniload.mix.schema.sources.own_columns import NamesColumns
from omniload.mix.schema.splits import TRAIN, Name, Splits, share_of
from omniload.mix.schema.transforms import (
    ClampTransform,
    ConcatTransform,
    ImagesTransform,
    MapTransform,
    MiddleTransform,
    PreferenceTransform,
    TransformConfig,
    encoding_of,
    is_of_text,
)

__all__ = ["Paths", "SourceBase"]

_MAKES_TOKENS = MessageTransform | ImagesTransform
_USE = "use jsonl, csv, parquet, arrow, lance, mds or webdataset"
"""Whose records have columns."""


def _not_empty(path: str) -> str:
    # A variable that is set to nothing would stand for all that lies beside the mix file.
    if not path:
        raise fault_at("path is empty; name files, or . for the folder of the mix file")
    return path


Pattern: TypeAlias = Annotated[str, AfterValidator(_not_empty)]
Paths: TypeAlias = Pattern | Annotated[tuple[Pattern, ...], Field(min_length=1)]


class SourceBase(NamesColumns):
    """The keys that a source of any type has."""

    has_columns: ClassVar[bool] = False
    """Whether a record has keys or columns by name, which conditions and what it is known by can be read from."""
    reads_beside: ClassVar[bool] = False
    """Whether keys or columns beside that of the text can be read with it, as one object."""
    key_field: ClassVar[str] = "key"
    """Key of the source that names what a document is known by."""

    path: Paths
    """Files: paths, folders, globs with ``{0..9}`` and ``{a,b}``, or URLs that fsspec opens. Relative paths start at
    the mix file. A folder stands for the files of this type in it."""
    tags: dict[Name, str] = Field(default_factory=dict)
    """Labels of the source, such as ``{domain: math}``. Batches carry them by source, and cost functions and strategies
    may use them."""
    shuffle: ShuffleConfig = ShuffleConfig()
    """Order of the records."""
    on_error: OnError = OnError()
    """What to do with a record that cannot be decoded."""
    transforms: tuple[TransformConfig, ...] = ()
    """Transforms that turn records into samples, in order."""
    where: Where = Field(default_factory=dict)
    """Conditions on columns (for ``jsonl`` on keys, for ``webdataset`` on keys of a JSON member). Only records that
    meet all conditions are drawn. ``{lang: [en, de]}`` allows several values, ``{lang: en}`` one, and
    ``{quality: {at_least: 0.5}}`` a range. A null meets no condition."""
    dedupe: Dedupe | None = None
    """Draw only the first of several equal records, in the order of the files. Records are equal by ``content`` (text,
    token ids and images) or by ``key`` (the key that the source names). The whole source is read once to find equal
    records."""
    drawn_before: Annotated[str, Field(min_length=1, max_length=4_096)] | None = None
    """A file of records that another loader or an earlier run has already drawn in its unfinished epoch, as written by
    ``omniload mix import --state`` and ``omniload mix drawn``. The first epoch here leaves these records out; later
    epochs draw them."""
    overlong: Overlong | None = None
    """What to do with documents of this source longer than a row, in place of ``pack.overlong``: ``split`` cuts them
    into pieces, ``truncate`` keeps their start, ``drop`` leaves them out, ``refuse`` ends the run."""
    pack: SourcePack | None = Field(default=None, exclude_if=lambda pack: pack is None)
    """How documents of this source are packed, if different from the ``pack`` of the mix."""
    max_repetition: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] | None = None
    """How often a run may go through the records of this source. The run stops before a step that needs more;
    ``mix plan`` predicts that step."""
    max_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of the mix, in the unit that weights count, that any stage may give this source. A mix that gives
    it more is refused."""
    splits: Splits | None = None
    """Splits of this source, in place of those of the mix. ``{}`` holds nothing out."""
    split: Name | None = None
    """The split to draw from this source, in place of that of the mix."""

    @model_validator(mode="after")
    def _transforms_fit(self) -> Self:
        _require_transforms_fit(self)
        _require_columns(self)
        return self

    @property
    def beside_columns(self) -> tuple[str, ...]:
        """Keys or columns that are read beside that of the text: of prompts, rejected answers, and tools."""
        first = encoding_of(self.transforms)
        return first.beside if isinstance(first, MessageTransform) else ()

    @property
    def may_lack_beside(self) -> tuple[str, ...]:
        """Those of them that a record may be without, as not every conversation has tools."""
        first = encoding_of(self.transforms)
        return first.may_lack if isinstance(first, MessageTransform) else ()

    @property
    def pair_columns(self) -> tuple[str, ...]:
        """Those of them that are of preference pairs; none without such."""
        first = encoding_of(self.transforms)
        return first.beside if isinstance(first, PreferenceTransform) else ()

    @property
    def images_transform(self) -> ImagesTransform | None:
        """The transform that makes patches of its images, where it holds any."""
        return next((each for each in self.transforms if isinstance(each, ImagesTransform)), None)

    @property
    def concat_transform(self) -> ConcatTransform | None:
        """The transform that joins its documents and cuts samples of one length, where it has one."""
        return next((each for each in self.transforms if isinstance(each, ConcatTransform)), None)

    @property
    def sequence_tokens(self) -> int | None:
        """Tokens of each of its samples, but for the last of a unit or file; ``None`` where lengths are their own."""
        return None if self.concat_transform is None else self.concat_transform.tokens

    @property
    def cuts_records(self) -> bool:
        """Whether a record may give several samples: sequences that begin in it, or parts cut between its images."""
        return self.concat_transform is not None or bool(self.image_members)

    @property
    def sequence_key(self) -> tuple[str | int, ...]:
        """Key below the source that says how long its samples are; none where lengths are their own."""
        joined = self.concat_transform
        return () if joined is None else ("transforms", self.transforms.index(joined), "tokens")

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether its samples hold several documents, and say where each begins."""
        return self.concat_transform is not None and self.concat_transform.documents == "apart"

    @property
    def image_members(self) -> tuple[str, ...]:
        """Where its images are: a column, or the extensions of members; none where it holds none."""
        return ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The patterns as a tuple, however they were written."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def holds_text(self) -> bool:
        """Whether its records are text, to be tokenised, and not token ids."""
        return True

    @property
    def is_nested(self) -> bool:
        """Whether its text may be nested values, such as lists of messages, that a transform takes as JSON."""
        first = encoding_of(self.transforms)
        return isinstance(first, MessageTransform)

    @property
    def key_column(self) -> str | None:
        """Column or key of a line that a document is known by, where something asks for it; else its content is."""
        return None

    @property
    def wants_keys(self) -> bool:
        """Whether anything asks what a document is known by."""
        return bool(self.splits) or self.dedupe == "key"

    @property
    def share_drawn(self) -> float:
        """The share of its documents that its split has, about."""
        return share_of(self.splits, self.split or TRAIN) if self.splits else 1.0

    @property
    def may_end_empty(self) -> bool:
        """Whether its first epoch may give no sample though others do, or its split has none."""
        return self.share_drawn < 1 or self.drawn_before is not None

    @property
    def rests_on_more(self) -> bool:
        """Whether what it holds rests on more than its keys and its files say."""
        return self.drawn_before is not None

    def within(self, splits: Mapping[str, float], split: str) -> Self:
        """Return the source with what it leaves to its mix: the splits there are, and the one that is drawn."""
        own = dict(splits) if self.splits is None else self.splits
        drawn = self.split or split
        if drawn not in {TRAIN, *own}:
            raise fault_at(
                f"split is {drawn!r}, and the source has {', '.join([*own, TRAIN])}; choose one of them, or declare it "
                "under splits",
                *(("split",) if self.split else ()),
            )
        # Without splits nothing is written into it: its digest stays that of a mix that knows of none.
        return self.model_copy(update={"splits": own, "split": drawn}) if own else self


def _require_columns(source: SourceBase) -> None:
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
            f"dedupe is key, but the source names no key under {source.key_field}; "
            f"{'name the column' if source.has_columns else _USE}, or say content",
            "dedupe",
        )


def _require_transforms_fit(source: SourceBase) -> None:
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
            what = ""
            if isinstance(transform, ChatTransform):
                what = " with tools" if transform.tools else " with system"
            raise fault_at(
                f"transforms[{i}]: {transform.type}{what} reads several keys of a record, and the source is of type "
                f"{_type_of(source)}; use jsonl, csv, parquet, arrow or lance",
                *at,
            )
        key = getattr(source, "column", None) or getattr(source, "text", None)
        if isinstance(transform, MessageTransform) and key in transform.beside:
            raise fault_at(
                f"transforms[{i}]: {transform.type} reads {key!r} in addition to the text, but text of the source "
                "names the same key; name two different keys",
                *at,
            )
        if isinstance(transform, ClampTransform) and source.pair_columns:
            raise fault_at(
                f"transforms[{i}]: clamp would cut a pair; remove clamp, and drop long pairs with a filter",
                *at,
            )
        if isinstance(transform, MiddleTransform):
            require_plain(source, i, "fim rearranges tokens")
        if isinstance(transform, ConcatTransform):
            require_joinable(source, i)
    _require_patches(source)


def _why_not_of_text(source: SourceBase, i: int) -> str:
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


def _goes_into_messages(source: SourceBase, i: int) -> bool:
    """Whether a transform is that of the images of conversations or pairs, which stands right behind theirs."""
    transforms = source.transforms
    return (
        i > 0
        and isinstance(transforms[i], ImagesTransform)
        and isinstance(transforms[i - 1], ChatTransform | PreferenceTransform)
        and encoding_of(transforms) is transforms[i - 1]
    )


def _require_mapped(source: SourceBase, i: int) -> None:
    """Refuse a function of text where there is none, and one of tokens that something else goes with."""
    at = ("transforms", i)
    if not is_of_text(source.transforms[i]):
        require_plain(source, i, "map gives other tokens")
        return
    if not source.holds_text:
        raise fault_at(
            f"transforms[{i}]: map is of text, but the source holds token ids; say of: tokens", *at
        )
    if not all(map(is_of_text, source.transforms[:i])):
        raise fault_at(
            f"transforms[{i}]: map is of text, but comes after the transform that makes tokens; put map first, or "
            "say of: tokens",
            *at,
        )


def _require_patches(source: SourceBase) -> None:
    """Refuse images that nothing makes patches of, and a transform that finds none."""
    first, images = encoding_of(source.transforms), source.images_transform
    if isinstance(first, ChatTransform | PreferenceTransform):
        _require_marker(source, first)
    elif images is not None and not source.image_members:
        i = source.transforms.index(images)
        raise fault_at(
            f"transforms[{i}]: images needs a source with images; name them under images, in a source of type "
            "webdataset, parquet or arrow",
            *("transforms", i),
        )
    if source.image_members and images is None:
        raise fault_at(
            f"images is {list(source.image_members)} and no transform makes patches of them; add "
            "{type: images, placeholder: ...} under transforms, or leave images out",
            "images",
        )


def _require_marker(source: SourceBase, first: ChatTransform | PreferenceTransform) -> None:
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
                f"transforms[{i}]: form is text, so no template writes anything for an image; leave image out: "
                "images stand at the marker of the transform images",
                *("transforms", i, "image"),
            )
        return
    if first.image is None:
        raise fault_at(
            f"transforms[{i}]: {first.type} is followed by images but has no image; give the text that the template "
            'writes for an image, such as image: "<|image_pad|>"',
            *("transforms", i),
        )


def _type_of(source: SourceBase) -> str:
    # Each type of source has it as a key of its own.
    return str(getattr(source, "type", "another"))
