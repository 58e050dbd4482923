"""Images and text together: patches, and placeholders for them among the tokens.

::

    text        A cat. <image> It sleeps.        one image of 2 x 2 tokens
    tokens      A  cat .  B  p  p  p  p  E  It sleeps .  EOD        B, E: begin and end, p: placeholder
    loss_mask   1  1   1  0  0  0  0  0  0  1  1      1  1

Shape suffixes:
    N  records        I  images of one record
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.base.ragged import Ragged
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.parsing.image_cells import ENCODED, ENCODED_SIZES
from omniload.source.tokenize import Tokenizer
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.image_patches import BadImageError, patches_of

__all__ = ["ImageEncoder", "token_id"]


@dataclass(frozen=True, slots=True)
class _Image:
    patches: NDArray[np.uint8]
    grid: tuple[int, int]
    block: NDArray[np.int32]
    """Its tokens: begin, placeholders, end."""


class ImageEncoder:
    """Decodes the images of records one by one and tokenises their texts together."""

    def __init__(
        self, config: ImagesTransform, tokenizer: Tokenizer, row_length: int | None = None
    ) -> None:
        """Resolve special tokens.

        Args:
            config: What the mix says.
            tokenizer: Of the text around the images.
            row_length: Tokens of a row, which an image must fit; ``None`` where no rows are made.

        Raises:
            ConfigError: A token is not in the vocabulary, or Pillow is not installed.
        """
        try:
            decoding = import_module("omniload.source.transforms.image_decoding")
        except ModuleNotFoundError as error:
            raise missing_extra("a source of images", error) from None
        self._decoded: Callable[[memoryview, ImagesTransform], NDArray[np.uint8]] = decoding.decoded
        self.library: str = decoding.LIBRARY
        """The library that decodes, and its version."""
        self._config, self._tokenizer, self._row_length = config, tokenizer, row_length
        self._placeholder = token_id(tokenizer, "placeholder", config.placeholder)
        self._before, self._behind = (
            np.array([] if token is None else [token_id(tokenizer, name, token)], np.int32)
            for name, token in (("begin", config.begin), ("end", config.end))
        )

    def encode(self, texts: pa.Array, others: Mapping[str, Ragged]) -> Samples:
        """Return the sample of each record, and what further columns it has beside its images.

        Args:
            texts: The text of each record.
            others: Columns of the records; the encoded images are taken out.
        """
        columns = dict(others)
        data, sizes = columns.pop(ENCODED), columns.pop(ENCODED_SIZES)
        images_N: list[list[_Image]] = []
        segments_N: list[list[str]] = []
        reasons: dict[int, str] = {}
        for i, text in enumerate(texts.to_pylist()):
            try:
                cut = np.split(data[i], np.cumsum(sizes[i])[:-1]) if len(sizes[i]) else []
                segments = self._segments(text, len(cut))
                # Before the segments: where an image fails, neither list has grown.
                images_N.append(self._images(cut))
                segments_N.append(segments)
            except BadImageError as error:
                reasons[i] = str(error)
                images_N.append([])
                segments_N.append([""])
        words = self._words(segments_N)
        marked = self._marked(words, segments_N)
        # Anew without them: words are found by counting segments, and a bad record has one, empty.
        if marked:
            reasons |= marked
            for i in marked:
                images_N[i], segments_N[i] = [], [""]
            words = self._words(segments_N)
        made = self._joined(words, segments_N, images_N)
        bad_N = np.zeros(len(texts), np.bool_)
        bad_N[list(reasons)] = True
        return Samples(
            tokens=made.pop("tokens"),
            others=columns | made,
            bad_N=bad_N if reasons else None,
            reason=reasons[min(reasons)] if reasons else "",
        )

    def _segments(self, text: str, images: int) -> list[str]:
        """Return the text before, between and behind the images."""
        segments = text.split(self._config.marker)
        # A text without a marker has its images in front.
        if len(segments) == 1:
            return [""] * images + segments
        if len(segments) - 1 != images:
            raise BadImageError(
                f"its text holds {self._config.marker!r} {len(segments) - 1} times, and it has {images} images"
            )
        return segments

    def _images(self, encoded: Sequence[NDArray[np.uint8]]) -> list[_Image]:
        """Return the images of a record, which are held together."""
        made: list[_Image] = []
        left = self._config.max_record_patches
        for number, part in enumerate(encoded):
            made.append(self._image(part.data, number))
            # After each, not once all are decoded: a record may name thousands.
            left -= len(made[-1].patches)
            if left < 0:
                raise BadImageError(
                    f"its first {number + 1} of {len(encoded)} images make more than max_record_patches "
                    f"{self._config.max_record_patches} patches; lower max_patches, or raise it"
                )
        return made

    def _image(self, data: memoryview, number: int) -> _Image:
        config = self._config
        try:
            pixels = self._decoded(data, config)
        except BadImageError as error:
            raise BadImageError(f"image {number} {error}") from error
        rows, columns = pixels.shape[0] // config.patch, pixels.shape[1] // config.patch
        placeholders = np.full(rows * columns // config.merge**2, self._placeholder, np.int32)
        block = np.concatenate((self._before, placeholders, self._behind))
        if self._row_length is not None and len(block) > self._row_length:
            raise BadImageError(
                f"image {number} makes {len(block)} tokens, and a row of pack.length has {self._row_length}; "
                "lower max_patches"
            )
        return _Image(patches_of(pixels, config.patch, config.merge), (rows, columns), block)

    def _words(self, segments_N: Sequence[Sequence[str]]) -> Ragged:
        """Return the tokens of every segment, record by record."""
        flat = [segment for segments in segments_N for segment in segments]
        # Not ``encode``, which puts the end of a document behind every segment.
        words, _ = self._tokenizer.encode_spans(flat, [()] * len(flat), special=False)
        return words

    def _marked(self, words: Ragged, segments_N: Sequence[Sequence[str]]) -> dict[int, str]:
        """Return what is wrong with records whose words hold a token that stands for an image, or beside one.

        Such a token would be trained on, and a placeholder has no image. A tokenizer reads the name of a special
        token in a text as that token.
        """
        special = np.array([*self._before, self._placeholder, *self._behind])
        at_V = np.flatnonzero(np.isin(words.values_V, special))
        segments = np.searchsorted(words.offsets, at_V, side="right") - 1
        ends_N = np.cumsum([len(own) for own in segments_N])
        owners = np.searchsorted(ends_N, segments, side="right")
        return {
            i: f"its text holds token {token}, which stands for images (placeholder, begin or end); take it out of "
            "the text, or name tokens that no text makes"
            for i, token in zip(owners.tolist(), words.values_V[at_V].tolist(), strict=True)
        }

    def _joined(
        self,
        words: Ragged,
        segments_N: Sequence[Sequence[str]],
        images_N: Sequence[Sequence[_Image]],
    ) -> dict[str, Ragged]:
        """Return tokens and the columns of images: segments and images in turns, and the end of the document."""
        end = self._tokenizer.end_of_document_id
        tokens, masks, places = [], [], []
        at = 0
        for segments, images in zip(segments_N, images_N, strict=True):
            parts, length, own = [], 0, []
            for k in range(len(segments)):
                parts.append(words[at + k])
                length += len(parts[-1])
                if k < len(images):
                    block = images[k].block
                    own += [
                        length + len(self._before),
                        len(block) - len(self._before) - len(self._behind),
                    ]
                    parts.append(block)
                    length += len(block)
            # What is bad or empty has no end either: it would be a sample of one token.
            if end is not None and length:
                parts.append(np.array([end], np.int32))
            tokens.append(np.concatenate(parts))
            masks.append(self._mask(len(tokens[-1]), own))
            places.append(np.array(own, np.int32))
            at += len(segments)
        none = np.empty(0, np.uint8)
        return {
            "tokens": Ragged.of(tokens),
            LOSS_MASK: Ragged.of(masks, np.bool_),
            IMAGE_PLACES: Ragged.of(places),
            IMAGES: Ragged.of(
                [np.concatenate([none, *(i.patches.reshape(-1) for i in own)]) for own in images_N],
                np.uint8,
            ),
            GRIDS: Ragged.of(
                [np.array([i.grid for i in own], np.int32).reshape(-1) for own in images_N]
            ),
        }

    def _mask(self, length: int, places: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens are trained on: no image, nor what stands around it."""
        mask = np.ones(length, np.bool_)
        for first, count in zip(places[::2], places[1::2], strict=True):
            mask[first - len(self._before) : first + count + len(self._behind)] = False
        return mask


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
