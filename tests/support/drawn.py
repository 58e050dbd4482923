"""Sources and mixes of drawn images, small enough to count their patches."""

import io

import numpy as np
from PIL import Image

from omniload.batch.images import images_of, places_of
from omniload.mix.config import ByteTokenizer, MixConfig, OnError
from omniload.mix.schema.transforms import ImagesTransform
from omniload.mix.sources import ParquetSource
from omniload.source.record_source import open_source
from omniload.source.sample_data.images import build_sample_images
from omniload.source.spec import SourceSpec

__all__ = [
    "END",
    "PLACEHOLDER",
    "a_drawn_mix",
    "an_images_transform",
    "are_all_placed",
    "open_pictures",
    "patches_by_row",
    "png_of",
    "ramp",
    "shown",
]

PLACEHOLDER = 7
"""A byte that no caption contains."""
END = 256
"""End of a document in the tokenizer of bytes."""


def an_images_transform(**changes):
    return ImagesTransform(
        **{"type": "images", "patch": 4, "max_patches": 36, "placeholder": PLACEHOLDER} | changes
    )


def ramp(height, width):
    """Return an image whose every pixel differs from its neighbours."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack((y * 5 % 256, x * 7 % 256, (y + x) * 3 % 256), -1).astype(np.uint8)


def are_all_placed(rows):
    """Return whether the placeholders in some rows are exactly those of the rows' images."""
    flat = rows.tokens_RT.reshape(-1)
    marked = np.zeros(len(flat), np.bool_)
    for first, count in places_of(rows).tolist():
        marked[first : first + count] = True
    return np.array_equal(marked, flat == PLACEHOLDER)


def png_of(pixels, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def a_drawn_mix(folder, *, samples=24, rows=6, length=64, sources=None, tiles=None, **changes):
    """Write captions and pages into ``folder``, and return a mix of both; ``tiles`` is the setting to cut images."""
    build_sample_images(folder, samples, shards=2, most=64)
    transforms = [an_images_transform(tiles=tiles).model_dump()]
    both = {
        "captions": {
            "type": "webdataset",
            "path": "captions-*.tar",
            "text": "json",
            "images": ["png"],
            "unit": 4096,
            "transforms": transforms,
        },
        "pages": {
            "type": "parquet",
            "path": "pages-*.parquet",
            "text": "text",
            "images": "images",
            "transforms": transforms,
        },
    }
    chosen = {name: both[name] for name in sources or both}
    return MixConfig.model_validate(
        {
            "version": 1,
            "seed": 3,
            "tokenizer": {"type": "bytes"},
            "sources": chosen,
            "mix": {"stages": [{"from_step": 0, "weights": dict.fromkeys(chosen, 1.0)}]},
            "pack": {"length": length},
            "batch": {"tokens": rows * length, "micro_tokens": length},
            "runtime": {"prefetch_steps": 2},
        }
        | changes
    )


def patches_by_row(batches):
    """Return the patch that belongs at each place of each row, ``[T, 48]``, computed from the row's tokens."""
    found = {}
    for rows in (m for batch in batches for m in batch.microbatches):
        num_rows, length = rows.tokens_RT.shape
        patches = np.zeros((num_rows * length, 48), np.uint8)
        for (first, count), image in zip(places_of(rows).tolist(), images_of(rows), strict=True):
            patches[first : first + count] = image.values_V.reshape(-1, 48)
        patches = patches.reshape(num_rows, length, 48)
        found |= {tokens.tobytes(): patches[i] for i, tokens in enumerate(rows.tokens_RT)}
    return found


def open_pictures(folder, *transforms, tokenizer=None, policy="raise", row_length=None):
    """Open ``a.parquet`` of a folder as a source of texts with pictures, in the order of the file."""
    config = ParquetSource(
        type="parquet",
        path="a.parquet",
        text="text",
        images="pictures",
        transforms=transforms,
        on_error=OnError(policy=policy),
        shuffle={"method": "none"},
    )
    tokenizer = tokenizer or ByteTokenizer(type="bytes")
    return open_source(
        SourceSpec(
            "web", config, seed=1, tokenizer=tokenizer, base_dir=folder, row_length=row_length
        )
    )


def shown(block, i):
    """Return a sample's tokens as text, ``#`` for a placeholder and ``$`` for the end."""
    marks = {PLACEHOLDER: "#", END: "$"}
    return "".join(marks.get(token) or chr(token) for token in block.tokens[i].tolist())
