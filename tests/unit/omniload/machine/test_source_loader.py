"""The Source Loader machine: reads each requested range once, and hands out token ranges."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import StateError
from omniload.base.ragged import Ragged
from omniload.machine.held.blocks import SampleRange
from omniload.machine.messages import (
    HandedOver,
    ReadAhead,
    ReleaseSamples,
    SamplesReported,
    SliceRequest,
    TakeOver,
)
from omniload.machine.source_loader import Read, SamplesRead, SourceLoader
from tests.support.plane.builders import a_table, tokens_of


def read_of(lengths, *, start=0, source=0):
    tokens = [tokens_of(source, start + i, 0, n) for i, n in enumerate(lengths)]
    return SamplesRead(
        source=source,
        block=SampleRange(a_table(lengths, start=start), Ragged.of(tokens)),
    )


def a_loader(*reads):
    loader = SourceLoader(names={0: "web", 1: "code"})
    for read in reads:
        loader.handle(read)
    return loader


def ask(*ranges, source=0):
    """Ask for ranges of (position, start, stop)."""
    positions, starts, stops = np.array(ranges).T
    return SliceRequest(
        source=source,
        positions_N=positions,
        subs_N=np.zeros(len(ranges), np.int32),
        starts_N=starts.astype(np.int32),
        stops_N=stops.astype(np.int32),
    )


def slices_of(loader, request):
    return loader.slices_of([request])[0]


def reported(read):
    """Return the report of a read."""
    table, size_bytes = read.block.table, read.block.size_bytes
    return SamplesReported(source=read.source, table=table, size_bytes=size_bytes)


def bytes_of(lengths, *, blocks=1):
    """Return the size of samples in ``blocks`` blocks: token ids, their starts, and the end of the last of a block."""
    return 4 * sum(lengths) + 8 * (len(lengths) + blocks)


def lists(columns):
    ragged = columns.tokens
    return [ragged[i].tolist() for i in range(len(ragged))]


def test_it_reads_what_it_is_told_to():
    assert a_loader().handle(ReadAhead(source=1, start=5, stop=9)) == (
        Read(source=1, start=5, stop=9),
    )


def test_what_was_read_is_held_and_reported():
    loader = a_loader()
    read = read_of([3, 4], start=5)

    assert loader.handle(read) == (reported(read),)
    assert loader.held_positions(0) == (5, 7)
    assert loader.held_bytes == bytes_of([3, 4])


def test_asked_again_it_answers_from_what_it_holds():
    read = read_of([3, 4])
    loader = a_loader(read)

    assert loader.handle(ReadAhead(source=0, start=0, stop=2)) == (reported(read),)


def test_asked_again_for_more_than_it_holds_it_answers_with_the_first_part():
    reads = read_of([3, 4]), read_of([5], start=2)
    loader = a_loader(*reads)

    (answer,) = loader.handle(ReadAhead(source=0, start=1, stop=9))

    assert (answer.table.start, answer.table.stop) == (1, 3)
    assert answer.table.lengths_N.tolist() == [4, 5]
    # A part reports its own size, because the planner computes the size of a token from it.
    assert answer.size_bytes == 9 * 4 + (2 + 2) * 8
    assert loader.handle(ReadAhead(source=0, start=3, stop=9)) == (Read(source=0, start=3, stop=9),)


def test_a_range_of_which_a_part_is_held_is_read_again_by_who_takes_over():
    loader = a_loader(read_of([3, 4]))

    reads = loader.handle(TakeOver(ranges={0: (0, 5)}))

    assert reads == (Read(source=0, start=0, stop=5),)
    assert loader.handle(TakeOver(ranges={0: (0, 2)})) == ()


def test_ranges_come_in_the_order_asked_for_from_any_block():
    loader = a_loader(read_of([3, 4]), read_of([5], start=2), read_of([6, 7], start=3))

    slices = slices_of(loader, ask((4, 1, 7), (0, 0, 3), (2, 2, 4), (1, 3, 4), (3, 0, 1)))

    assert lists(slices) == [
        tokens_of(0, 4, 0, 7)[1:].tolist(),
        tokens_of(0, 0, 0, 3).tolist(),
        tokens_of(0, 2, 0, 5)[2:4].tolist(),
        tokens_of(0, 1, 0, 4)[3:].tolist(),
        tokens_of(0, 3, 0, 6)[:1].tolist(),
    ]


def test_parts_of_one_sample_may_be_asked_for_twice():
    loader = a_loader(read_of([6]))

    assert lists(slices_of(loader, ask((0, 0, 4), (0, 3, 6)))) == [
        tokens_of(0, 0, 0, 6)[:4].tolist(),
        tokens_of(0, 0, 0, 6)[3:].tolist(),
    ]


def test_samples_of_one_record_are_told_apart():
    table = replace(
        a_table([2, 3]), positions_N=np.array([0, 0]), subs_N=np.array([0, 1], np.int32), stop=1
    )
    tokens = Ragged.of([np.array([1, 2]), np.array([3, 4, 5])])
    loader = a_loader(SamplesRead(source=0, block=SampleRange(table, tokens)))

    asked = replace(ask((0, 0, 3)), subs_N=np.array([1], np.int32))

    assert lists(slices_of(loader, asked)) == [[3, 4, 5]]


def test_sources_are_held_apart():
    loader = a_loader(read_of([3]), read_of([4], source=1))

    assert lists(slices_of(loader, ask((0, 0, 4), source=1))) == [tokens_of(1, 0, 0, 4).tolist()]


def test_blocks_are_let_go_once_all_of_them_is_behind_the_floor():
    loader = a_loader(read_of([3, 4]), read_of([5], start=2))

    loader.handle(ReleaseSamples(floors={0: 1}))
    assert loader.held_positions(0) == (0, 3)

    loader.handle(ReleaseSamples(floors={0: 2, 1: 9}))
    assert loader.held_positions(0) == (2, 3)
    assert loader.held_bytes == bytes_of([5])


def test_releasing_everything_leaves_nothing():
    loader = a_loader(read_of([3, 4]))

    loader.handle(ReleaseSamples(floors={0: 50}))

    assert loader.held_positions(0) == (0, 0)
    assert loader.held_bytes == 0


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ((0, 0, 1), "holds positions 2 to 4, asked for 0 to 0"),
        ((7, 0, 1), "holds positions 2 to 4, asked for 7 to 7"),
    ],
)
def test_a_sample_that_is_not_held_is_a_state_error(asked, shown):
    loader = a_loader(read_of([3, 4], start=2))

    with pytest.raises(StateError, match=f"source 'web' {shown}"):
        slices_of(loader, ask(asked))


def test_a_record_that_gave_no_sample_cannot_be_asked_for():
    block = SampleRange(replace(a_table([]), stop=4), Ragged.of([]))
    empty = SamplesRead(source=0, block=block)

    with pytest.raises(StateError, match="asked for 1 to 1"):
        slices_of(a_loader(empty), ask((1, 0, 1)))


def test_a_dropped_record_between_others_cannot_be_asked_for():
    table = replace(a_table([2, 2]), positions_N=np.array([0, 2]), stop=3)
    tokens = Ragged.of([np.array([1, 2]), np.array([3, 4])])
    loader = a_loader(SamplesRead(source=0, block=SampleRange(table, tokens)))

    with pytest.raises(StateError, match="asked for 1 to 1"):
        slices_of(loader, ask((1, 0, 2)))


def test_a_range_never_runs_into_the_sample_behind():
    loader = a_loader(read_of([3, 4]))

    assert lists(slices_of(loader, ask((0, 1, 9), (1, 6, 8)))) == [
        tokens_of(0, 0, 0, 3)[1:].tolist(),
        [],
    ]


@pytest.mark.parametrize("asked", [(0, -1, 3), (0, 4, 3), (-1, 0, 3), (1, -6, 2)])
def test_a_range_that_starts_before_its_sample_is_a_state_error_and_not_another_sample(asked):
    loader = a_loader(read_of([5, 6]))

    with pytest.raises(StateError, match="which do not exist; resume from an earlier checkpoint"):
        slices_of(loader, ask(asked))


def masked_read(lengths, *, start=0, source=0):
    """A read whose masks show the sample, and whose scores are two numbers for each sample."""
    read = read_of(lengths, start=start, source=source)
    masks = [(np.arange(n) + start + i) % 3 == 0 for i, n in enumerate(lengths)]
    scores = [[start + i, 0.25] for i in range(len(lengths))]
    others = {"loss_mask": Ragged.of(masks, np.bool_), "scores": Ragged.of(scores, np.float32)}
    return replace(read, block=replace(read.block, others=others))


def test_columns_are_cut_with_the_tokens_and_whole_ones_stay_with_the_first_piece():
    loader = a_loader(masked_read([7, 8]), masked_read([9], start=2))

    asked = replace(ask((2, 3, 8), (1, 0, 4)), columns=("loss_mask", "scores"))
    found = slices_of(loader, asked)

    assert lists(found) == [tokens_of(0, 2, 0, 9)[3:8].tolist(), tokens_of(0, 1, 0, 8)[:4].tolist()]
    assert found.others["loss_mask"][0].tolist() == [False, True, False, False, True]
    assert found.others["loss_mask"][1].tolist() == [False, False, True, False]
    assert [found.others["scores"][i].tolist() for i in range(2)] == [[], [1.0, 0.25]]


def test_a_column_that_nobody_asked_for_is_not_handed_out():
    loader = a_loader(masked_read([7, 8]))

    assert set(slices_of(loader, replace(ask((0, 0, 4)), columns=("loss_mask",))).others) == {
        "loss_mask"
    }
    assert slices_of(loader, ask((0, 0, 4))).others == {}


def test_ranges_of_a_source_without_a_mask_are_trained_on_whole():
    loader = a_loader(masked_read([7]), read_of([5], source=1))
    asked = [replace(ask((0, 1, 5), source=s), columns=("loss_mask", "scores")) for s in (1, 0)]

    alone, other = loader.slices_of(asked)
    both = loader.ranges_of(asked).others

    assert alone.others == {}
    masks = both["loss_mask"].packed()
    assert masks[0].tolist() == [True] * 4
    assert masks[1].tolist() == other.others["loss_mask"][0].tolist() == [False, False, True, False]
    assert both["scores"].lengths_N.tolist() == [0, 0]


def test_a_loader_that_takes_over_reads_again_what_is_outstanding_in_parts():
    loader = a_loader(read_of([5] * 1024, start=1000))

    assert loader.handle(TakeOver(ranges={0: (1000, 2500), 1: (7, 7)})) == (
        Read(source=0, start=2024, stop=2500),
    )


def test_a_loader_that_takes_over_reads_what_is_needed_first_of_each_source_first():
    reads = a_loader().handle(TakeOver(ranges={0: (0, 2500), 1: (10, 1100)}))

    assert [(read.source, read.start) for read in reads] == [
        (0, 0),
        (1, 10),
        (0, 1024),
        (1, 1034),
        (0, 2048),
    ]


def test_what_another_loader_had_read_is_read_before_it_is_handed_out():
    loader = a_loader(read_of([3], start=11))
    assert loader.unread([ask((10, 0, 3))]) == ()  # it was never read: if requested, it is refused

    loader.handle(TakeOver(ranges={0: (10, 20), 1: (0, 9)}))

    asked = [ask((10, 0, 3), (11, 0, 3), (13, 0, 3)), ask((11, 0, 1)), ask((4, 0, 1), source=1)]
    assert loader.unread(asked) == (
        Read(source=0, start=10, stop=14),
        Read(source=1, start=4, stop=5),
    )
    loader.handle(read_of([3] * 4, start=10))
    assert loader.unread(asked[:2]) == ()
    assert lists(slices_of(loader, ask((13, 1, 3)))) == [tokens_of(0, 13, 0, 3)[1:].tolist()]


def test_what_was_released_is_not_read_again():
    loader = a_loader()
    loader.handle(TakeOver(ranges={0: (10, 20)}))
    loader.handle(ReleaseSamples(floors={0: 15}))

    assert loader.unread([ask((14, 0, 3), (15, 0, 3))]) == (Read(source=0, start=15, stop=16),)
    with pytest.raises(StateError, match="released, or never read"):
        slices_of(loader, ask((14, 0, 3)))


@pytest.mark.parametrize(
    "parts",
    [
        [(4, 8), (0, 4), (8, 10)],
        [(8, 10), (4, 6), (0, 10)],
        [(0, 10), (2, 5)],
        [(2, 5), (0, 10)],
        [(0, 6), (4, 10), (3, 7)],
    ],
)
def test_parts_that_come_late_or_twice_are_held_once_and_in_order(parts):
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    loader = a_loader(*(read_of(lengths[a:b], start=a) for a, b in parts))

    # A part that comes between two others, or around them, may be held in one block more.
    assert loader.held_bytes <= bytes_of(lengths, blocks=len(parts) + 1)
    found = lists(slices_of(loader, ask(*((i, 0, n) for i, n in enumerate(lengths)))))
    assert found == [tokens_of(0, i, 0, n).tolist() for i, n in enumerate(lengths)]
    (report,) = loader.handle(ReadAhead(source=0, start=1, stop=9))
    assert (report.table.start, report.table.stop) == (1, 9)
    assert report.table.lengths_N.tolist() == lengths[1:9]


def test_what_a_lost_planner_let_go_of_is_kept_once_the_next_one_has_asked():
    loader = a_loader(read_of([4, 5, 6]))
    loader.handle(ReadAhead(source=0, start=0, stop=3, life=1))

    loader.handle(ReleaseSamples(floors={0: 3}, life=0))
    assert loader.held_positions(0) == (0, 3)

    loader.handle(ReleaseSamples(floors={0: 3}, life=1))
    assert loader.held_positions(0) == (0, 0)


def test_what_is_taken_over_twice_reaches_back_to_the_earlier_floor():
    loader = a_loader()
    loader.handle(TakeOver(ranges={0: (10, 20)}))
    loader.handle(TakeOver(ranges={0: (15, 15)}))

    assert loader.unread([ask((12, 0, 4))]) == (Read(source=0, start=12, stop=13),)


def test_a_loader_whose_source_is_handed_over_answers_for_what_only_the_next_one_has_read():
    loader = a_loader(read_of([3, 4]))
    request = ask((0, 0, 3), (5, 0, 2))
    assert loader.unread([request]) == ()

    loader.handle(HandedOver(sources=(0,)))

    assert loader.unread([request]) == (Read(source=0, start=5, stop=6),)


def test_a_source_that_is_forgotten_is_held_no_more_and_the_others_are():
    loader = a_loader(read_of([3]), read_of([5], source=1))
    loader.handle(HandedOver(sources=(0,)))

    loader.forget(0)

    assert loader.held_bytes == bytes_of([5])
    assert loader.names == {1: "code"}
    assert loader.unread([ask((0, 0, 3))]) == ()
    with pytest.raises(StateError, match="released, or never read"):
        slices_of(loader, ask((0, 0, 3)))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from((0, 1)), st.integers(0, 20), st.integers(1, 6)),
            st.tuples(st.sampled_from((0, 1)), st.integers(0, 26)),
            st.sampled_from((0, 1)),
        ),
        max_size=12,
    )
)
def test_what_held_samples_take_is_nothing_once_all_are_let_go_of(events):
    """A count that goes along with reads, repeated ones too, releases and sources that leave."""
    loader = a_loader()
    for event in events:
        match event:
            case (source, start, count):
                loader.handle(read_of([3] * count, start=start, source=source))
            case (source, floor):
                loader.handle(ReleaseSamples(floors={source: floor}))
            case source:
                loader.forget(source)

    holds_any = any(loader.held_positions(source) != (0, 0) for source in (0, 1))
    assert (loader.held_bytes > 0) == holds_any
    loader.handle(ReleaseSamples(floors={0: 1 << 30, 1: 1 << 30}))
    assert loader.held_bytes == 0


def test_a_range_that_is_read_twice_takes_its_memory_once():
    loader = a_loader(read_of([3, 5]))
    loader.handle(read_of([3, 5]))

    assert loader.held_bytes == bytes_of([3, 5])
