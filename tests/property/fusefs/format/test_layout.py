"""The layout compared with a model too simple to be wrong: deal the bytes out one at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.format.layout import StripeLayout

layouts = st.builds(StripeLayout, st.integers(4, 9), st.integers(1, 5))


def dealt(layout, data):
    objects = [bytearray() for _ in range(layout.stripe_count)]
    for i, byte in enumerate(data):
        objects[i // layout.unit_bytes % layout.stripe_count].append(byte)
    return objects


@given(layouts, st.integers(0, 300))
def test_object_sizes_are_those_of_the_dealt_bytes(layout, size):
    objects = dealt(layout, bytes(size))

    assert [layout.object_size(i, size) for i in range(layout.stripe_count)] == [
        len(o) for o in objects
    ]
    assert layout.num_objects(size) == sum(bool(o) for o in objects)


@given(layouts, st.integers(1, 300), st.integers(1, 60), st.data())
def test_runs_hold_every_unit_once_and_lie_side_by_side_in_their_object(
    layout, size, longest, draw
):
    data = bytes(i % 251 for i in range(size))
    objects = dealt(layout, data)
    every = range(layout.num_units(size))
    units = sorted(draw.draw(st.sets(st.sampled_from(every))))

    runs = list(layout.runs(units, size, longest_bytes=longest))

    assert sorted(u for run in runs for u in run.units) == units
    for run in runs:
        held = objects[run.object_number][run.object_offset : run.object_offset + run.size_bytes]
        wanted = b"".join(data[u * layout.unit_bytes :][: layout.unit_bytes] for u in run.units)
        assert held == wanted
        assert run.size_bytes == len(wanted)
        assert run.size_bytes <= max(longest, layout.unit_bytes)


@pytest.mark.parametrize(("unit", "count"), [(0, 1), (3, 1), (1 << 27, 1), (4, 0), (4, 257)])
def test_a_layout_out_of_range_is_refused_with_its_value(unit, count):
    with pytest.raises(ValueError, match=r"is \d+; give"):
        StripeLayout(unit, count)
