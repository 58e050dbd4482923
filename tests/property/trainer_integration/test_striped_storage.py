"""Any sharding saved on any ranks loads into any other; boxes and units agree with the plain model."""

import itertools
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusefs.config import Striping
from tests.support.examples import few
from tests.support.fusefs.builders import some_files
from tests.support.trainer.striped_checkpoints import cut, load_boxes, save_boxes
from trainer_integration.checkpoint.striped.index import Box
from trainer_integration.checkpoint.striped.tensors import bytes_of, units_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]


@st.composite
def boxes(draw):
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - at)) for size, at in zip(sizes, offsets, strict=True)]
    return Box(tuple(sizes), tuple(offsets), tuple(lengths))


def model(box):
    """Return the numbers of the box's elements within its chunk, in order."""
    chunk = np.arange(math.prod(box.sizes_D)).reshape(box.sizes_D)
    slices = tuple(slice(a, a + n) for a, n in zip(box.offsets_D, box.lengths_D, strict=True))
    return chunk[slices]


@given(boxes())
def test_runs_are_the_elements_of_the_box_in_order(box):
    found = [start + i for start in box.runs() for i in range(box.run_elements)]

    assert found == model(box).ravel().tolist()


@given(boxes(), st.integers(1, 8), st.integers(0, 100))
def test_slabs_hold_every_element_once_within_their_bytes(box, itemsize, most):
    found = np.full(box.lengths_D, -1)
    for slab in box.slabs(itemsize, most_bytes=most):
        assert slab.num_rows == 1 or slab.size_bytes <= most
        assert slab.offset_bytes % itemsize == slab.size_bytes % itemsize == 0
        first = slab.offset_bytes // itemsize
        memory = np.arange(first, first + slab.size_bytes // itemsize)
        lengths = list(box.lengths_D)
        rows = found
        if lengths:
            lengths[slab.dimension] = slab.num_rows
            rows = np.moveaxis(found, slab.dimension, 0)[
                slab.first_row : slab.first_row + slab.num_rows
            ]
            rows = np.moveaxis(rows, 0, slab.dimension)
        strides = [step * memory.itemsize for step in box.strides_D]
        assert (rows == -1).all()
        rows[...] = np.lib.stride_tricks.as_strided(memory, lengths, strides)

    assert np.array_equal(found, model(box))


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 16))
def test_units_are_the_parts_side_by_side(parts, unit_bytes):
    units = [bytes(unit) for unit in units_of(parts, unit_bytes)]

    assert b"".join(units) == b"".join(parts)
    assert all(len(unit) == unit_bytes for unit in units[:-1])
    assert all(0 < len(unit) <= unit_bytes for unit in units[-1:])


@st.composite
def shardings(draw, sizes, ranks):
    """Cut a tensor by a grid and deal the boxes to ranks."""
    edges = []
    for size in sizes:
        inner = draw(st.lists(st.integers(0, size), max_size=2))
        edges.append(sorted({0, size, *inner}))
    cells = [()]
    for edge in edges:
        spans = list(itertools.pairwise(edge)) or [(0, 0)]
        cells = [(*cell, span) for cell in cells for span in spans]
    placed = [{} for _ in range(ranks)]
    for cell in cells:
        at = tuple(begin for begin, _ in cell)
        placed[draw(st.integers(0, ranks - 1))][at] = tuple(end - begin for begin, end in cell)
    return placed


@st.composite
def moves(draw):
    """A few tensors, and their shardings when saved and when loaded."""
    tensors, saved, loaded = {}, [], []
    saved = [{} for _ in range(draw(st.integers(1, 3)))]
    loaded = [{} for _ in range(draw(st.integers(1, 3)))]
    for i in range(draw(st.integers(1, 3))):
        # The rows are long enough that some boxes are read straight into place, and some are not.
        sizes = draw(
            st.sampled_from([(), (0, 3), (7,), (5000,), (9, 1100), (3, 40, 90), (2, 9000)])
        )
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.arange(math.prod(sizes)).reshape(sizes) % 251
        tensors[f"t{i}"] = values.to(dtype)
        for ranks in (saved, loaded):
            for held, mine in zip(draw(shardings(sizes, len(ranks))), ranks, strict=True):
                mine.update({(f"t{i}", at): lengths for at, lengths in held.items()})
    return tensors, saved, loaded


@few(60, soak=2000)
@given(moves(), st.integers(1, 4), st.booleans())
def test_what_any_ranks_saved_any_ranks_load(move, stripes, other_layout):
    tensors, saved, loaded = move
    striping = Striping(unit=4096, count=stripes)
    with some_files(striping=striping, longest_read=8192) as files:
        ranks = [
            {(n, at): cut(tensors[n], at, size) for (n, at), size in of.items()} for of in saved
        ]
        save_boxes(files, "c", ranks, {name: t.size() for name, t in tensors.items()})

        targets = []
        for of in loaded:
            empty = {
                key: torch.zeros(size, dtype=tensors[key[0]].dtype) for key, size in of.items()
            }
            if other_layout:
                empty = {
                    key: t.t().contiguous().t() if t.ndim == 2 else t for key, t in empty.items()
                }
            targets.append(empty)
        load_boxes(files, "c", targets)

        for (name, at), tensor in (item for of in targets for item in of.items()):
            assert torch.equal(tensor, cut(tensors[name], at, tensor.size()))


@given(st.sampled_from(DTYPES), st.sampled_from([(), (0,), (3,), (2, 5)]))
def test_the_bytes_of_a_tensor_are_its_own_memory(dtype, sizes):
    tensor = torch.zeros(sizes, dtype=dtype)

    view = bytes_of(tensor)
    view[:] = bytes([1]) * len(view)

    assert len(view) == tensor.nbytes
    assert bytes(bytes_of(tensor)) == bytes([1]) * tensor.nbytes
