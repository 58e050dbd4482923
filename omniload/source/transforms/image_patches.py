"""From pixels to patches: the size that an image is resized to, and the order of its patches. Pure.

Shape suffixes:
    H, W  pixels, 3 colours each        P  patches        V  values of a patch
"""

import math

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.mix.schema.transforms import ImagesTransform

__all__ = ["BadImageError", "patches_of", "pixel_size", "pixels_of"]


class BadImageError(IntegrityError):
    """An image that cannot be divided into patches; the message is a predicate of the image."""


def pixel_size(height: int, width: int, config: ImagesTransform) -> tuple[int, int]:
    """Return the height and width that an image is resized to.

    Both are whole tokens, at least one; together they have at most ``max_patches`` patches. The aspect ratio is kept as
    far as whole tokens allow.
    """
    unit = config.patch * config.merge
    most = config.max_patches // config.merge**2
    rows, columns = max(1, round(height / unit)), max(1, round(width / unit))
    if rows * columns > most:
        # Both sides are rounded down, so that their product stays within the limit; a very long image is one token
        # high.
        scale = math.sqrt(most * unit * unit / (height * width))
        rows = min(max(1, math.floor(height * scale / unit)), most)
        columns = min(max(1, math.floor(width * scale / unit)), most // rows)
    return rows * unit, columns * unit


def patches_of(pixels_HW3: NDArray[np.uint8], patch: int, merge: int) -> NDArray[np.uint8]:
    """Divide an image into patches, ``[P, V]``; the ``merge * merge`` patches of a token are next to each other.

    Tokens come row by row, and so do the patches of each token. The values of a patch are its pixels row by row, three
    colours each. With ``merge`` 2, an image of 4 x 4 patches comes in this order::

        0  1 | 4  5
        2  3 | 6  7
        -----+-----
        8  9 |12 13
        10 11|14 15
    """
    height, width, colours = pixels_HW3.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = pixels_HW3.reshape(rows, merge, patch, columns, merge, patch, colours)
    # Tokens come before their content: rows and columns of tokens, then patches of each token, then pixels.
    return cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, patch * patch * colours)


def pixels_of(
    patches_PV: NDArray[np.uint8], grid: tuple[int, int], patch: int, merge: int
) -> NDArray[np.uint8]:
    """Return the image, ``[H, W, 3]``, that ``patches_of`` divided into patches.

    Args:
        patches_PV: Patches of the image.
        grid: Rows and columns of the patches.
        patch: Side of a patch in pixels.
        merge: Side of a token in patches.
    """
    rows, columns = grid[0] // merge, grid[1] // merge
    cut = patches_PV.reshape(rows, columns, merge, merge, patch, patch, -1)
    return cut.transpose(0, 2, 4, 1, 3, 5, 6).reshape(grid[0] * patch, grid[1] * patch, -1)
