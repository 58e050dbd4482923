"""Samples as readable text."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.units import counted
from omniload.mix.config import MixConfig
from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.tokenize import Tokenizer
from omniload.source.transforms.image_blocks import token_id

__all__ = ["SampleTexts", "image_transforms", "runs_of", "text_of"]


def image_transforms(mix: MixConfig) -> dict[int, ImagesTransform]:
    """Return the transform that makes patches from images, for each source with images, by its number."""
    return {
        number: transform
        for number, name in enumerate(mix.names)
        if (transform := mix.sources[name].images_transform) is not None
    }


class SampleTexts:
    """Texts of the samples of a mix; in place of an image, they say how many tokens it has."""

    def __init__(self, mix: MixConfig, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._placeholders = (
            {}
            if tokenizer is None
            else {
                source: token_id(tokenizer, "placeholder", transform.placeholder)
                for source, transform in image_transforms(mix).items()
            }
        )

    def of(
        self,
        source: int,
        tokens: NDArray[np.integer[Any]],
        width: int = 0,
        *,
        special: bool = False,
    ) -> str:
        """Return the text of tokens of a source, as ``text_of`` does.

        Placeholders of images next to each other become ``<64 image tokens>``: as special tokens they would show
        nothing, and as text they would take the whole width.
        """
        placeholder = self._placeholders.get(source)
        if placeholder is None:
            return text_of(tokens, self._tokenizer, width, special=special)
        text = ""
        for begin, end, is_image in runs_of(tokens == placeholder):
            if is_image:
                text += f"<{counted(end - begin, 'image token')}>"
            else:
                text += text_of(tokens[begin:end], self._tokenizer, width, special=special)
            if 0 < width < len(text):
                break
        return text


def text_of(
    tokens: NDArray[np.integer[Any]],
    tokenizer: Tokenizer | None,
    width: int = 0,
    *,
    special: bool = False,
) -> str:
    """Return the text of tokens, or their ids if the mix names no tokenizer.

    Args:
        tokens: Token ids.
        tokenizer: Tokenizer of the mix.
        width: Wanted number of characters; 0 for all. No more tokens than that are decoded.
        special: Whether to show special tokens as well.
    """
    # A token stands for at least one character, except special tokens, which show nothing.
    wanted = tokens[: width + 1] if width else tokens
    if tokenizer is None:
        return " ".join(map(str, wanted.tolist()))
    return tokenizer.decode(wanted, special=special)


def runs_of(mask_T: NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """Return the stretches of tokens that a mask holds, and of those that it does not: begin, end, and which kind."""
    if not len(mask_T):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(mask_T)) + 1).tolist(), len(mask_T)]
    return [(a, b, bool(mask_T[a])) for a, b in pairwise(bounds)]
