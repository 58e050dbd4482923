"""A page of whole documents with their images, for ``mix audit --html`` and ``mix preview --html``."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from omniload.batch.images import BatchImage, images_of
from omniload.batch.microbatch import Batch, Microbatch
from omniload.commands.samples import image_transforms, runs_of, text_of
from omniload.mix.config import MixConfig
from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.tokenize import Tokenizer
from omniload.source.transforms.image_blocks import token_id
from omniload.source.transforms.image_patches import pixels_of

__all__ = ["Document", "Drawer", "Part", "page_of", "sample_images"]

_MOST_DOCUMENTS = 2_000
"""Most documents of a page, because a browser must show them and a step may have a hundred times as many."""
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
article {{ border-top: 1px solid #8886; padding: .7rem 0; }}
h2 {{ font-size: 1rem; font-weight: 600; margin: 0 0 .4rem; }}
p {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem; overflow: auto; }}
mark {{ background: #4a84; color: inherit; }}
img {{ max-width: 100%; vertical-align: middle; margin: .2rem; image-rendering: pixelated; }}
</style></head><body>
<h1>{title}</h1>
"""
SampleKey = tuple[int, int, int]
"""Source, position and sub of a sample."""


class _Trained(str):
    """A text that is trained on, in a document whose other texts are only read."""

    __slots__ = ()


Part = str | NDArray[np.uint8]
"""A text, or an image as pixels ``[H, W, 3]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document, or a piece of a document, as shown on the page."""

    heading: str
    parts: Sequence[Part]
    """Texts and images, in their order."""


def sample_images(batches: Sequence[Batch]) -> dict[SampleKey, list[BatchImage]]:
    """Return the images of each sample of a step, in their order, whichever rank encodes them."""
    found: dict[SampleKey, list[BatchImage]] = {}
    for batch in batches:
        for microbatch in batch.microbatches:
            assert isinstance(microbatch, Microbatch), "a rehearsal builds whole rows"
            for image in images_of(microbatch):
                source, position, sub = image.key.tolist()
                found.setdefault((source, position, sub), []).append(image)
    return {key: sorted(images, key=lambda image: image.number) for key, images in found.items()}


class Drawer:
    """Splits the tokens of a sample into texts and images."""

    def __init__(
        self,
        mix: MixConfig,
        tokenizer: Tokenizer | None,
        images: Mapping[SampleKey, Sequence[BatchImage]],
    ) -> None:
        self._transforms = image_transforms(mix)
        self._tokenizer, self._images = tokenizer, images

    def parts(
        self,
        key: SampleKey,
        tokens: NDArray[np.int32],
        trained_T: NDArray[np.bool_] | None = None,
    ) -> list[Part]:
        """Return the texts and images of a piece of a sample, in their order.

        If ``trained_T`` says which tokens are trained on, special tokens are shown too, because readers want to see
        whether the token that ends a turn is learnt.
        """

        def texts(begin: int, end: int) -> Iterator[Part]:
            if trained_T is None:
                yield text_of(tokens[begin:end], self._tokenizer)
                return
            for a, b, is_trained in runs_of(trained_T[begin:end]):
                text = text_of(tokens[begin + a : begin + b], self._tokenizer, special=True)
                yield _Trained(text) if is_trained else text

        transform, images = self._transforms.get(key[0]), self._images.get(key, ())
        if transform is None or self._tokenizer is None or not images:
            return list(texts(0, len(tokens)))
        placeholder = token_id(self._tokenizer, "placeholder", transform.placeholder)
        return list(_in_turn(tokens, placeholder, texts, transform, images))


def _in_turn(
    tokens: NDArray[np.int32],
    placeholder: int,
    texts: Callable[[int, int], Iterator[Part]],
    config: ImagesTransform,
    images: Sequence[BatchImage],
) -> Iterator[Part]:
    at = 0
    for image in images:
        # An image is never cut, so its tokens are the next ones that hold a place, as many as it has.
        first = at + int(np.argmax(tokens[at:] == placeholder))
        yield from texts(at, first)
        patches = image.values_V.reshape(-1, config.values_per_patch)
        yield pixels_of(patches, image.grid, config.patch, config.merge)
        at = first + image.grid[0] * image.grid[1] // config.merge**2
    yield from texts(at, len(tokens))


def page_of(title: str, documents: Sequence[Document], fewer: str) -> str:
    """Return the page as one file that loads nothing else, so that it can be sent; ``fewer`` says how to show fewer."""
    shown = documents[:_MOST_DOCUMENTS]
    lines = [_HEAD.format(title=escape(title))]
    if len(shown) < len(documents):
        lines.append(f"<p>The first {len(shown):,} of {len(documents):,}; {escape(fewer)}.</p>\n")
    for document in shown:
        parts = "".join(map(_part, document.parts))
        lines.append(f"<article><h2>{escape(document.heading)}</h2><p>{parts}</p></article>\n")
    return "".join([*lines, "</body></html>\n"])


def _part(part: Part) -> str:
    if isinstance(part, _Trained):
        return f"<mark>{escape(part)}</mark>"
    if isinstance(part, str):
        return escape(part)
    from PIL import Image  # noqa: PLC0415 -- an extra, which is installed if images were decoded

    height, width, _ = part.shape
    out = io.BytesIO()
    Image.fromarray(part).save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{width} x {height}" width="{width}" height="{height}" src="data:image/png;base64,{data}">'
