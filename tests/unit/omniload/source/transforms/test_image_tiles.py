"""Images that are cut into tiles: each a whole image of the sample, all of one image together, words between them."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.mix.config import BpeTokenizer, ByteTokenizer
from omniload.mix.schema.image_tiles import ImageTiles
from omniload.mix.schema.transforms import ClampTransform, FilterTransform, MapTransform
from omniload.source.transforms import opening
from omniload.source.transforms.image_patches import pixels_of
from omniload.source.transforms.image_tiles import grid_of, tiles_of, words_of
from tests.support.drawn import (
    an_images_transform,
    open_pictures,
    png_of,
    ramp,
    shown,
)

BYTES = ByteTokenizer(type="bytes")
SIDE = 8
WORDS = {"before_tile": "[{row},{column}]", "after_row": ";", "before_thumbnail": "all"}
WIDE, SMALL = png_of(ramp(SIDE, 2 * SIDE)), png_of(ramp(SIDE, SIDE))


def tiled(changes=None, **others):
    return an_images_transform(tiles={"size": SIDE, "max_tiles": 4} | (changes or {}), **others)


def a_source(folder, texts, images, *transforms, tokenizer=BYTES, policy="raise", row_length=None):
    cells = pa.array(images, pa.list_(pa.binary()))
    pq.write_table(pa.table({"text": texts, "pictures": cells}), folder / "a.parquet")
    return open_pictures(
        folder, *transforms, tokenizer=tokenizer, policy=policy, row_length=row_length
    )


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((448, 448), (1, 1)),
        ((448, 896), (1, 2)),
        ((896, 448), (2, 1)),
        # As near as 1 x 1 and 2 x 2: the image has the pixels for more.
        ((1344, 1344), (3, 3)),
        ((800, 1200), (2, 3)),
        ((10, 9000), (1, 12)),
        ((9000, 10), (12, 1)),
        ((1, 1), (1, 1)),
    ],
)
def test_an_image_is_cut_into_the_grid_whose_aspect_is_nearest(size, grid):
    assert grid_of(*size, ImageTiles(size=448, max_tiles=12)) == grid


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1, 1), (4, 4)), ((600, 800), (3, 4)), ((800, 600), (4, 3)), ((10, 9000), (1, 4))],
)
def test_an_image_is_resized_to_its_longest_edge_and_whole_tiles(size, grid):
    assert grid_of(*size, ImageTiles(size=512, longest_edge=2048)) == grid


def test_words_stand_before_tiles_behind_rows_and_before_the_whole():
    tiles = ImageTiles(size=8, max_tiles=4, before_alone="one", **WORDS)

    assert words_of((1, 1), tiles) == ["one", ""]
    assert words_of((2, 2), tiles) == ["[1,1]", "[1,2]", ";[2,1]", "[2,2]", ";all", ""]
    first = tiles.model_copy(update={"thumbnail": "first"})
    assert words_of((2, 1), first) == ["all", "[1,1]", ";[2,1]", ";"]
    plain = ImageTiles(size=8, max_tiles=4, thumbnail="none", before_tile="{number}{}{{row}}")
    assert words_of((1, 3), plain) == ["1{}{1}", "2{}{1}", "3{}{1}", ""]


def test_tiles_are_images_of_the_sample_in_reading_order_and_the_whole_behind_them(tmp_path):
    pixels = ramp(2 * SIDE, 2 * SIDE)
    source = a_source(tmp_path, ["a<image>b"], [[png_of(pixels)]], tiled(WORDS, begin=1, end=2))

    block = source.read(0, 1)

    assert shown(block, 0) == "a\x01[1,1]####[1,2]####;[2,1]####[2,2]####;all####\x02b$"
    assert block.others[GRIDS][0].tolist() == [2, 2] * 5
    runs = block.others[IMAGE_PLACES][0].reshape(-1, 2).tolist()
    assert [shown(block, 0)[first : first + count] for first, count in runs] == ["####"] * 5
    assert bytes(block.tokens[0][block.others[LOSS_MASK][0]][:-1].astype(np.uint8)) == b"ab"
    patches = block.others[IMAGES][0].reshape(5, 4, -1)
    held = [pixels_of(each, (2, 2), 4, 1) for each in patches]
    for tile, (row, column) in zip(held, ((0, 0), (0, 8), (8, 0), (8, 8)), strict=False):
        assert np.array_equal(tile, pixels[row : row + SIDE, column : column + SIDE])
    assert np.array_equal(np.stack(held[:4]), tiles_of(pixels, SIDE))


def test_an_image_of_one_tile_is_not_cut_and_has_words_of_its_own(tmp_path):
    words = {**WORDS, "before_alone": "one"}

    block = a_source(tmp_path, ["x"], [[SMALL]], tiled(words)).read(0, 1)

    assert shown(block, 0) == "one####x$"


@pytest.mark.parametrize(
    ("where", "said"),
    [("first", "all####[1,1]####[1,2]####;x$"), ("none", "[1,1]####[1,2]####;x$")],
)
def test_the_whole_may_stand_first_or_not_at_all(tmp_path, where, said):
    words = {key: text for key, text in WORDS.items() if where == "first" or "thumb" not in key}

    block = a_source(tmp_path, ["x"], [[WIDE]], tiled({**words, "thumbnail": where})).read(0, 1)

    assert shown(block, 0) == said


def test_the_tiles_of_an_image_are_in_one_row_and_it_is_cut_before_them(tmp_path):
    source = a_source(tmp_path, ["abcde<image>fg<image>h"], [[WIDE, SMALL]], tiled(), row_length=16)

    block = source.read(0, 1)

    assert [shown(block, i) for i in range(3)] == ["abcde", "############fg", "####h$"]
    assert [len(block.others[GRIDS][i]) // 2 for i in range(3)] == [0, 3, 1]
    assert block.others[IMAGE_PLACES][1].tolist() == [0, 4, 4, 4, 8, 4]


def test_a_clamp_leaves_out_all_tiles_of_an_image_and_what_is_behind_it_goes_on(tmp_path):
    rows = ["abc<image>d<image>", "q<image>"]
    clamp, long = (
        ClampTransform(type="clamp", tokens=12),
        FilterTransform(type="filter", min_tokens=5),
    )
    source = a_source(
        tmp_path, rows, [[SMALL, WIDE], [SMALL]], tiled(), clamp, clamp, long, row_length=64
    )

    block = source.read(0, 2)

    assert [shown(block, i) for i in range(2)] == ["abc####d", "q####$"]
    assert block.others[GRIDS].values_V.tolist() == [2, 2, 2, 2]
    assert len(block.others[IMAGES].values_V) == 2 * 4 * 48


@pytest.mark.parametrize(
    ("changes", "row_length", "fault"),
    [
        (
            {},
            11,
            r"image 0 .* 12 tokens, as 1 x 2 tiles, and a row of pack\.length has 11; lower max_tiles",
        ),
        (
            {"max_record_patches": 21},
            None,
            "its first 2 of 2 images make more than max_record_patches 21 patches",
        ),
    ],
)
def test_an_image_that_does_not_fit_is_a_bad_record_of_all_its_tiles(
    tmp_path, changes, row_length, fault
):
    both = ["x", "y"], [[WIDE, WIDE], [SMALL]]
    transform = tiled(**changes)

    with pytest.raises(IntegrityError, match=f"record 0, counted from 0: {fault}"):
        a_source(tmp_path, *both, transform, row_length=row_length).read(0, 2)
    block = a_source(tmp_path, *both, transform, policy="skip", row_length=row_length).read(0, 2)

    assert block.skipped == 1
    assert shown(block, 0) == "####y$"


def test_words_that_hold_the_placeholder_are_refused_as_the_source_is_opened(tmp_path):
    with pytest.raises(
        ConfigError, match=r"the text of tiles holds 'a\\x07', and in it the placeholder"
    ):
        a_source(tmp_path, ["x"], [[]], tiled({"before_tile": "a\x07"}))


def test_special_tokens_in_words_are_meant_and_those_in_a_text_are_not_trained_on(tmp_path):
    vocabulary = {"a": 0, "[UNK]": 1, "r": 2}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<pad>", "<row_1_col_1>", "<row_1_col_2>", "<all>"])
    library.save(str(tmp_path / "tokenizer.json"))
    words = {"before_tile": "<row_{row}_col_{column}>", "before_thumbnail": "r<all>"}
    bpe = BpeTokenizer(type="bpe", path="tokenizer.json")

    block = a_source(
        tmp_path, ["a"], [[WIDE]], tiled(words, placeholder="<pad>"), tokenizer=bpe
    ).read(0, 1)

    assert block.tokens[0].tolist() == [4, 3, 3, 3, 3, 5, 3, 3, 3, 3, 2, 6, 3, 3, 3, 3, 0]
    assert np.flatnonzero(block.others[LOSS_MASK][0]).tolist() == [16]


def test_records_that_a_function_of_text_left_out_keep_their_tiles_apart(tmp_path, monkeypatch):
    class Shortens:
        """Leaves every record out that begins with an x."""

        identity = "shortens"

        def __init__(self, *_):
            pass

        def of_texts(self, texts):
            kept = [i for i, text in enumerate(texts.to_pylist()) if text[0] != "x"]
            return texts.take(pa.array(kept)), np.array(kept)

    monkeypatch.setattr(opening, "MapFunction", Shortens)
    function = MapTransform(type="map", function="shortens", drops=True)
    rows = ["x", "abcde<image>", "x", "<image>b"], [[SMALL], [WIDE], [WIDE], [SMALL]]

    block = a_source(tmp_path, *rows, function, tiled(), row_length=16).read(0, 4)

    assert [shown(block, i) for i in range(len(block.tokens))] == [
        "abcde",
        "############$",
        "####b$",
    ]
