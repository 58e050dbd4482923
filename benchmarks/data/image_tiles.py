"""Cost of decoding a photograph and cutting it into tiles, compared with the processors of transformers.

.venv-frameworks/bin/python -m benchmarks.data.image_tiles --help
"""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median

import click
import numpy as np
from PIL import Image

from benchmarks.report import Table, print_table, write_report
from omniload.mix.schema.image_tiles import ImageTiles
from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.tokenize import ByteEncoder
from omniload.source.transforms.image_blocks import ImageBlocks

__all__ = ["WAYS", "Figures", "Way", "main", "ours_of", "photograph", "table_of"]

_HEIGHT, _WIDTH = 768, 1_024


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to cut an image."""

    name: str
    patch: int = 14
    merge: int = 2
    tiles: ImageTiles | None = None


WAYS = (
    Way(name="not cut"),
    Way(name="InternVL", tiles=ImageTiles(size=448, max_tiles=12)),
    Way(name="SmolVLM", patch=16, merge=4, tiles=ImageTiles(size=512, longest_edge=2048)),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Costs of one way."""

    images: int
    tokens: int
    megabytes: float
    ours_ms: float
    theirs_ms: float | None
    """``None`` if transformers has no such processor."""


def photograph() -> bytes:
    """Return a JPEG of a few colours that blend into each other, with the bytes of a photograph."""
    draw = np.random.default_rng(0)
    colours = Image.fromarray(draw.integers(0, 255, (_HEIGHT // 16, _WIDTH // 16, 3), np.uint8))
    out = io.BytesIO()
    colours.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def ours_of(way: Way, data: bytes, repeats: int) -> tuple[int, int, float, float]:
    """Return images, tokens, megabytes of patches, and median processor milliseconds."""
    config = ImagesTransform(
        type="images", patch=way.patch, merge=way.merge, placeholder=7, tiles=way.tiles
    )
    blocks, held = ImageBlocks(config, ByteEncoder(), None), memoryview(data)
    made = blocks.of(held, 0)
    spent = _spent_ms(lambda: blocks.of(held, 0), repeats)
    return len(made.grids), len(made.tokens), made.patches.nbytes / 1e6, spent


def _theirs_ms(way: Way, data: bytes, repeats: int) -> float | None:
    from transformers import GotOcr2ImageProcessorPil, Idefics3ImageProcessorPil  # noqa: PLC0415

    if (tiles := way.tiles) is None:
        return None
    if tiles.longest_edge is None:
        side = {"height": tiles.size, "width": tiles.size}
        processor = GotOcr2ImageProcessorPil(
            size=side, crop_to_patches=True, max_patches=tiles.max_tiles
        )
    else:
        processor = Idefics3ImageProcessorPil(
            do_image_splitting=True,
            size={"longest_edge": tiles.longest_edge},
            max_image_size={"longest_edge": tiles.size},
        )

    def made() -> object:
        return processor(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np")

    return _spent_ms(made, repeats)


def _spent_ms(call: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return median(found[1:]) * 1e3


def table_of(found: Sequence[tuple[Way, Figures]]) -> Table:
    """Return the figures of all ways."""
    return Table(
        columns=(
            *("", "images", "tokens", "MB of patches", "ms of a core"),
            *("ms of the processor of transformers", "times"),
        ),
        rows=tuple(
            (
                *(way.name, str(each.images), f"{each.tokens:,}", f"{each.megabytes:.1f}"),
                f"{each.ours_ms:.0f}",
                "" if each.theirs_ms is None else f"{each.theirs_ms:.0f}",
                "" if each.theirs_ms is None else f"{each.theirs_ms / each.ours_ms:.1f}",
            )
            for way, each in found
        ),
        caption=f"A JPEG of {_WIDTH:,} x {_HEIGHT} pixels, decoded and cut",
    )


READING = """\
Both decode the same bytes in one process, one after the other, {repeats} times each; figures are median processor
times. Ours gives patches as bytes with the tokens of the image. Theirs (`GotOcr2ImageProcessorPil`,
`Idefics3ImageProcessorPil`) gives normalised floats of the same tiles, which a rank computes from ours on its device.
For InternVL the pixels are the same; SmolVLM's processor resizes twice, with another filter."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--repeats", default=25, show_default=True, help="Number of times that each image is decoded."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repeats: int, report: bool) -> None:
    """Decode and cut a photograph with this tree and with transformers.

    \b
    Example:
      .venv-frameworks/bin/python -m benchmarks.data.image_tiles --repeats 3 --no-report
    """  # noqa: D301 -- click's own marker
    if find_spec("transformers") is None:
        raise click.ClickException(
            "transformers is not installed here; run make setup once, then "
            ".venv-frameworks/bin/python -m benchmarks.data.image_tiles"
        )
    data, found = photograph(), []
    for way in WAYS:
        images, tokens, megabytes, ours_ms = ours_of(way, data, repeats)
        figures = Figures(
            images=images,
            tokens=tokens,
            megabytes=megabytes,
            ours_ms=ours_ms,
            theirs_ms=_theirs_ms(way, data, repeats),
        )
        found.append((way, figures))
    table = table_of(found)
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "image_tiles",
            "A photograph cut into tiles",
            f".venv-frameworks/bin/python -m benchmarks.data.image_tiles --repeats {repeats}",
            [table],
            READING.format(repeats=repeats).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
