"""Images and text together: patches, and placeholders among the tokens.

::

    text        A cat. <image> It sleeps.        one image of 2 x 2 tokens
    tokens      A  cat .  B  p  p  p  p  E  It sleeps .  EOD        B, E: begin and end, p: placeholder
    loss_mask   1  1   1  0  0  0  0  0  0  1  1      1  1

Shape suffixes:
    N  records        I  images of one record
    S  texts of records: one per record, or the two sides of a pair alternately
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.parsing.image_cells import ENCODED, ENCODED_SIZES
from omniload.source.tokenize import Tokenizer
from omniload.source.transforms.chat_template import Rendered
from omniload.source.transforms.conversations import BadConversationError
from omniload.source.transforms.encoders import Samples, pairs_of
from omniload.source.transforms.image_blocks import ImageBlock, ImageBlocks, token_apart
from omniload.source.transforms.image_patches import BadImageError
from omniload.source.transforms.image_places import Laid, Layout, TextLayout

__all__ = ["ImageEncoder"]

_SIDES_OF_PAIR = 2
_EXTENTS = "extents"


@dataclass(slots=True)
class _Batch:
    """Records that are made into samples together; a bad record has an empty text and no image."""

    sides: int
    """Texts per record."""
    rendered_S: list[Rendered] = field(default_factory=list)
    images_S: list[Sequence[ImageBlock]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    """Faults of the bad records, by number."""

    def leave_out(self, found: Mapping[int, str]) -> None:
        """Mark records as bad, given the numbers of their texts with a fault for each."""
        for s, reason in found.items():
            record = s // self.sides
            self.reasons.setdefault(record, reason)
            for other in range(record * self.sides, (record + 1) * self.sides):
                self.rendered_S[other], self.images_S[other] = Rendered("", ()), ()


class ImageEncoder:
    """Decodes the images of records one by one, and tokenises the texts together."""

    def __init__(
        self,
        config: ImagesTransform,
        tokenizer: Tokenizer,
        row_length: int | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Resolve special tokens.

        Args:
            config: The transform in the mix file.
            tokenizer: Tokenizer for the text around the images.
            row_length: Tokens of a row, which an image must fit; ``None`` if no rows are made.
            layout: Finds the places of images; by default, records are texts with markers.

        Raises:
            ConfigError: A token is not in the vocabulary, or occurs in the text of a template, or Pillow is not
                installed.
        """
        self._config, self._tokenizer = config, tokenizer
        self._layout = TextLayout(config.marker) if layout is None else layout
        around, _ = tokenizer.encode_spans(self._layout.around, [(), ()])
        self._around = around[0], around[1]
        self._blocks = ImageBlocks(config, tokenizer, row_length, len(around.values_V))
        self.library = self._blocks.library
        """Library that decodes images, with its version."""
        self._marker_id = (
            token_apart(tokenizer, self._layout.marker) if self._layout.special else None
        )
        written, _ = tokenizer.encode_spans(
            [self._layout.tried.replace(self._layout.marker, "")], [()]
        )
        if len(twice := np.intersect1d(written.values_V, self._blocks.special)):
            raise ConfigError(
                f"transforms of type images: the template itself writes token {twice[0]}, which stands for images "
                "(placeholder, begin or end): set image of the transform before it to the whole text that the "
                "template writes for an image, or leave begin and end out"
            )

    def encode(self, texts: pa.Array, others: Mapping[str, Ragged]) -> Samples:
        """Return the sample of each record, with its further columns.

        Args:
            texts: Text of each record.
            others: Columns of the records; the column of encoded images is removed if there is one.
        """
        columns, layout = dict(others), self._layout
        data, sizes = columns.pop(ENCODED, None), columns.pop(ENCODED_SIZES, None)
        batch = _Batch(layout.sides)
        for i, text in enumerate(texts.to_pylist()):
            cut = [] if data is None or sizes is None else _parts_of(data[i], sizes[i])
            try:
                laid = layout.of(text or "", cut)
                images = self._images(laid)
            except (BadImageError, BadConversationError) as error:
                batch.reasons[i] = str(error)
                laid, images = Laid(sides=(Rendered("", ()),) * layout.sides, images=()), []
            batch.rendered_S += laid.sides
            batch.images_S += [images] * layout.sides
        words, mask = self._words(batch)
        if marked := self._marked(words, batch):
            batch.leave_out(marked)
            words, mask = self._words(batch)
        made = self._joined(words, mask, batch.images_S)
        bad_N = np.zeros(len(texts), np.bool_)
        bad_N[list(batch.reasons)] = True
        reason = batch.reasons[min(batch.reasons)] if batch.reasons else ""
        samples = Samples(
            tokens=made.pop("tokens"),
            extents=made.pop(_EXTENTS),
            others=made,
            bad_N=bad_N if batch.reasons else None,
            reason=reason,
        )
        if layout.sides == _SIDES_OF_PAIR:
            samples = _paired(samples, bad_N)
        return replace(samples, others={**columns, **samples.others})

    def _images(self, laid: Laid) -> list[ImageBlock]:
        """Return the images of a record, for each of its sides, within the limit of images in memory."""
        made: list[ImageBlock] = []
        left = self._config.max_record_patches
        for number, part in enumerate(laid.images):
            made.append(self._blocks.of(part.data, number))
            # Checked after each image, because a record may name thousands.
            left -= len(made[-1].patches) * len(laid.sides)
            if left < 0:
                raise BadImageError(
                    f"its first {number + 1} of {len(laid.images)} images make more than max_record_patches "
                    f"{self._config.max_record_patches} patches; lower {self._config.bound}, or raise it"
                )
        return made

    def _words(self, batch: _Batch) -> tuple[Ragged, Ragged]:
        """Return the tokens before, between and after images, text by text, and the mask of the trained ones."""
        if self._marker_id is not None:
            words, mask = self._words_whole(batch, self._marker_id)
        else:
            words, mask = self._words_apart(batch.rendered_S)
        if not self._layout.masks:
            mask = replace(mask, values_V=np.ones(len(mask.values_V), np.bool_))
        return words, mask

    def _words_apart(self, rendered_S: Sequence[Rendered]) -> tuple[Ragged, Ragged]:
        """Tokenise the text around markers piece by piece, because the marker is not a token of its own."""
        marker, segments, spans = self._layout.marker, [], []
        for each in rendered_S:
            at = 0
            for segment in each.text.split(marker):
                stop = at + len(segment)
                segments.append(segment)
                spans.append(
                    [
                        (max(first, at) - at, min(end, stop) - at)
                        for first, end in each.spans
                        if first < stop and end > at
                    ]
                )
                at = stop + len(marker)
        # Not ``encode``, which adds the end of a document after every segment.
        return self._tokenizer.encode_spans(segments, spans, special=self._layout.special)

    def _words_whole(self, batch: _Batch, marker_id: int) -> tuple[Ragged, Ragged]:
        """Tokenise whole texts, and cut them at the tokens of markers, as a model's own processor does."""
        while True:
            tokens, mask = self._tokenizer.encode_spans(
                [each.text for each in batch.rendered_S], [each.spans for each in batch.rendered_S]
            )
            is_marker_V = tokens.values_V == marker_id
            before = offsets_of(is_marker_V)
            found_S = before[tokens.offsets[1:]] - before[tokens.offsets[:-1]]
            wanted_S = [len(images) for images in batch.images_S]
            wrong_S = np.flatnonzero(found_S != wanted_S).tolist()
            if not wrong_S:
                break
            batch.leave_out(
                {
                    s: f"the tokenizer makes {found_S[s]} tokens {self._layout.marker!r} of its text, and it has "
                    f"{wanted_S[s]} images"
                    for s in wrong_S
                }
            )
        ends = np.sort(np.concatenate((np.flatnonzero(is_marker_V), tokens.offsets[1:])))
        # Markers are removed; the text before each marker, and at the end of each text, is a piece.
        offsets = np.concatenate(([0], ends - before[ends]))
        return (
            Ragged(values_V=tokens.values_V[~is_marker_V], offsets=offsets),
            Ragged(values_V=mask.values_V[~is_marker_V], offsets=offsets),
        )

    def _marked(self, words: Ragged, batch: _Batch) -> dict[int, str]:
        """Return the faults of texts whose words contain a token that belongs to an image.

        Such a token would be trained on, and a placeholder would have no image. A tokenizer reads the name of a special
        token in a text as that token.
        """
        at_V = np.flatnonzero(np.isin(words.values_V, self._blocks.special))
        segments = np.searchsorted(words.offsets, at_V, side="right") - 1
        ends_S = np.cumsum([len(images) + 1 for images in batch.images_S])
        owners = np.searchsorted(ends_S, segments, side="right")
        return {
            s: f"its text holds token {token}, which stands for images (placeholder, begin or end); take it out of "
            "the text, or name tokens that no text makes"
            for s, token in zip(owners.tolist(), words.values_V[at_V].tolist(), strict=True)
        }

    def _joined(
        self, words: Ragged, mask: Ragged, images_S: Sequence[Sequence[ImageBlock]]
    ) -> dict[str, Ragged]:
        """Return tokens and the columns of images: words and images alternately, between the ends of the document."""
        begin, end = (
            [] if token is None or not self._layout.ends else [np.array([token], np.int32)]
            for token in (self._tokenizer.begin_of_document_id, self._tokenizer.end_of_document_id)
        )
        tokens, masks, places = [], [], []
        at = 0
        for images in images_S:
            parts, trained, length, own = [], [], len(begin), []
            for k in range(len(images) + 1):
                parts.append(words[at + k])
                trained.append(mask[at + k])
                length += len(parts[-1])
                if k < len(images):
                    block = images[k].tokens
                    for first, count in images[k].runs:
                        own += [length + first, count]
                    parts.append(block)
                    # Neither an image nor the text around it is trained on.
                    trained.append(np.zeros(len(block), np.bool_))
                    length += len(block)
            # Bad and empty records get no ends either, because these alone would make a sample.
            if length > len(begin):
                parts = [*begin, *parts, *end]
                trained = [np.zeros(len(begin), np.bool_), *trained, np.ones(len(end), np.bool_)]
            tokens.append(np.concatenate(parts))
            masks.append(np.concatenate(trained))
            places.append(np.array(own, np.int32))
            at += len(images) + 1
        none = np.empty(0, np.uint8)
        return {
            "tokens": Ragged.of(tokens),
            LOSS_MASK: Ragged.of(masks, np.bool_),
            IMAGE_PLACES: Ragged.of(places),
            _EXTENTS: self._extents(words, images_S, len(begin)),
            IMAGES: Ragged.of(
                [
                    np.concatenate([none, *(i.patches.reshape(-1) for i in own)])
                    # Once for all sides, because a batch has the images for each side.
                    for own in images_S[:: self._layout.sides]
                ],
                np.uint8,
            ),
            GRIDS: Ragged.of(
                [
                    np.array([grid for i in own for grid in i.grids], np.int32).reshape(-1)
                    for own in images_S
                ]
            ),
        }

    def _extents(
        self, words: Ragged, images_S: Sequence[Sequence[ImageBlock]], begin: int
    ) -> Ragged:
        """Return the begin and end of each image with the text around it, and the number of its tiles."""
        before, behind = self._around
        found, at = [], 0
        for images in images_S:
            bounds, length, taken = [], begin, 0
            for k, image in enumerate(images):
                ahead, next_ = words[at + k], words[at + k + 1]
                length += len(ahead)
                # Only as far as they are tokens of their own, because a line end before them may merge with theirs.
                first = length - _alike(ahead[taken:][::-1], before[::-1])
                length += len(image.tokens)
                taken = _alike(next_, behind)
                bounds += [first, length + taken, len(image.runs)]
            found.append(np.array(bounds, np.int32))
            at += len(images) + 1
        return Ragged.of(found)


