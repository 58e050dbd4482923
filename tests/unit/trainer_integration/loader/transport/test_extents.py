"""Free bytes of a worker's region against a model that marks each cache line."""

from hypothesis import given
from hypothesis import strategies as st

from trainer_integration.loader.transport.extents import ALIGNMENT, Extents

LINES = 40


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT)), max_size=40))
def test_blocks_never_overlap_and_the_lowest_place_that_fits_is_taken(steps):
    extents, used, taken = Extents(LINES * ALIGNMENT), [False] * LINES, []
    for take, size in steps:
        if not take and taken:
            start, freed = taken.pop(size % len(taken))
            extents.give(start, freed)
            lines = range(start // ALIGNMENT, (start + freed - 1) // ALIGNMENT + 1)
            for line in lines:
                used[line] = False
            continue
        lines = -(-size // ALIGNMENT)
        fits = [n for n in range(LINES - lines + 1) if not any(used[n : n + lines])]
        start = extents.take(size)
        assert start == (fits[0] * ALIGNMENT if fits else None)
        if start is not None:
            taken.append((start, size))
            used[fits[0] : fits[0] + lines] = [True] * lines

    assert extents.free_bytes == used.count(False) * ALIGNMENT
