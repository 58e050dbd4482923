"""Samples cut to rows: nothing is lost, no image is cut, and every part fits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.pipeline import cut_to_rows

ROW = 12


@st.composite
def a_sample(draw):
    """Return the lengths of texts, and the tiles of images, alternately, with a text first."""
    tiles = st.lists(st.integers(1, (ROW - 2) // 3), min_size=1, max_size=3)
    pairs = draw(st.lists(st.tuples(st.integers(0, 30), tiles), max_size=6))
    return [*pairs, (draw(st.integers(0, 30)), [])]


def samples_of(layouts):
    tokens, masks, places, grids, images, extents = [], [], [], [], [], []
    for number, layout in enumerate(layouts):
        kinds, own, bounds = [], [], []
        for text, sizes in layout:
            kinds += [0] * text
            if sizes:
                bounds += [len(kinds), len(kinds) + sum(sizes) + 2, len(sizes)]
                kinds += [1]
                for size in sizes:
                    own += [len(kinds), size]
                    kinds += [1] * size
                kinds += [1]
        mask = np.array(kinds, np.bool_)
        masks.append(~mask)
        tokens.append(np.arange(len(kinds), dtype=np.int32) + 1000 * number)
        places.append(np.array(own, np.int32))
        extents.append(np.array(bounds, np.int32))
        grids.append(np.array([v for size in own[1::2] for v in (1, size)], np.int32))
        values = [
            np.full(2 * size, (at * 7 + number) % 251)
            for at, size in zip(own[::2], own[1::2], strict=True)
        ]
        images.append(np.concatenate([np.empty(0), *values]).astype(np.uint8))
    return Samples(
        tokens=Ragged.of(tokens),
        others={
            LOSS_MASK: Ragged.of(masks, np.bool_),
            IMAGE_PLACES: Ragged.of(places),
            GRIDS: Ragged.of(grids),
            IMAGES: Ragged.of(images, np.uint8),
        },
        extents=Ragged.of(extents),
    )


@given(st.lists(a_sample(), min_size=1, max_size=4))
def test_parts_hold_everything_once_and_images_whole(layouts):
    samples = samples_of(layouts)

    parts, owner_N, subs_N = cut_to_rows(samples, ROW)

    assert parts.tokens.lengths_N.max(initial=0) <= ROW
    for column in (LOSS_MASK, GRIDS, IMAGES):
        assert np.array_equal(parts.others[column].values_V, samples.others[column].values_V)
    assert np.array_equal(parts.tokens.values_V, samples.tokens.values_V)
    whole = [iter(layout) for layout in layouts]
    for i, owner in enumerate(owner_N.tolist()):
        covered = np.zeros(len(parts.tokens[i]), np.bool_)
        left = parts.others[IMAGE_PLACES][i].reshape(-1, 2).tolist()
        while left:
            _, sizes = next(each for each in whole[owner] if each[1])
            # All tiles of an image are in one part, end to end, with the tokens around them.
            own, left = left[: len(sizes)], left[len(sizes) :]
            assert [count for _, count in own] == sizes
            covered[own[0][0] - 1 : own[-1][0] + sizes[-1] + 1] = True
        # An image cut in two would leave masked tokens that no place covers.
        assert np.array_equal(covered, ~parts.others[LOSS_MASK][i])
    counts = np.bincount(owner_N, minlength=len(layouts))
    assert subs_N.tolist() == [sub for count in counts.tolist() for sub in range(count)]
