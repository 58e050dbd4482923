"""One encoded image as a part of a sample: its whole tokens, and the patches of each of its tiles.

::

    image     cut into 1 x 2 tiles, with a thumbnail
    block     B <row_1_col_1> p p p p <row_1_col_2> p p p p <global> p p p p E        three images of the sample
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.tokenize import Tokenizer
from omniload.source.transforms.image_patches import BadImageError, patches_of
from omniload.source.transforms.image_tiles import words_of

__all__ = ["ImageBlock", "ImageBlocks", "token_apart", "token_id"]

_MARKERS_TRIED = 2


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image of a record, divided into tiles if its configuration says so."""

    tokens: NDArray[np.int32]
    """Tokens of the image with the text around it: begin and end, and words of tiles."""
    runs: Sequence[tuple[int, int]]
    """First placeholder of each tile in ``tokens``, and the number of its placeholders."""
    grids: Sequence[tuple[int, int]]
    """Rows and columns of patches of each tile."""
    patches: NDArray[np.uint8]
    """Patches of all tiles, ``[P, V]``, tile by tile."""


class ImageBlocks:
    """Decodes images one by one, and makes their tokens."""

    def __init__(
        self,
        config: ImagesTransform,
        tokenizer: Tokenizer,
        row_length: int | None,
        around: int = 0,
    ) -> None:
        """Resolve special tokens, and try out the words of tiles.

        Args:
            config: The transform in the mix file.
            tokenizer: Tokenizer for the words of tiles.
            row_length: Tokens of a row, which an image must fit; ``None`` if no rows are made.
            around: Tokens of the text around each image, which must fit the row together with it.

        Raises:
            ConfigError: A token is not in the vocabulary, the words of tiles contain the placeholder, or Pillow is not
                installed.
        """
        try:
            decoding = import_module("omniload.source.transforms.image_decoding")
        except ModuleNotFoundError as error:
            raise missing_extra("a source of images", error) from None
        self._decoded: Callable[
            [memoryview, ImagesTransform], tuple[list[NDArray[np.uint8]], tuple[int, int]]
        ] = decoding.decoded
        self.library: str = decoding.LIBRARY
        """Library that decodes images, with its version."""
        self._config, self._tokenizer = config, tokenizer
        self._row_length, self._around = row_length, around
        self._placeholder = token_id(tokenizer, "placeholder", config.placeholder)
        self._begin, self._end = (
            np.array([] if token is None else [token_id(tokenizer, name, token)], np.int32)
            for name, token in (("begin", config.begin), ("end", config.end))
        )
        self.special = np.array([*self._begin, self._placeholder, *self._end])
        """Tokens of an image or around it, which no text may contain."""
        self._words: dict[str, NDArray[np.int32]] = {"": np.empty(0, np.int32)}
        for grid in ((1, 1), (1, 2)):
            self._words_between(grid)

    def of(self, data: memoryview, number: int) -> ImageBlock:
        """Return an image, the ``number``-th of its record.

        Raises:
            BadImageError: The data is no image, or the image does not fit a row.
        """
        config = self._config
        try:
            images, tiled = self._decoded(data, config)
        except BadImageError as error:
            raise BadImageError(f"image {number} {error}") from error
        grids = [(p.shape[0] // config.patch, p.shape[1] // config.patch) for p in images]
        counts = [rows * columns // config.merge**2 for rows, columns in grids]
        words = self._words_between(tiled)
        parts, runs, length = [self._begin], [], len(self._begin)
        for count, before in zip(counts, words[:-1], strict=True):
            runs.append((length + len(before), count))
            parts += [before, np.full(count, self._placeholder, np.int32)]
            length += len(before) + count
        tokens = np.concatenate((*parts, words[-1], self._end))
        whole = len(tokens) + self._around
        if self._row_length is not None and whole > self._row_length:
            cut = f", as {tiled[0]} x {tiled[1]} tiles" if len(images) > 1 else ""
            raise BadImageError(
                f"image {number} makes {whole} tokens{cut}, and a row of pack.length has {self._row_length}; "
                f"lower {config.bound}"
            )
        patches = [patches_of(pixels, config.patch, config.merge) for pixels in images]
        return ImageBlock(tokens, runs, grids, np.concatenate(patches))

    def _words_between(self, tiled: tuple[int, int]) -> list[NDArray[np.int32]]:
        """Return the tokens before each tile of an image, and after the last tile."""
        if self._config.tiles is None:
            return [self._words[""]] * 2
        texts = words_of(tiled, self._config.tiles)
        for text in texts:
            if text not in self._words:
                # Cached, because there are as many texts as tiles, and each image uses some of them.
                self._words[text] = self._ids(text)
        return [self._words[text] for text in texts]

    def _ids(self, text: str) -> NDArray[np.int32]:
        named = self._config.placeholder
        if isinstance(named, str) and token_apart(self._tokenizer, named) is not None:
            # Tokenised between placeholders, as in a sample, because some tokenizers begin a text with a token of their
            # own.
            around = f"{named}{text}{named}"
            ids = self._tokenizer.encode_spans([around], [()])[0].values_V
            inner = ids[1:-1]
        else:
            inner = self._tokenizer.encode_spans([text], [()])[0].values_V
        if (inner == self._placeholder).any():
            raise ConfigError(
                f"transforms of type images: the text of tiles holds {text!r}, and in it the placeholder "
                f"{self._config.placeholder!r}, which stands for what is seen; leave it out there"
            )
        return inner


def token_apart(tokenizer: Tokenizer, marker: str) -> int | None:
    """Return the token of a marker that is a single token in any context; ``None`` if the marker is ordinary text."""
    token = tokenizer.id_of(marker)
    if token is None:
        return None
    found, _ = tokenizer.encode_spans([f"a{marker}{marker}b"], [()])
    return token if np.count_nonzero(found.values_V == token) == _MARKERS_TRIED else None


def token_id(tokenizer: Tokenizer, key: str, token: int | str) -> int:
    """Return the number of a token.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if isinstance(token, str):
        found = tokenizer.id_of(token)
        if found is None:
            raise ConfigError(
                f"transforms of type images: {key} is {token!r}, not in the vocabulary of the tokenizer; name one of "
                "its special tokens, or a number"
            )
        return found
    if token >= tokenizer.vocab_size:
        raise ConfigError(
            f"transforms of type images: {key} is {token}, and the tokenizer has {tokenizer.vocab_size} tokens, "
            "numbered from 0; name one of them"
        )
    return token
