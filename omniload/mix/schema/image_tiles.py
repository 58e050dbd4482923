"""What a mix file says of images that are cut into tiles, as the processor of a model cuts them."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from omniload.base.config import StrictModel, fault_at

__all__ = ["TILE_WORDS", "ImageTiles"]

TILE_WORDS = ("row", "column", "number")
"""What may stand in braces in ``before_tile``."""
_IN_BRACES = re.compile(r"\{([a-z_]+)\}")
Words = Annotated[str, Field(max_length=256)]


class ImageTiles(StrictModel):
    """How to cut an image into tiles. Each tile is an image of its own, and so is a small thumbnail of the whole.

    All are ``size`` pixels high and wide. Tiles come in reading order, row by row. An image that fits into one tile is
    not cut and has no thumbnail.
    """

    size: int = Field(ge=1, le=4096)
    """Side of a tile in pixels: a multiple of ``patch * merge``, so that tiles are whole tokens."""
    max_tiles: int | None = Field(default=None, ge=1, le=256)
    """Largest number of tiles of an image. Of all grids with at most this many tiles, the image is stretched to the
    grid whose aspect is nearest to its own (InternVL, GOT-OCR 2). Give this or ``longest_edge``."""
    min_tiles: int = Field(default=1, ge=1, le=256)
    """With ``max_tiles``: smallest number of tiles of an image."""
    longest_edge: int | None = Field(default=None, ge=1, le=4096)
    """Length in pixels to which the longer side of an image is shrunk or enlarged, its aspect kept. Then the image is
    stretched to whole tiles (Idefics 3, SmolVLM)."""
    thumbnail: Literal["last", "first", "none"] = "last"
    """Where the thumbnail stands among the tiles."""
    before_tile: Words = ""
    """Text before each tile. It may contain ``{row}``, ``{column}`` or ``{number}``, counted from 1, and special
    tokens. The texts of tiles are tokenised separately from the text around the image, and are not trained on."""
    after_row: Words = ""
    """Text after the last tile of each row."""
    before_thumbnail: Words = ""
    """Text before the thumbnail."""
    before_alone: Words = ""
    """Text before an image that is not cut."""

    @model_validator(mode="after")
    def _cut_in_one_way(self) -> Self:
        if (self.max_tiles is None) == (self.longest_edge is None):
            has = "neither" if self.max_tiles is None else "both"
            raise fault_at(
                f"tiles has {has} of max_tiles and longest_edge, and one says into how many an image is cut; name "
                "max_tiles for the aspect that is nearest, longest_edge for one size of all",
                *(() if self.max_tiles is None else ("longest_edge",)),
            )
        if self.min_tiles > (self.max_tiles or 1):
            most = "longest_edge" if self.max_tiles is None else f"max_tiles {self.max_tiles}"
            raise fault_at(
                f"min_tiles is {self.min_tiles}, with {most}; lower it, or leave it out",
                "min_tiles",
            )
        return self

    @model_validator(mode="after")
    def _words_are_used(self) -> Self:
        if self.before_thumbnail and self.thumbnail == "none":
            raise fault_at(
                f"before_thumbnail is {self.before_thumbnail!r}, and thumbnail is none; leave one of them out",
                "before_thumbnail",
            )
        unknown = sorted(set(_IN_BRACES.findall(self.before_tile)) - set(TILE_WORDS))
        if unknown:
            raise fault_at(
                f"before_tile holds {'{' + unknown[0] + '}'}; what a tile has is {{{'}, {'.join(TILE_WORDS)}}}",
                "before_tile",
            )
        return self

    def require_fit(
        self, patch: int, merge: int, max_patches: int, max_record_patches: int
    ) -> None:
        """Refuse tiles that are no whole tokens, and those that an image or a record may not have."""
        size, most, unit = self.size, self.most_images, patch * merge
        if size % unit:
            raise fault_at(
                f"size is {size}, not whole tokens of patch * merge = {unit} pixels; name a multiple of it",
                *("tiles", "size"),
            )
        patches = (size // patch) ** 2
        if patches > max_patches:
            raise fault_at(
                f"a tile of {size} pixels has {patches} patches, more than max_patches {max_patches}; raise that, or "
                "lower size",
                *("tiles", "size"),
            )
        if patches * most > max_record_patches:
            raise fault_at(
                f"an image of {most} tiles, the thumbnail among them, has {patches * most} patches, more than "
                f"max_record_patches {max_record_patches}; raise that, or lower {self.bound}",
                *("tiles", self.bound),
            )

    @property
    def bound(self) -> str:
        """Key that says into how many tiles an image is cut."""
        return "longest_edge" if self.max_tiles is None else "max_tiles"

    @property
    def most_images(self) -> int:
        """Images that one image becomes at most: tiles and thumbnail."""
        most = self.max_tiles
        if most is None:
            assert self.longest_edge is not None, "the model has seen to it"
            # An odd side is made even, and may then be longer.
            most = (-(-(self.longest_edge + self.longest_edge % 2) // self.size)) ** 2
        return most + (most > 1 and self.thumbnail != "none")

    def most_tokens(self, unit: int) -> int:
        """Return the placeholders of an image at most, over all its tiles; ``unit``: pixels of a token's side."""
        return self.most_images * (self.size // unit) ** 2
