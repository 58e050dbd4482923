"""Tiles cover their image, the grid is the nearest one, and tokens, places and pixels agree in number."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.config import ByteTokenizer
from omniload.mix.schema.image_tiles import ImageTiles
from omniload.mix.sources import ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.transforms.image_tiles import grid_of, tiles_of, words_of
from tests.support.drawn import PLACEHOLDER, an_images_transform, png_of, ramp

SIDE, TOKENS, ROW = 8, 4, 40
WORDS = {"before_tile": "[{row},{column}]", "after_row": ";", "before_alone": "(one)"}
sides = st.integers(1, 5000)
cuts = st.one_of(
    st.tuples(st.integers(1, 12), st.integers(1, 3)).map(
        lambda pair: {"max_tiles": max(pair), "min_tiles": min(pair)}
    ),
    st.integers(1, 96).map(lambda edge: {"longest_edge": edge}),
)
thumbnails = st.sampled_from(["last", "first", "none"])


@given(sides, sides, cuts)
def test_a_grid_has_as_many_tiles_as_allowed_and_none_is_nearer_to_the_aspect(height, width, cut):
    tiles = ImageTiles(size=SIDE, **cut)

    rows, columns = grid_of(height, width, tiles)

    assert 1 <= rows * columns <= tiles.most_images
    if tiles.max_tiles is None:
        # The longer side fills its tiles as far as whole tiles allow.
        longest = -(-(tiles.longest_edge + tiles.longest_edge % 2) // SIDE)
        assert max(rows, columns) in (longest, -(-tiles.longest_edge // SIDE))
        assert (rows <= columns) if width > height else (columns <= rows or width == height)
        return
    assert tiles.min_tiles <= rows * columns <= tiles.max_tiles
    apart = min(
        abs(width / height - c / r)
        for r in range(1, 13)
        for c in range(1, 13)
        if tiles.min_tiles <= r * c <= tiles.max_tiles
    )
    assert abs(width / height - columns / rows) == apart


@given(st.integers(1, 5), st.integers(1, 5), thumbnails)
def test_tiles_cover_their_image_once_and_each_has_its_words(rows, columns, thumbnail):
    pixels = ramp(rows * SIDE, columns * SIDE)

    cut = tiles_of(pixels, SIDE)
    words = words_of(
        (rows, columns), ImageTiles(size=SIDE, max_tiles=25, thumbnail=thumbnail, **WORDS)
    )

    lines = [np.concatenate(cut[r * columns : (r + 1) * columns], axis=1) for r in range(rows)]
    assert np.array_equal(np.concatenate(lines), pixels)
    alone = rows * columns == 1
    assert len(words) == len(cut) + 1 + (thumbnail != "none" and not alone)
    # Wherever the whole image stands, the words are those of tiles in reading order.
    said = "".join(
        "".join(f"[{row},{column}]" for column in range(1, columns + 1)) + ";"
        for row in range(1, rows + 1)
    )
    assert "".join(words) == ("(one)" if alone else said)


texts = st.text(st.sampled_from("abcé \n"), max_size=30)
images = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(
    st.lists(st.lists(st.tuples(texts, images), max_size=3), min_size=1, max_size=3),
    st.sampled_from(
        [{"max_tiles": 3}, {"max_tiles": 2, "min_tiles": 2}, {"longest_edge": 2 * SIDE}]
    ),
    thumbnails,
)
def test_texts_tiles_places_and_pixels_agree_whole_and_cut_to_rows(drawn, cut, thumbnail):
    tiles = ImageTiles(size=SIDE, thumbnail=thumbnail, **cut)
    config = ParquetSource(
        type="parquet",
        path="a.parquet",
        text="text",
        images="images",
        shuffle={"method": "none"},
        transforms=(an_images_transform(tiles=tiles, begin=1, end=2),),
    )
    records = ["".join(f"{text}<image>" for text, _ in own) + "." for own in drawn]
    held = [[png_of(ramp(*size)) for _, size in own] for own in drawn]
    with tempfile.TemporaryDirectory() as made:
        table = pa.table({"text": records, "images": pa.array(held, pa.list_(pa.binary()))})
        pq.write_table(table, Path(made) / "a.parquet")
        whole, parts = (
            open_source(
                SourceSpec(
                    *("see", config),
                    tokenizer=ByteTokenizer(type="bytes"),
                    base_dir=Path(made),
                    row_length=length,
                )
            ).read(0, len(records))
            for length in (None, ROW)
        )

    for i, own in enumerate(drawn):
        cells = [np.prod(grid_of(*size, tiles)) for _, size in own]
        counts = [int(n) + (n > 1 and thumbnail != "none") for n in cells]
        assert whole.others["grids"][i].tolist() == [2, 2] * sum(counts)
        assert len(whole.others["images"][i]) == sum(counts) * TOKENS * 48
        runs = ("\x01" + chr(PLACEHOLDER) * TOKENS * count + "\x02" for count in counts)
        said = "".join(text + run for (text, _), run in zip(own, runs, strict=True)) + "."
        assert bytes(whole.tokens[i][:-1].astype(np.uint8)) == said.encode()
    for name in ("loss_mask", "images", "grids"):
        assert np.array_equal(parts.others[name].values_V, whole.others[name].values_V)
    assert np.array_equal(parts.tokens.values_V, whole.tokens.values_V)
    for i in range(len(parts.tokens)):
        own = parts.tokens[i]
        assert len(own) <= ROW
        # A sample has all tiles of an image, so the start and the end of an image are in the same sample.
        assert np.count_nonzero(own == 1) == np.count_nonzero(own == 2)
        marked = np.zeros(len(own), np.bool_)
        for first, count in parts.others["image_places"][i].reshape(-1, 2).tolist():
            marked[first : first + count] = True
        assert np.array_equal(marked, own == PLACEHOLDER)
