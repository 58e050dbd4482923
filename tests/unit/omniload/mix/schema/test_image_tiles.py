"""Tiles in a mix file; without them a run's fingerprint is unchanged."""

import pytest
from pydantic import ValidationError

from omniload.mix.schema.image_tiles import ImageTiles
from tests.support.drawn import an_images_transform


@pytest.mark.parametrize(
    ("tiles", "fault"),
    [
        ({}, "tiles has neither of max_tiles and longest_edge"),
        ({"max_tiles": 2, "longest_edge": 16}, "tiles has both of max_tiles and longest_edge"),
        ({"max_tiles": 2, "min_tiles": 3}, "min_tiles is 3, with max_tiles 2; lower it"),
        ({"longest_edge": 16, "min_tiles": 2}, "min_tiles is 2, with longest_edge; lower it"),
        (
            {"max_tiles": 2, "thumbnail": "none", "before_thumbnail": "all"},
            "before_thumbnail is 'all', and thumbnail is none",
        ),
        (
            {"max_tiles": 2, "before_tile": "{row}{col}"},
            r"before_tile holds \{col\}; what a tile has is \{row\}, \{column\}, \{number\}",
        ),
        ({"max_tiles": 2, "size": 6}, r"size is 6, not whole tokens of patch \* merge = 4 pixels"),
        (
            {"max_tiles": 2, "size": 28},
            "a tile of 28 pixels has 49 patches, more than max_patches 36",
        ),
        ({"max_tiles": 0}, "greater than or equal to 1"),
        ({"max_tiles": 2, "tile": "x"}, "Extra inputs are not permitted"),
    ],
)
def test_what_says_no_way_to_cut_an_image_is_refused_with_what_to_change(tiles, fault):
    with pytest.raises(ValidationError, match=fault):
        an_images_transform(tiles={"size": 8, **tiles})


@pytest.mark.parametrize(
    ("tiles", "most"),
    [
        ({"max_tiles": 12}, 13),
        ({"max_tiles": 1}, 1),
        ({"max_tiles": 12, "thumbnail": "none"}, 12),
        ({"longest_edge": 32}, 17),
        # A side is made even, and fills one more tile then.
        ({"longest_edge": 31}, 17),
        ({"longest_edge": 33}, 26),
        ({"longest_edge": 8}, 1),
    ],
)
def test_the_most_images_of_one_are_its_tiles_and_the_whole(tiles, most):
    assert ImageTiles(size=8, **tiles).most_images == most


def test_tiles_that_no_record_could_hold_are_refused():
    tiles = {"size": 8, "max_tiles": 4}
    assert an_images_transform(tiles=tiles, max_record_patches=20).tiles.most_images == 5

    with pytest.raises(ValidationError, match=r"an image of 5 tiles, .* has 20 patches, more than"):
        an_images_transform(tiles=tiles, max_record_patches=19)


def test_a_transform_without_tiles_is_written_as_before_there_were_any():
    assert "tiles" not in an_images_transform().model_dump()
    made = an_images_transform(tiles={"size": 8, "max_tiles": 4})
    assert type(made).model_validate(made.model_dump()) == made
