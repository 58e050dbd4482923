"""What a mix file says of how records become samples: one model a transform, in one closed list.

A transform keeps positions: what samples a record gives, one, several or none, is decided by the record, its position,
the transform and the length of rows alone; of ``concat``, by the other records of its unit too.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_serializer,
    model_validator,
)

from omniload.base.config import StrictModel, fault_at
from omniload.base.settings.faults import NAME_PATTERN
from omniload.base.settings.quantities import Count
from omniload.mix.schema.image_tiles import ImageTiles
from omniload.mix.schema.messages import ChatTransform, CompletionTransform, PreferenceTransform

__all__ = [
    "ChatTransform",
    "ClampTransform",
    "CompletionTransform",
    "ConcatTransform",
    "FilterTransform",
    "ImagesTransform",
    "MapTransform",
    "MiddleTransform",
    "Options",
    "PreferenceTransform",
    "TransformConfig",
    "encoding_of",
    "is_of_text",
]

_MOST_TOKENS = 1 << 30
MOST_PIXELS = 1 << 26
"""Pixels of a stored image at most: 192 MiB once decoded, and below where Pillow warns by itself."""


class ImagesTransform(StrictModel):
    """Turns encoded images into patches, with placeholders among the tokens. Makes the tokens; sets ``loss_mask``.

    Directly after ``chat`` or ``preference``, it handles the images of conversations and leaves their loss mask
    unchanged.

    An image keeps its aspect and is resized to a whole number of tokens, at most ``max_patches`` patches. An image is
    never cut: a record that is longer than a row becomes several samples, cut between images.
    """

    type: Literal["images"]
    patch: int = Field(default=14, ge=1, le=256)
    """Side of a patch in pixels."""
    merge: int = Field(default=1, ge=1, le=16)
    """Side, in patches, of the square that becomes one token. The patches of a square are stored together."""
    max_patches: Count = Field(default=1024, ge=1, le=1 << 20)
    """Largest number of patches of an image; a larger image is shrunk."""
    max_record_patches: Count = Field(default=1 << 16, ge=1, le=1 << 24)
    """Largest number of patches of all images of a record, because they are held in memory together. A record with more
    is bad."""
    placeholder: Annotated[int, Field(ge=0, lt=1 << 31)] | str
    """Token in the place of an image's embeddings: an id, or a special token of the tokenizer."""
    begin: Annotated[int, Field(ge=0, lt=1 << 31)] | str | None = None
    """Token before an image's placeholders."""
    end: Annotated[int, Field(ge=0, lt=1 << 31)] | str | None = None
    """Token after an image's placeholders."""
    marker: str = Field(default="<image>", min_length=1, max_length=64)
    """Text that marks the place of an image, once for each image, in order. In a text without markers, images come
    first. In a conversation, every image needs its place."""
    max_pixels: Count = Field(default=MOST_PIXELS, ge=1, le=MOST_PIXELS)
    """An image with more pixels, as stored, is refused before it is decoded."""
    tiles: ImageTiles | None = None
    """How to cut each image into tiles, as InternVL, Idefics 3 and SmolVLM do. Each tile is an image of the sample; the
    tiles of one image stay together."""

    @model_validator(mode="after")
    def _one_token_fits(self) -> Self:
        if self.max_patches < self.merge**2:
            raise fault_at(
                f"max_patches is {self.max_patches}, less than the {self.merge**2} patches of a token; raise it",
                "max_patches",
            )
        return self

    @model_validator(mode="after")
    def _tiles_fit(self) -> Self:
        if self.tiles is not None:
            self.tiles.require_fit(
                self.patch, self.merge, self.max_patches, self.max_record_patches
            )
        return self

    @model_serializer(mode="wrap")
    def _as_it_is_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what changes nothing as releases know it that had no such key: their runs are gone on with."""
        content: dict[str, Any] = handler(self)
        if content.get("tiles", ()) is None:
            del content["tiles"]
        return content

    @property
    def bound(self) -> str:
        """Key that is lowered where images are to have fewer patches."""
        return "max_patches" if self.tiles is None else f"{self.tiles.bound} of tiles"

    @property
    def values_per_patch(self) -> int:
        """Values of a patch: three colours a pixel."""
        return 3 * self.patch**2

    @property
    def values_per_token(self) -> int:
        """Values of the patches of a token: its bytes."""
        return self.values_per_patch * self.merge**2


class ClampTransform(StrictModel):
    """Keeps the first tokens of a sample. Shortens samples; a mask is cut with them, and an image is dropped whole."""

    type: Literal["clamp"]
    tokens: Count = Field(ge=1, le=_MOST_TOKENS)
    """Largest number of tokens of a sample."""


class FilterTransform(StrictModel):
    """Drops samples by their length; the others stay unchanged."""

    type: Literal["filter"]
    min_tokens: Count = Field(default=1, ge=1, le=_MOST_TOKENS)
    """Shorter samples are left out."""
    max_tokens: Count = Field(default=_MOST_TOKENS, ge=1, le=_MOST_TOKENS)
    """Longer samples are left out."""
    min_trained_tokens: Count = Field(default=0, ge=0, le=_MOST_TOKENS)
    """Drop samples whose mask trains on fewer tokens, because a conversation without an answer teaches nothing."""


class ConcatTransform(StrictModel):
    """Joins the documents of a unit end to end, in the order of the file, and cuts them into samples of one length.

    llm-foundry, nanotron and Megatron make their sequences in the same way. Nothing is lost, so the last sample of a
    unit may be short. A mask is joined and cut with the tokens. A ``filter`` after it sees the length of the new
    samples.
    """

    type: Literal["concat"]
    tokens: Count = Field(ge=2, le=_MOST_TOKENS)
    """Tokens of a sample; ``pack.length`` if weights count sequences."""
    documents: Literal["joined", "apart"] = "joined"
    """``joined``: a sample becomes one document, and attention crosses the seams. ``apart``: batches say where each
    document inside a sample begins, so attention, positions, labels and costs stay within documents. Such a sample is
    never cut."""

    @model_serializer(mode="wrap")
    def _as_it_is_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what changes nothing as releases know it that had no such key: their runs are gone on with."""
        content: dict[str, Any] = handler(self)
        if content.get("documents") == "joined":
            del content["documents"]
        return content


