"""Forecast of a run's draws, computed by hand for small mixes."""

import numpy as np
import pytest
from pydantic import ValidationError

from omniload.plan.forecast.figures import StepFigures, figures_of
from omniload.plan.forecast.forecast import (
    Forecast,
    Span,
    forecast,
    tokens_by_step,
    warnings_of,
)
from omniload.plan.forecast.sizes import SourceSizes
from tests.support.plane.builders import a_mix, a_plan

WEB = a_mix(sources=("web",))


def sizes_of(samples, lengths, **changes):
    return SourceSizes(
        samples_S=np.asarray(samples, float),
        tokens_per_sample_S=np.asarray(lengths, float),
        **changes,
    )


def a_staged_mix(**changes):
    """128 tokens a step; half and half, then from step 10 in 4 steps to a quarter and three."""
    stages = [
        {"from_step": 0, "weights": {"web": 1, "code": 1}},
        {"from_step": 10, "ramp_steps": 4, "weights": {"code": 1, "web": 3}},
    ]
    return a_mix(mix={"stages": stages} | changes)


def a_figure(**changes):
    defaults = {
        "tokens": 128,
        "capacity": 128,
        "imbalance": 1.0,
        "imbalance_before": 1.0,
        "bound": 1.0,
        "microbatch_imbalance": 1.0,
        "microbatch_bound": 1.0,
    }
    return StepFigures(**(defaults | changes))


def a_forecast(epochs, *, ends_early=False):
    epochs_S = np.asarray(epochs, float)
    span = Span(start=0, stop=10, tokens_S=epochs_S * 10, samples_S=epochs_S, epochs_S=epochs_S)
    return Forecast(stages=(span,), total=span, ends_early=ends_early)


def test_constant_weights_by_token_split_every_step_alike():
    mix = a_mix(weights={"code": 3, "web": 1})

    expected = forecast(mix, sizes_of([100, 100], [8, 4]), 50)

    assert expected.total.tokens_S.tolist() == [4800, 1600]
    assert expected.total.samples_S.tolist() == [600, 400]
    assert expected.total.epochs_S.tolist() == [6, 4]
    assert expected.total.shares_S.tolist() == [0.75, 0.25]


def test_a_ramp_is_summed_step_by_step():
    tokens = tokens_by_step(a_staged_mix(), sizes_of([1, 1], [1, 1]), 14)

    ramp = [0.5 - 0.25 * i / 4 for i in (1, 2, 3, 4)]
    assert tokens[0] == pytest.approx(128 * (10 * 0.5 + sum(ramp)))
    assert tokens.sum() == pytest.approx(128 * 14)


def test_every_stage_that_is_reached_has_a_span():
    expected = forecast(a_staged_mix(), sizes_of([9, 9], [1, 1]), 30)

    assert [(span.start, span.stop) for span in expected.stages] == [(0, 10), (10, 30)]
    summed = sum(span.tokens_S for span in expected.stages)
    assert summed == pytest.approx(expected.total.tokens_S)


def test_a_run_that_ends_in_the_first_stage_has_one_span():
    expected = forecast(a_staged_mix(), sizes_of([9, 9], [1, 1]), 7)

    assert [(span.start, span.stop) for span in expected.stages] == [(0, 7)]


def test_weights_by_sample_give_long_samples_more_tokens():
    mix = a_mix(
        mix={"stages": [{"from_step": 0, "weights": {"web": 1, "code": 1}}], "level": "sample"}
    )

    total = forecast(mix, sizes_of([10, 10], [30, 10]), 4).total

    assert total.shares_S.tolist() == [0.75, 0.25]
    assert total.samples_S[0] == pytest.approx(total.samples_S[1])


def test_padding_lowers_what_a_step_draws():
    total = forecast(a_mix(), sizes_of([1, 1], [1, 1], planned_tokens=100), 10).total

    assert total.tokens_S.tolist() == [500, 500]


def test_the_first_exhausted_source_ends_the_run_within_the_step_that_exhausts_it():
    mix = a_staged_mix(stop="first_exhausted")

    expected = forecast(mix, sizes_of([4.5 * 64, 10_000], [1, 1]), 30)

    assert expected.ends_early
    assert expected.total.epochs_S.max() == pytest.approx(1)


