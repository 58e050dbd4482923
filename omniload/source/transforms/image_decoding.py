"""Encoded images to pixels of the size that patches want.

What an image says of itself is not trusted: its size is seen to before a pixel is decoded, and its
format is one of a closed list.
"""

import struct
import zlib
from io import BytesIO

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageOps, WebPImagePlugin  # noqa: F401 -- WebP is none of those of preinit

from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.transforms.image_patches import BadImageError, pixel_size
from omniload.source.transforms.image_tiles import grid_of, tiles_of

__all__ = ["LIBRARY", "decoded"]

LIBRARY = f"Pillow {PIL.__version__}"
"""The library that decodes and resizes: another one may give other pixels."""

# Its formats are loaded here: a process that is forked while a reader's thread loads them could never load them.
Image.preinit()
# A closed list: Pillow takes dozens, among them EPS, which it hands to a program (Ghostscript).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
)
"""What Pillow raises of bytes that are no image, or half of one."""
_TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)
"""What it raises of an image of more pixels than its own limit."""


def decoded(
    data: bytes | memoryview, config: ImagesTransform
) -> tuple[list[NDArray[np.uint8]], tuple[int, int]]:
    """Return the pixels of an image, turned upright and resized to whole tokens; or its tiles and thumbnail.

    Each is ``[height, width, 3]``. Beside them the rows and columns of tiles, 1 and 1 of an image that is not cut. Of
    several frames the first one counts. Transparency is left out: what lies under it shows. Of 16 bits of a colour the
    upper 8 count.

    Raises:
        BadImageError: It is none, is cut short, or has more pixels than ``max_pixels``.
    """
    try:
        # Reads the head alone: the size is looked at before a pixel takes memory.
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > config.max_pixels:
                raise BadImageError(
                    f"has {width} x {height} pixels, more than max_pixels {config.max_pixels}"
                )
            # Turned before it is resized: a quarter turn changes height and width.
            upright = _of_eight_bits(ImageOps.exif_transpose(image)).convert("RGB")
    except _TOO_LARGE as error:
        # It is refused before its size is told, and by a limit that is above ours.
        raise BadImageError(
            f"has too many pixels for Pillow itself, more than max_pixels {config.max_pixels}"
        ) from error
    except _FAULTS as error:
        if isinstance(error, BadImageError):
            raise
        said = f"{type(error).__name__}: {error!s:.160}"
        if isinstance(error, PIL.UnidentifiedImageError):  # which shows an object in memory
            said = f"it begins with {bytes(data[:8])!r}, as no {', '.join(_FORMATS)} does"
        raise BadImageError(f"of {len(data)} bytes cannot be decoded: {said}") from error
    tiles = config.tiles
    if tiles is None:
        return [_resized(upright, *pixel_size(upright.height, upright.width, config))], (1, 1)
    rows, columns = grid_of(upright.height, upright.width, tiles)
    cut = tiles_of(_resized(upright, rows * tiles.size, columns * tiles.size), tiles.size)
    if len(cut) > 1 and tiles.thumbnail != "none":
        small = _resized(upright, tiles.size, tiles.size)
        cut.insert(0 if tiles.thumbnail == "first" else len(cut), small)
    return cut, (rows, columns)


def _resized(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    # Bicubic, as most encoders of images are trained with.
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), np.uint8)


def _of_eight_bits(image: Image.Image) -> Image.Image:
    """Return grey of 16 bits as grey of 8; others as they are, for Pillow reads colours of 16 bits so itself."""
    if not image.mode.startswith("I"):
        return image
    # ``convert`` would cut off at 255, which most of its values are above: the image would be white.
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
