"""Decodes encoded images to pixels, in the size that patches need.

The header of an image is not trusted. Its size is checked before a pixel is decoded, and its format must be on a closed
list.
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
"""Library that decodes and resizes images; another version may give other pixels."""

# Formats are loaded here, because a process forked while a reader's thread loads them could never load them.
Image.preinit()
# A closed list, because Pillow supports dozens, among them EPS, which it passes to a program (Ghostscript).
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
"""Errors of Pillow for bytes that are no image, or a truncated one."""
_TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)
"""Errors of Pillow for an image of more pixels than Pillow's own limit."""


def decoded(
    data: bytes | memoryview, config: ImagesTransform
) -> tuple[list[NDArray[np.uint8]], tuple[int, int]]:
    """Return the pixels of an image, turned upright and resized to whole tokens, or its tiles and thumbnail.

    Each array is ``[height, width, 3]``. The second result is the rows and columns of tiles, 1 and 1 for an undivided
    image. Only the first frame counts. Transparency is dropped, so the colours under it show. Colours of 16 bits keep
    their upper 8 bits.

    Raises:
        BadImageError: The data is no image, is truncated, or has more pixels than ``max_pixels``.
    """
    try:
        # Only the header is read, so that the size is checked before pixels take memory.
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > config.max_pixels:
                raise BadImageError(
                    f"has {width} x {height} pixels, more than max_pixels {config.max_pixels}"
                )
            # Turned before resizing, because a quarter turn swaps height and width.
            upright = _of_eight_bits(ImageOps.exif_transpose(image))
            # ``convert`` drops it in any case, and would warn of that in the log of every loader.
            upright.info.pop("transparency", None)
            upright = upright.convert("RGB")
    except _TOO_LARGE as error:
        # Pillow refuses the image before its size is known, and by a limit above ours.
        raise BadImageError(
            f"has too many pixels for Pillow itself, more than max_pixels {config.max_pixels}"
        ) from error
    except _FAULTS as error:
        if isinstance(error, BadImageError):
            raise
        said = f"{type(error).__name__}: {error!s:.160}"
        if isinstance(error, PIL.UnidentifiedImageError):  # whose message shows an object in memory
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
    # Bicubic, because most image encoders are trained with it.
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), np.uint8)


def _of_eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey as 8-bit grey, and other images unchanged, because Pillow converts 16-bit colours itself."""
    if not image.mode.startswith("I"):
        return image
    # ``convert`` would clip at 255, below most values, so the image would be white.
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
