"""A small corpus of drawn images with captions, the same on every machine, for documentation, examples and tests.

Sizes are heavy-tailed, like those of images from the web: most are small, and a few have a hundred times the pixels.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from omniload.base.extras import missing_extra

try:
    from PIL import Image, ImageDraw
except ModuleNotFoundError as error:
    raise missing_extra("drawing images", error) from error

__all__ = ["build_sample_images"]

_COLOURS = {
    "red": (214, 40, 40),
    "green": (56, 142, 60),
    "blue": (30, 80, 200),
    "yellow": (245, 200, 30),
    "violet": (120, 60, 160),
}
_SHAPES = ("circle", "square", "triangle")
_LEAST, _MOST = 24, 640
_TAIL = 1.2
"""Exponent of the Pareto tail of sides."""


@dataclass(frozen=True, slots=True)
class _DrawnSample:
    """A caption, or a text with ``<image>`` at the places of its images, and the images as PNG."""

    text: str
    images: tuple[bytes, ...]


def build_sample_images(
    folder: str | Path, samples: int = 96, *, shards: int = 4, most: int = _MOST
) -> Path:
    """Write captions as WebDataset archives and texts with several images as Parquet.

    Args:
        folder: Where; made if it is missing.
        samples: Samples of each kind.
        shards: Files of each kind.
        most: Longest side in pixels.

    Returns:
        The folder, with ``captions-*.tar`` (members ``png`` and ``json``) and ``pages-*.parquet`` (columns ``text``
        and ``images``).
    """
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    captions = list(_drawn_samples(samples, seed=0, most=most))
    pages = list(_drawn_samples(samples, seed=1, most=most, images=3))
    for shard in range(shards):
        with tarfile.open(out / f"captions-{shard}.tar", "w") as tar:
            for i, sample in list(enumerate(captions))[shard::shards]:
                _add(tar, f"{i:06}.png", sample.images[0])
                _add(tar, f"{i:06}.json", json.dumps({"text": sample.text}).encode())
        mine = pages[shard::shards]
        table = pa.table(
            {
                "text": [sample.text for sample in mine],
                "images": pa.array([list(sample.images) for sample in mine], pa.list_(pa.binary())),
            }
        )
        pq.write_table(table, out / f"pages-{shard}.parquet", row_group_size=16)
    return out


def _drawn_samples(
    count: int, *, seed: int = 0, most: int = _MOST, images: int = 1
) -> Iterator[_DrawnSample]:
    """Yield samples with up to ``images`` images each: with 1, a caption without a marker; with more, a text."""
    for i in range(count):
        # Seeded by a text, whose hash is the same in every process. Each sample depends on its own number, so that a
        # larger corpus begins with the samples of a smaller one.
        random = Random(f"{seed}/{i}")  # noqa: S311 -- drawings, no secrets
        drawn = [_drawn(random, most) for _ in range(random.randint(1, images))]
        words = [caption for _, caption in drawn]
        text = words[0] if images == 1 else "".join(f"<image>{word} " for word in words)
        yield _DrawnSample(text, tuple(png for png, _ in drawn))


def _drawn(random: Random, most: int) -> tuple[bytes, str]:
    # Each side is drawn separately, so that shapes differ, too.
    width, height = (min(most, int(_LEAST * random.paretovariate(_TAIL))) for _ in range(2))
    image = Image.new("RGB", (width, height), (250, 248, 240))
    draw = ImageDraw.Draw(image)
    names = []
    for _ in range(random.randint(1, 3)):
        colour, shape = random.choice(sorted(_COLOURS)), random.choice(_SHAPES)
        side = max(6, min(width, height) // random.randint(2, 4))
        x, y = random.randint(0, width - side), random.randint(0, height - side)
        box = (x, y, x + side, y + side)
        if shape == "circle":
            draw.ellipse(box, fill=_COLOURS[colour])
        elif shape == "square":
            draw.rectangle(box, fill=_COLOURS[colour])
        else:
            draw.polygon(
                [(x, y + side), (x + side, y + side), (x + side // 2, y)], _COLOURS[colour]
            )
        names.append(f"a {colour} {shape}")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue(), f"{' and '.join(names)}."


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