def test_each_source_once_is_all_of_each_and_the_last_source_has_the_end_for_itself():
    mix = a_mix(weights={"web": 3, "code": 1}, mix={"stop": "each_once"})

    expected = forecast(mix, sizes_of([128 * 3, 128 * 3], [1, 1]), 30)

    assert expected.total.tokens_S.tolist() == [128 * 3, 128 * 3]
    assert expected.total.stop == 6
    assert forecast(mix, sizes_of([128 * 3, 128 * 3], [1, 1]), 4).total.tokens_S == pytest.approx(
        [128 * 1, 128 * 3]
    )


def test_the_last_exhausted_source_ends_the_run_after_its_epoch():
    mix = a_mix(
        mix={
            "stages": [{"from_step": 0, "weights": {"web": 1, "code": 1}}],
            "stop": "all_exhausted",
        }
    )

    expected = forecast(mix, sizes_of([64, 7 * 64], [1, 1]), 30)

    assert expected.total.stop == 7


def test_a_source_that_lasts_does_not_end_the_run():
    expected = forecast(a_staged_mix(stop="first_exhausted"), sizes_of([1e6, 1e6], [1, 1]), 30)

    assert expected.total.stop == 30
    assert not expected.ends_early


def test_no_steps_draw_nothing():
    expected = forecast(a_mix(), sizes_of([1, 1], [1, 1]), 0)

    assert expected.total.tokens_S.tolist() == [0, 0]
    assert expected.total.shares_S.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("samples", "lengths", "named"),
    [([0, 1], [1, 1], "samples_S"), ([1, 1], [1, float("nan")], "tokens_per_sample_S")],
)
def test_an_empty_source_is_refused(samples, lengths, named):
    with pytest.raises(ValueError, match=f"{named} holds .*; every size is above 0"):
        forecast(a_mix(), sizes_of(samples, lengths), 1)


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="num_steps is -1"):
        forecast(a_mix(), sizes_of([1, 1], [1, 1]), -1)


def test_figures_compare_a_plan_with_its_rows_dealt_in_order():
    rows = [[[0, r, 0, 0, length, length]] for r, length in enumerate((30, 30, 2, 2))]
    plan = a_plan(rows, imbalance=1.0, bound=1.0)

    figures = figures_of(a_mix(balance={"linear": 1, "quadratic": 0}), plan, dp=2)

    assert (figures.tokens, figures.capacity) == (64, 128)
    assert figures.imbalance_before == pytest.approx(60 / 32)


def test_nothing_is_warned_of_when_all_is_well():
    assert warnings_of(WEB, a_forecast([3.9]), [a_figure()]) == []


def test_a_source_repeated_more_than_four_times_is_warned_of():
    (warning,) = warnings_of(a_mix(), a_forecast([6.21, 1]), [a_figure()])

    assert warning.startswith("code is gone through 6.2 times, more than 4; ")


def test_a_row_heavier_than_a_ranks_mean_is_warned_of():
    (warning,) = warnings_of(WEB, a_forecast([1]), [a_figure(bound=1.4), a_figure(bound=1.2)])

    assert "the heaviest row costs 1.30 times the mean of a rank" in warning


def test_padding_above_a_hundredth_is_warned_of():
    (warning,) = warnings_of(WEB, a_forecast([1]), [a_figure(tokens=120)])

    assert warning.startswith("6.2% of the rows is padding; raise pack.lookahead_rows, 1 now, or ")


def test_padding_of_a_document_a_row_is_told_with_the_ways_to_pack():
    mix = a_mix(sources=("web",), pack={"method": "none"})

    (warning,) = warnings_of(mix, a_forecast([1]), [a_figure(tokens=120)])

    assert "; set pack.method to best_fit, or set pack.method to concat_and_split" in warning


