"""The planner's knowledge of masks: the number of labels of a step that are left out."""

import numpy as np

from omniload.base.ragged import Ragged
from omniload.machine.metadata.samples import LossSpans
from omniload.mix.columns import LOSS_SPANS, spans_of
from omniload.mix.samples import SampleTable
from tests.support.plane.builders import a_table, pieces_of


def a_masked_table(masks, *, start=0):
    column = Ragged.of([np.array([bit == "1" for bit in mask]) for mask in masks], np.bool_)
    plain = a_table([len(mask) for mask in masks], start=start)
    return SampleTable(
        start=plain.start,
        stop=plain.stop,
        positions_N=plain.positions_N,
        subs_N=plain.subs_N,
        lengths_N=plain.lengths_N,
        metadata={LOSS_SPANS: spans_of(column)},
    )


def left_out(spans, *pieces):
    table = pieces_of(*pieces)
    return spans.labels_left_out(table)


def test_spans_are_where_true_values_begin_and_stop():
    masks = ["0011101", "", "1", "0", "11", "10"]
    column = Ragged.of(
        [np.array([bit == "1" for bit in mask], np.bool_) for mask in masks], np.bool_
    )
    found = spans_of(column)

    assert [found[i].tolist() for i in range(6)] == [[2, 5, 6, 7], [], [0, 1], [], [0, 2], [0, 1]]


def test_a_step_without_masked_sources_leaves_nothing_out():
    spans = LossSpans()
    spans.add(0, a_table([4, 5]))

    assert left_out(spans, [0, 0, 0, 0, 4, 4]) == 0


def test_the_first_token_is_no_label_and_a_cut_piece_has_the_one_behind_it():
    spans = LossSpans()
    spans.add(1, a_masked_table(["10110", "01100111"]))

    assert left_out(spans, [1, 0, 0, 0, 5, 5]) == 2
    assert left_out(spans, [1, 1, 0, 0, 3, 8]) == 1  # labels 1, 2 and 3 of 0110 0111
    assert left_out(spans, [1, 1, 0, 3, 8, 8]) == 1  # labels 4 to 7
    assert left_out(spans, [1, 1, 0, 3, 8, 8], [0, 9, 0, 0, 4, 4], [1, 0, 0, 0, 5, 5]) == 3


def test_samples_are_found_in_whatever_report_holds_them():
    spans = LossSpans()
    spans.add(1, a_masked_table(["000", "011"]))
    spans.add(1, a_masked_table([], start=2))
    spans.add(1, a_masked_table(["001", "000"], start=2))
    spans.add(1, a_masked_table(["010"], start=4))

    assert left_out(spans, [1, 0, 0, 0, 3, 3]) == 2
    assert left_out(spans, [1, 1, 0, 0, 3, 3], [1, 2, 0, 0, 3, 3]) == 1
    assert left_out(spans, [1, 4, 0, 0, 3, 3], [1, 0, 0, 0, 3, 3], [1, 3, 0, 0, 3, 3]) == 5


def test_what_lies_before_the_floor_is_let_go_and_the_rest_is_not():
    spans = LossSpans()
    spans.add(1, a_masked_table(["000"]))
    spans.add(1, a_masked_table(["000"], start=1))
    spans.release({1: 1})

    assert left_out(spans, [1, 1, 0, 0, 3, 3]) == 2
    ((_, _, kept),) = spans.of_pieces(pieces_of([1, 0, 0, 0, 3, 3], [1, 1, 0, 0, 3, 3]))
    assert len(kept) == 1


def test_what_is_reported_again_counts_once():
    spans = LossSpans()
    spans.add(1, a_masked_table(["000", "010"]))
    spans.add(1, a_masked_table(["011"], start=2))

    spans.forget(1, 1)
    spans.forget(0, 1)
    spans.add(1, a_masked_table(["010", "011"], start=1))

    assert left_out(spans, [1, 0, 0, 0, 3, 3]) == 2
    assert left_out(spans, [1, 1, 0, 0, 3, 3]) == 1
    assert left_out(spans, [1, 2, 0, 0, 3, 3]) == 0
