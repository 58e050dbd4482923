"""The keys that a source of any type has, and what they ask of each other: which transforms go together."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from omniload.base.config import fault_at
from omniload.mix.schema.checks.transforms_fit import require_columns, require_transforms_fit
from omniload.mix.schema.messages import MessageTransform
from omniload.mix.schema.packing.source_packs import SourcePack
from omniload.mix.schema.records import (
    Dedupe,
    NamesColumns,
    OnError,
    Overlong,
    ShuffleConfig,
    Where,
)
from omniload.mix.schema.splits import TRAIN, Name, Splits, share_of
from omniload.mix.schema.transforms import (
    ConcatTransform,
    ImagesTransform,
    PreferenceTransform,
    TransformConfig,
    encoding_of,
)

__all__ = ["Paths", "SourceBase"]


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
    """Files: paths, folders, globs with ``{0..9}`` and ``{a,b}``, or URLs that fsspec opens; relative ones start at the
    mix file. Of a folder, the files of the type are taken."""
    tags: dict[Name, str] = Field(default_factory=dict)
    """Labels of the source, such as ``{domain: math}``: batches have them by source, and cost functions and strategies
    may go by them."""
    shuffle: ShuffleConfig = ShuffleConfig()
    """Order of the records."""
    on_error: OnError = OnError()
    """What to do with a record that cannot be decoded."""
    transforms: tuple[TransformConfig, ...] = ()
    """What is done to records on their way to samples, in order."""
    where: Where = Field(default_factory=dict)
    """Conditions on columns (of ``jsonl``, on keys; of ``webdataset``, on those of a JSON member): only
    records for which all hold are drawn. ``{lang: [en, de]}`` is one of several values, ``{lang: en}`` one,
    ``{quality: {at_least: 0.5}}`` a range; a null is left out."""
    dedupe: Dedupe | None = None
    """Of records that are equal, the first in the order of the files is drawn: equal by ``content``, their text, token
    ids and images, or by ``key``, what the source names there. A reading of the whole source finds them, once."""
    drawn_before: Annotated[str, Field(min_length=1, max_length=4_096)] | None = None
    """A file of records that another loader, or a run before this, had drawn in the epoch that it left, as
    ``omniload mix import --state`` and ``omniload mix drawn`` write it: they are left out of the first epoch here, and
    drawn in every other."""
    overlong: Overlong | None = None
    """Its documents longer than a row, in place of ``pack.overlong``: cut into pieces, cut off, left out, refused."""
    pack: SourcePack | None = Field(default=None, exclude_if=lambda pack: pack is None)
    """How its documents become rows, where not as ``pack`` of the mix has it."""
    max_repetition: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] | None = None
    """Most times that a run goes through its records: a step that asks for more stops it, as ``mix plan`` foresees."""
    max_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share that any stage gives it, of what weights count; a mix that gives it more is refused."""
    splits: Splits | None = None
    """Splits of this source, in place of the mix's: ``{}`` holds nothing out."""
    split: Name | None = None
    """The split that is drawn of this source, in place of the mix's."""

    @model_validator(mode="after")
    def _transforms_fit(self) -> Self:
        require_transforms_fit(self)
        require_columns(self)
        return self

    @property
    def beside_columns(self) -> tuple[str, ...]:
        """Keys or columns that are read beside that of the text: of prompts, rejected answers, and tools."""
        first = encoding_of(self.transforms)
        return first.beside if isinstance(first, MessageTransform) else ()

    @property
    def may_lack_beside(self) -> bool:
        """Whether a record may be without one of those, as not every conversation has tools."""
        first = encoding_of(self.transforms)
        return isinstance(first, MessageTransform) and first.may_lack

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
