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
    """Encoded images to patches, and placeholders for them among the tokens. Makes the tokens; sets ``loss_mask``.

    Right behind ``chat`` or ``preference`` they are the images of conversations, whose loss stays what it is there.

    An image is resized, its aspect kept, to as many whole tokens as it fills, and at most ``max_patches``. It is never
    cut: a record that is longer than a row becomes several samples, cut between images.
    """

    type: Literal["images"]
    patch: int = Field(default=14, ge=1, le=256)
    """Side of a patch in pixels."""
    merge: int = Field(default=1, ge=1, le=16)
    """Side, in patches, of the square that becomes one token; its patches lie together."""
    max_patches: Count = Field(default=1024, ge=1, le=1 << 20)
    """Most patches of an image; one that is larger is shrunk."""
    max_record_patches: Count = Field(default=1 << 16, ge=1, le=1 << 24)
    """Most patches of the images of a record, which are held in memory together: more make it a bad record."""
    placeholder: Annotated[int, Field(ge=0, lt=1 << 31)] | str
    """Token that holds the place of an image's embeddings: a number, or a special token of the tokenizer."""
    begin: Annotated[int, Field(ge=0, lt=1 << 31)] | str | None = None
    """Token before an image's placeholders."""
    end: Annotated[int, Field(ge=0, lt=1 << 31)] | str | None = None
    """Token behind them."""
    marker: str = Field(default="<image>", min_length=1, max_length=64)
    """What stands in the text where an image belongs, once for each image, in order. In a text without it, images come
    first; in a conversation each has its place."""
    max_pixels: Count = Field(default=MOST_PIXELS, ge=1, le=MOST_PIXELS)
    """An image of more pixels, as stored, is refused before it is decoded."""
    tiles: ImageTiles | None = None
    """Tiles that each image is cut into, as InternVL, Idefics 3 and SmolVLM cut theirs. Each is an image of the sample;
    those of one image stay together."""

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
    """Keeps the first tokens of a sample. Shortens samples; a mask is cut with the tokens, an image left out whole."""

    type: Literal["clamp"]
    tokens: Count = Field(ge=1, le=_MOST_TOKENS)
    """Most tokens of a sample."""


class FilterTransform(StrictModel):
    """Leaves samples out by their length. Drops samples; the others stay as they are."""

    type: Literal["filter"]
    min_tokens: Count = Field(default=1, ge=1, le=_MOST_TOKENS)
    """Shorter samples are left out."""
    max_tokens: Count = Field(default=_MOST_TOKENS, ge=1, le=_MOST_TOKENS)
    """Longer samples are left out."""
    min_trained_tokens: Count = Field(default=0, ge=0, le=_MOST_TOKENS)
    """Samples whose mask trains on fewer tokens are left out: a conversation without an answer teaches nothing."""


class ConcatTransform(StrictModel):
    """Joins the documents of a unit, end to end in the order of the file, and cuts them into samples of one length.

    As llm-foundry, nanotron and Megatron have their sequences: nothing is lost, so the last sample of a unit may be
    short. A mask is joined and cut with the tokens. Behind it a ``filter`` goes by the length of samples.
    """

    type: Literal["concat"]
    tokens: Count = Field(ge=2, le=_MOST_TOKENS)
    """Tokens of a sample; ``pack.length`` where weights are to count sequences."""
    documents: Literal["joined", "apart"] = "joined"
    """``joined``: a sample is one document from then on, and attention goes across what was joined. ``apart``: batches
    say where each document begins inside, so that attention, positions, labels and costs stay within documents; such a
    sample is never cut."""

    @model_serializer(mode="wrap")
    def _as_it_is_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what changes nothing as releases know it that had no such key: their runs are gone on with."""
        content: dict[str, Any] = handler(self)
        if content.get("documents") == "joined":
            del content["documents"]
        return content


Mark = Annotated[str, Field(min_length=1, max_length=256)] | Annotated[int, Field(ge=0, lt=1 << 31)]


class MiddleTransform(StrictModel):
    """Fill in the middle: of some documents the middle comes last. Rearranges tokens and adds three marks.

    Which documents, where they are cut and in which form depends on seed, source and position alone. The token
    that ends a document stays its last one.
    """

    type: Literal["fim"]
    rate: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    """Share of the documents that are rearranged."""
    spm: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    """Share of those in the form suffix, prefix, middle; the others are prefix, suffix, middle."""
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
    """A function of yours, which an installed distribution registers under ``omniload.transforms``.

    Changes what ``of`` names, and nothing else; leaves records out where ``drops`` says so. It is given a batch of
    records and decides of each by that record alone.
    """

    type: Literal["map"]
    function: Name
    """Its name among the entry points ``omniload.transforms``."""
    of: Literal["text", "tokens"] = "text"
    """``text``: the text of records, before anything makes tokens of it; of messages, or of several keys, it is JSON.
    ``tokens``: the token ids of samples, the end of a document among them."""
    drops: bool = False
    """Whether it may leave records out, by a null or an empty one in their place; if not, that stops the run."""
    options: Options = Field(default_factory=dict)
    """What it is given by keyword beside the records."""


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
