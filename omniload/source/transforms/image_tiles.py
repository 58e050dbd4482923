"""The tiles that an image is divided into, and the words between them. Pure.

::

    +---+---+---+     rows 2, columns 3, and a thumbnail behind them:
    | 1 | 2 | 3 |
    +---+---+---+     tile 1  tile 2  tile 3  tile 4  tile 5  tile 6  thumbnail
    | 4 | 5 | 6 |
    +---+---+---+

Shape suffixes:
    H, W  pixels, 3 colours each
"""

import math
import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from omniload.mix.schema.image_tiles import TILE_WORDS, ImageTiles

__all__ = ["grid_of", "tiles_of", "words_of"]


def grid_of(height: int, width: int, tiles: ImageTiles) -> tuple[int, int]:
    """Return the rows and columns of tiles that an image is divided into; 1 and 1 for an undivided image.

    Source:
        ``GotOcr2ImageProcessor`` and ``Idefics3ImageProcessor`` of transformers, with equal results for every size,
        including ties.
    """
    if tiles.max_tiles is not None:
        return _nearest(height, width, tiles)
    height, width = _to_longest_edge(height, width, tiles)
    size, aspect = tiles.size, width / height
    # The longer side comes first. The other side follows from the aspect ratio, and may then fill one more tile.
    if width >= height:
        columns = math.ceil(width / size)
        return math.ceil(int(columns * size / aspect) / size) or 1, columns
    rows = math.ceil(height / size)
    return rows, math.ceil(int(rows * size * aspect) / size) or 1


def _nearest(height: int, width: int, tiles: ImageTiles) -> tuple[int, int]:
    aspect, area = width / height, width * height
    best, least = (1, 1), math.inf
    for rows, columns in _grids(tiles.min_tiles, tiles.max_tiles or 1):
        apart = abs(aspect - columns / rows)
        # Of two equally close grids, the larger wins, unless it has twice the pixels of the image or more.
        if apart < least or (apart == least and area > 0.5 * tiles.size**2 * rows * columns):
            best, least = (rows, columns), apart
    return best


@lru_cache(maxsize=16)
def _grids(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return the grids with an allowed number of tiles, by rising number; among equals, the most rows first."""
    found = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= fewest
    ]
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))


def _to_longest_edge(height: int, width: int, tiles: ImageTiles) -> tuple[int, int]:
    longest, aspect = tiles.longest_edge, width / height
    assert longest is not None, "the model has seen to it"
    # Whole and even, and at least one pixel.
    if width >= height:
        other = int(longest / aspect)
        return max(1, other + other % 2), longest
    other = int(longest * aspect)
    return longest, max(1, other + other % 2)


def tiles_of(pixels_HW3: NDArray[np.uint8], size: int) -> list[NDArray[np.uint8]]:
    """Divide an image that consists of whole tiles into its tiles, in reading order."""
    height, width, colours = pixels_HW3.shape
    cut = pixels_HW3.reshape(height // size, size, width // size, size, colours)
    return list(cut.swapaxes(1, 2).reshape(-1, size, size, colours))


def words_of(grid: tuple[int, int], tiles: ImageTiles) -> list[str]:
    """Return the text before each tile of an image, and the text after the last tile."""
    rows, columns = grid
    if rows * columns == 1:
        return [tiles.before_alone, ""]
    words = [""]
    if tiles.thumbnail == "first":
        words = [tiles.before_thumbnail, ""]
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            words[-1] += _filled(tiles.before_tile, row, column, (row - 1) * columns + column)
            words.append("")
        words[-1] += tiles.after_row
    if tiles.thumbnail == "last":
        words[-1] += tiles.before_thumbnail
        words.append("")
    return words


def _filled(words: str, *values: int) -> str:
    """Return the words before a tile with its row, column and number filled in; other braces stay unchanged."""
    known = dict(zip(TILE_WORDS, map(str, values), strict=True))
    # In one pass, so that filled-in text is not replaced again.
    return re.sub(rf"\{{({'|'.join(TILE_WORDS)})\}}", lambda found: known[found[1]], words)