def _alike(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the common beginning of two sequences of tokens."""
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if len(differ) else least


def _parts_of(data: NDArray[np.uint8], sizes: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    return np.split(data, np.cumsum(sizes)[:-1]) if len(sizes) else []


def _paired(samples: Samples, bad_N: NDArray[np.bool_]) -> Samples:
    """Make a sample of every two sides, each with the images of its prompt."""
    tokens_S, columns = samples.tokens, dict(samples.others)
    made = pairs_of(tokens_S, columns.pop(LOSS_MASK), bad_N, samples.reason)
    # The places in a rejected side count from the first token of the chosen side.
    moved_S = np.where(np.arange(len(tokens_S)) % 2, np.roll(tokens_S.lengths_N, 1), 0)
    images_N = columns.pop(IMAGES)
    columns[IMAGE_PLACES] = _moved(columns[IMAGE_PLACES], moved_S, (1, 0))
    assert samples.extents is not None, "there are images"
    there_N = made.tokens.lengths_N > 0
    return replace(
        made,
        extents=_of_pairs(_moved(samples.extents, moved_S, (1, 1, 0)), there_N),
        others={
            **made.others,
            **{name: _of_pairs(column, there_N) for name, column in columns.items()},
            IMAGES: _those_there(images_N, there_N),
        },
    )


def _moved(column_S: Ragged, by_S: NDArray[np.int64], places: Sequence[int]) -> Ragged:
    """Return a column of images with token positions moved; ``places`` says which numbers are positions."""
    by_I = np.repeat(by_S, column_S.lengths_N // len(places)).astype(np.int32)
    values = column_S.values_V.reshape(-1, len(places)) + by_I[:, None] * np.array(places, np.int32)
    return replace(column_S, values_V=values.reshape(-1))


def _of_pairs(column_S: Ragged, there_N: NDArray[np.bool_]) -> Ragged:
    """Return a column of sides as a column of pairs, empty for pairs that are left out."""
    return _those_there(replace(column_S, offsets=column_S.offsets[::2]), there_N)


def _those_there(column_N: Ragged, there_N: NDArray[np.bool_]) -> Ragged:
    sizes_N = column_N.lengths_N
    if (sizes_N[~there_N] == 0).all():
        return column_N
    return Ragged(
        values_V=column_N.values_V[np.repeat(there_N, sizes_N)],
        offsets=offsets_of(sizes_N * there_N),
    )
