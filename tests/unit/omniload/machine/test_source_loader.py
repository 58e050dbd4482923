"""The Source Loader machine: reads what it is told, once, and hands out token ranges."""

from dataclasses import replace

import numpy as np
import pytest

from omniload.base.errors import StateError
from omniload.base.ragged import Ragged
from omniload.machine.messages import ReadAhead, ReleaseSamples, SamplesReported, SliceRequest
from omniload.machine.source_loader import Read, SamplesRead, SourceLoader
from tests.support.builders import a_table, tokens_of


def read_of(lengths, *, start=0, source=0, skipped=0):
    tokens = [tokens_of(source, start + i, 0, n) for i, n in enumerate(lengths)]
    return SamplesRead(
        source=source,
        table=a_table(lengths, start=start),
        tokens=Ragged.of(tokens),
        skipped=skipped,
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


def lists(ragged):
    return [ragged[i].tolist() for i in range(len(ragged))]


def test_it_reads_what_it_is_told_to():
    assert a_loader().handle(ReadAhead(source=1, start=5, stop=9)) == (
        Read(source=1, start=5, stop=9),
    )


def test_what_was_read_is_held_and_reported():
    loader = a_loader()
    read = read_of([3, 4], start=5, skipped=2)

    assert loader.handle(read) == (SamplesReported(source=0, table=read.table, skipped=2),)
    assert loader.held_positions(0) == (5, 7)
    assert loader.held_tokens() == 7


def test_asked_again_it_answers_from_what_it_holds():
    read = read_of([3, 4])
    loader = a_loader(read)

    assert loader.handle(ReadAhead(source=0, start=0, stop=2)) == (
        SamplesReported(source=0, table=read.table),
    )


def test_reading_twice_holds_once():
    assert a_loader(read_of([3, 4]), read_of([3, 4])).held_tokens() == 7


def test_ranges_come_in_the_order_asked_for_from_any_block():
    loader = a_loader(read_of([3, 4]), read_of([5], start=2), read_of([6, 7], start=3))

    slices = loader.slices(ask((4, 1, 7), (0, 0, 3), (2, 2, 4), (1, 3, 4), (3, 0, 1)))

    assert lists(slices) == [
        tokens_of(0, 4, 0, 7)[1:].tolist(),
        tokens_of(0, 0, 0, 3).tolist(),
        tokens_of(0, 2, 0, 5)[2:4].tolist(),
        tokens_of(0, 1, 0, 4)[3:].tolist(),
        tokens_of(0, 3, 0, 6)[:1].tolist(),
    ]


def test_parts_of_one_sample_may_be_asked_for_twice():
    loader = a_loader(read_of([6]))

    assert lists(loader.slices(ask((0, 0, 4), (0, 3, 6)))) == [
        tokens_of(0, 0, 0, 6)[:4].tolist(),
        tokens_of(0, 0, 0, 6)[3:].tolist(),
    ]


def test_samples_of_one_record_are_told_apart():
    table = replace(
        a_table([2, 3]), positions_N=np.array([0, 0]), subs_N=np.array([0, 1], np.int32), stop=1
    )
    tokens = Ragged.of([np.array([1, 2]), np.array([3, 4, 5])])
    loader = a_loader(SamplesRead(source=0, table=table, tokens=tokens, skipped=0))

    asked = replace(ask((0, 0, 3)), subs_N=np.array([1], np.int32))

    assert lists(loader.slices(asked)) == [[3, 4, 5]]


def test_sources_are_held_apart():
    loader = a_loader(read_of([3]), read_of([4], source=1))

    assert lists(loader.slices(ask((0, 0, 4), source=1))) == [tokens_of(1, 0, 0, 4).tolist()]


def test_blocks_are_let_go_once_all_of_them_is_behind_the_floor():
    loader = a_loader(read_of([3, 4]), read_of([5], start=2))

    loader.handle(ReleaseSamples(floors={0: 1}))
    assert loader.held_positions(0) == (0, 3)

    loader.handle(ReleaseSamples(floors={0: 2, 1: 9}))
    assert loader.held_positions(0) == (2, 3)
    assert loader.held_tokens() == 5


def test_releasing_everything_leaves_nothing():
    loader = a_loader(read_of([3, 4]))

    loader.handle(ReleaseSamples(floors={0: 50}))

    assert loader.held_positions(0) == (0, 0)
    assert loader.held_tokens() == 0


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
        loader.slices(ask(asked))


def test_a_record_that_gave_no_sample_cannot_be_asked_for():
    empty = SamplesRead(
        source=0, table=replace(a_table([]), stop=4), tokens=Ragged.of([]), skipped=4
    )

    with pytest.raises(StateError, match="asked for 1 to 1"):
        a_loader(empty).slices(ask((1, 0, 1)))


def test_a_dropped_record_between_others_cannot_be_asked_for():
    table = replace(a_table([2, 2]), positions_N=np.array([0, 2]), stop=3)
    tokens = Ragged.of([np.array([1, 2]), np.array([3, 4])])
    loader = a_loader(SamplesRead(source=0, table=table, tokens=tokens, skipped=0))

    with pytest.raises(StateError, match="asked for 1 to 1"):
        loader.slices(ask((1, 0, 2)))


def test_a_range_never_runs_into_the_sample_behind():
    loader = a_loader(read_of([3, 4]))

    assert lists(loader.slices(ask((0, 1, 9), (1, 6, 8)))) == [
        tokens_of(0, 0, 0, 3)[1:].tolist(),
        [],
    ]


@pytest.mark.parametrize("asked", [(0, -1, 3), (0, 4, 3), (-1, 0, 3), (1, -6, 2)])
def test_a_range_that_starts_before_its_sample_is_a_state_error_and_not_another_sample(asked):
    loader = a_loader(read_of([5, 6]))

    with pytest.raises(StateError, match="which are none; resume from an earlier checkpoint"):
        loader.slices(ask(asked))
