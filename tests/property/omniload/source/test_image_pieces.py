"""Samples cut to rows: nothing is lost, no image is cut, every part fits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.pipeline import cut_to_rows
from tests.support.drawn import an_images_transform

ROW = 12
AROUND = an_images_transform(begin=1, end=2)


@st.composite
def a_sample(draw):
    """Return the lengths of texts and images in turns: a text first."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, ROW - 2)), max_size=6))
    return [*pairs, (draw(st.integers(0, 30)), 0)]


def samples_of(layouts):
    tokens, masks, places, grids, images = [], [], [], [], []
    for number, layout in enumerate(layouts):
        kinds, own = [], []
        for text, size in layout:
            kinds += [0] * text
            if size:
                own += [len(kinds) + 1, size]
                kinds += [1] * (size + 2)
        mask = np.array(kinds, np.bool_)
        masks.append(~mask)
        tokens.append(np.arange(len(kinds), dtype=np.int32) + 1000 * number)
        places.append(np.array(own, np.int32))
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
    )


@given(st.lists(a_sample(), min_size=1, max_size=4))
def test_parts_hold_everything_once_and_images_whole(layouts):
    samples = samples_of(layouts)

    parts, owner_N, subs_N = cut_to_rows(samples, ROW, AROUND)

    assert parts.tokens.lengths_N.max(initial=0) <= ROW
    for column in (LOSS_MASK, GRIDS, IMAGES):
        assert np.array_equal(parts.others[column].values_V, samples.others[column].values_V)
    assert np.array_equal(parts.tokens.values_V, samples.tokens.values_V)
    for i in range(len(parts.tokens)):
        covered = np.zeros(len(parts.tokens[i]), np.bool_)
        for first, count in parts.others[IMAGE_PLACES][i].reshape(-1, 2).tolist():
            covered[first - 1 : first + count + 1] = True
        # An image cut in two would leave masked tokens that no place covers.
        assert np.array_equal(covered, ~parts.others[LOSS_MASK][i])
    counts = np.bincount(owner_N, minlength=len(layouts))
    assert subs_N.tolist() == [sub for count in counts.tolist() for sub in range(count)]