@pytest.mark.parametrize(
    ("source", "pack", "mix"),
    [
        (
            {
                "text": "text",
                "images": "images",
                "transforms": [{"type": "images", "patch": 2, "merge": 1, "placeholder": 7}],
            },
            {},
            {},
        ),
        (
            {"text": "chosen", "transforms": [{"type": "preference", "form": "text"}]},
            {"overlong": "drop"},
            {},
        ),
        (
            {"tokens": "tokens", "transforms": [{"type": "concat", "tokens": 32}]},
            {},
            {"level": "sequence"},
        ),
    ],
)
def test_padding_of_what_is_never_cut_is_not_told_to_be_cut(source, pack, mix):
    def declared(**packing):
        sources = {"web": {"type": "parquet", "path": "web/*.parquet"} | source}
        return a_mix(sources=sources, pack=pack | packing, mix=mix, tokenizer={"type": "bytes"})

    (warning,) = warnings_of(declared(), a_forecast([1]), [a_figure(tokens=120)])

    assert warning == "6.2% of the rows is padding; raise pack.lookahead_rows, 1 now"
    with pytest.raises(ValidationError, match="method is concat_and_split"):
        declared(method="concat_and_split")


def test_padding_between_conversations_is_not_told_to_be_filled_with_parts_of_them():
    chat = {"type": "completion", "form": "text"}
    sources = {
        "web": {"type": "jsonl", "path": "w.jsonl"},
        "sft": {"type": "jsonl", "path": "s.jsonl", "text": "answer", "transforms": [chat]},
    }
    mix = a_mix(sources=sources, tokenizer={"type": "bytes"})

    (warning,) = warnings_of(mix, a_forecast([1, 1]), [a_figure(tokens=120)])

    assert warning == "6.2% of the rows is padding; raise pack.lookahead_rows, 1 now"


def test_an_early_end_is_warned_of():
    (warning,) = warnings_of(WEB, a_forecast([1], ends_early=True), [a_figure()])

    assert warning.startswith("mix.stop ends the run before step 10")


def test_what_is_joined_counts_in_sequences_that_an_epoch_has_as_many_tokens_of():
    joined = {"type": "concat", "tokens": 64}
    web = {"type": "parquet", "path": "web", "tokens": "t", "transforms": [joined]}
    mix = a_mix(sources={"web": web, "code": {"type": "parquet", "path": "code", "tokens": "t"}})

    sizes = SourceSizes.of(mix, [10, 1000], [24, 8])  # code, web: as names are sorted

    assert sizes.samples_S.tolist() == [10, 125]
    assert sizes.tokens_per_sample_S.tolist() == [24, 64]
    assert SourceSizes.of(mix, [10, 5], [24, 8]).tokens_per_sample_S.tolist() == [24, 40]


def test_weights_of_sequences_share_tokens_out_evenly_however_long_documents_are():
    joined = {"type": "concat", "tokens": 32}
    sources = {
        name: {"type": "parquet", "path": name, "tokens": "t", "transforms": [joined]}
        for name in ("web", "code")
    }
    mix = a_mix(sources=sources, weights={"web": 3, "code": 1}, mix={"level": "sequence"})

    expected = forecast(mix, SourceSizes.of(mix, [1000, 1000], [7, 400]), 10)

    assert expected.total.tokens_S.tolist() == pytest.approx([320, 960])
    assert expected.total.samples_S.tolist() == pytest.approx([10, 30])


@pytest.mark.parametrize(
    ("stop", "steps"), [("each_once", 10), ("first_exhausted", 7), ("all_exhausted", 13)]
)
def test_a_first_epoch_that_another_run_had_begun_is_a_short_one(stop, steps):
    mix = a_mix(mix={"stages": [{"from_step": 0, "weights": {"web": 1, "code": 1}}], "stop": stop})
    lengths_S = np.full(2, 8.0)
    sizes = SourceSizes(
        samples_S=np.full(2, 100.0), tokens_per_sample_S=lengths_S, behind_S=np.array([0.5, 0.0])
    )

    expected = forecast(mix, sizes, 50)  # rows of 128 tokens; 400 and 800 tokens are left

    assert expected.total.stop == steps


def test_amounts_of_epochs_count_what_lies_behind_as_given():
    mix = a_mix(version=2, mix={"amounts": {"code": {"epochs": 2}, "web": {"tokens": 300}}})
    sizes = SourceSizes.of(mix, [100, 100], [8, 8], [0.75, 0.75])

    assert sizes.wanted_S(mix).tolist() == [1000, 300]
    assert sizes.tokens_of(np.array([0.5, 1.0])).tolist() == [100, 200]