Mark = Annotated[str, Field(min_length=1, max_length=256)] | Annotated[int, Field(ge=0, lt=1 << 31)]


class MiddleTransform(StrictModel):
    """Fill in the middle: moves the middle of some documents to their end. Rearranges tokens and adds three marks.

    Seed, source and position alone decide which documents are rearranged, where they are cut, and in which form. The
    token that ends a document stays last.
    """

    type: Literal["fim"]
    rate: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    """Share of the documents to rearrange."""
    spm: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    """Share of the rearranged documents in the form suffix, prefix, middle. The others are prefix, suffix, middle."""
    prefix: Mark
    """Token that begins the prefix: its name in the vocabulary, such as ``<fim_prefix>``, or its id."""
    suffix: Mark
    """Token that begins the suffix."""
    middle: Mark
    """Token that begins the middle."""


Option = (
    StrictBool
    | Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
    | StrictStr
)
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=128)]
Options = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)],
    Option | tuple[Option, ...],
]


class MapTransform(StrictModel):
    """Your own function, which an installed distribution registers under ``omniload.transforms``.

    The function changes only what ``of`` names, and may leave records out only if ``drops`` is set. It gets a batch of
    records and must decide about each record by that record alone.
    """

    type: Literal["map"]
    function: Name
    """Name of the function among the entry points ``omniload.transforms``."""
    of: Literal["text", "tokens"] = "text"
    """``text``: the text of records, before it is tokenised; messages, or texts of several keys, come as JSON.
    ``tokens``: the token ids of samples, including the end of a document."""
    drops: bool = False
    """Whether the function may leave a record out by returning a null or an empty value. If not, such a value stops the
    run."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments for the function, besides the records."""


# A closed list. The file names a transform, never a class to import.
TransformConfig = Annotated[
    ChatTransform
    | CompletionTransform
    | PreferenceTransform
    | ImagesTransform
    | ClampTransform
    | FilterTransform
    | MiddleTransform
    | MapTransform
    | ConcatTransform,
    Field(discriminator="type"),
]


def encoding_of(transforms: Sequence[TransformConfig]) -> TransformConfig | None:
    """Return the first transform that is done behind what maps the text of records: what may make tokens of it."""
    behind = (each for each in transforms if not is_of_text(each))
    return next(behind, None)


def is_of_text(transform: TransformConfig) -> bool:
    """Tell whether a transform takes and gives text."""
    return isinstance(transform, MapTransform) and transform.of == "text"
