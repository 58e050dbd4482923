"""Every source stays within one longest sample of its share, after every sample, wherever draws are cut."""

from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix import deficit
from omniload.mix.deficit import WEIGHT_ONE, draw, integer_weights
from tests.support.examples import few

weights_lists = st.lists(
    st.one_of(st.integers(1, 9), st.floats(1e-3, 1e3)), min_size=1, max_size=12
)
shares = st.lists(
    st.floats(0, 1e308, allow_subnormal=True) | st.just(5e-324), min_size=1, max_size=40
)


@st.composite
def draws(draw_from):
    weights = draw_from(weights_lists)
    seed = draw_from(st.integers(0, 1 << 30))
    longest = draw_from(st.sampled_from([1, 7, 100, 5000]))
    rng = np.random.default_rng(seed)
    columns = [rng.integers(1, longest + 1, 400).astype(np.int32) for _ in weights]
    return integer_weights(weights), columns


@given(shares.filter(any))
def test_integer_weights_have_one_sum_and_keep_every_weight_above_zero(weights):
    whole = integer_weights(weights)

    assert sum(whole) == WEIGHT_ONE
    assert [w > 0 for w in whole] == [weight > 0 for weight in weights]


def strays_of(weights_S, columns, drawn):
    """Return the distance of every source from its share after every sample, ``[N, S]``, in tokens."""
    taken = [0] * len(columns)
    lengths = []
    for s in drawn.sources_N.tolist():
        lengths.append(int(columns[s][taken[s]]))
        taken[s] += 1
    served = np.zeros((len(lengths), len(columns)))
    served[np.arange(len(lengths)), drawn.sources_N] = lengths
    served = served.cumsum(axis=0)
    return served - served.sum(axis=1, keepdims=True) * np.array(weights_S) / WEIGHT_ONE


@given(draws())
def test_every_source_stays_within_one_longest_sample_of_its_share_after_every_sample(given_draw):
    weights_S, columns = given_draw
    longest = max(int(column.max()) for column in columns)

    drawn = draw(columns, weights_S, [0] * len(columns), budget=60 * longest)

    strays = strays_of(weights_S, columns, drawn)
    # A thousandth of a token allows for the floating-point rounding of this test.
    assert strays.max(initial=0) <= longest + 1e-3
    assert strays.min(initial=0) >= -longest - 1e-3


@given(draws())
def test_credits_sum_to_zero_and_are_what_the_strays_say(given_draw):
    weights_S, columns = given_draw

    drawn = draw(columns, weights_S, [0] * len(columns), budget=20_000)

    assert sum(drawn.credits_S) == 0
    for weight, credit, served in zip(weights_S, drawn.credits_S, drawn.served_S, strict=True):
        assert credit == weight * sum(drawn.served_S) - WEIGHT_ONE * served


def by_the_paper(weights_S, columns, budget):
    """Compute WF2Q as Bennett and Zhang define it, in fractions: all flows are backlogged, and a token takes a second.

    In the fluid system that it follows, every flow is served at its rate at all times. So packet k of a flow starts
    there when the packets before it are done at that rate, and is done its length over the rate later. Among the
    packets that have started there, the one that is done first there is served next, packet by packet.
    """
    rates = [Fraction(weight, WEIGHT_ONE) for weight in weights_S]
    order, served = [], [0] * len(columns)
    left = [column.tolist() for column in columns]
    while sum(served) < budget:
        started = [s for s, rate in enumerate(rates) if served[s] / rate <= sum(served)]
        nearest = min(started, key=lambda s: ((served[s] + left[s][0]) / rates[s], s))
        served[nearest] += left[nearest].pop(0)
        order.append(nearest)
    return order


@given(draws())
def test_samples_come_in_the_order_of_the_paper(given_draw):
    weights_S, columns = given_draw
    budget = 100 * max(int(column.max()) for column in columns)

    drawn = draw(columns, weights_S, [0] * len(columns), budget=budget)

    assert drawn.starved is None
    assert drawn.sources_N.tolist() == by_the_paper(weights_S, columns, budget)


@given(draws(), st.lists(st.integers(0, 9000), max_size=5))
def test_cutting_a_draw_never_changes_its_order(given_draw, cuts):
    weights_S, columns = given_draw
    whole = draw(columns, weights_S, [0] * len(columns), budget=10_000)

    credits_S, taken, order, tokens = (0,) * len(columns), [0] * len(columns), [], 0
    for cut in [*sorted(cuts), 10_000]:
        left = [column[t:] for column, t in zip(columns, taken, strict=True)]
        part = draw(left, weights_S, credits_S, budget=cut - tokens)
        order += part.sources_N.tolist()
        credits_S, tokens = part.credits_S, tokens + sum(part.served_S)
        taken = [t + n for t, n in zip(taken, part.counts_S.tolist(), strict=True)]

    assert order == whole.sources_N.tolist()
    assert credits_S == whole.credits_S


@given(draws(), st.integers(1, 300))
def test_a_draw_that_starves_is_the_beginning_of_the_one_that_does_not(given_draw, known):
    weights_S, columns = given_draw
    whole = draw(columns, weights_S, [0] * len(columns), budget=10_000)

    part = draw([c[:known] for c in columns], weights_S, [0] * len(columns), budget=10_000)

    assert part.sources_N.tolist() == whole.sources_N.tolist()[: len(part.sources_N)]
    if part.starved is None:
        assert len(part.sources_N) == len(whole.sources_N)
    else:
        assert part.counts_S[part.starved] == known


@given(draws())
def test_weights_by_samples_are_met_within_one_sample(given_draw):
    weights_S, columns = given_draw
    ones = [np.ones_like(column) for column in columns]
    longest = max(int(column.max()) for column in columns)

    drawn = draw(ones, weights_S, [0] * len(columns), budget=60 * longest, sizes=columns)

    strays = strays_of(weights_S, ones, drawn)
    assert np.abs(strays).max(initial=0) <= 1 + 1e-6


@st.composite
def any_draws(draw_from):
    """Any input of ``draw``, from tables that run out in the middle to credits with any sum."""
    num = draw_from(st.integers(1, 12))
    rng = np.random.default_rng(draw_from(st.integers(0, 1 << 30)))
    spread = draw_from(st.sampled_from([0.1, 3, 20]))
    shares = rng.lognormal(0, spread, num) * (
        rng.random(num) < draw_from(st.sampled_from([0.7, 1]))
    )
    shares[0] = 1
    known = draw_from(st.sampled_from([30, 900]))
    columns = [rng.integers(1, 50, rng.integers(0, known)).astype(np.int32) for _ in range(num)]
    owed = draw_from(st.sampled_from([0, 40, 1 << 20, 1 << 40]))
    credits_S = [int(c) * WEIGHT_ONE // 7 for c in rng.integers(-owed, owed + 1, num)]
    if draw_from(st.booleans()):  # the values while no weight changes
        credits_S[0] -= sum(credits_S)
    counted = draw_from(
        st.sampled_from(
            [
                columns,
                [np.ones_like(column) for column in columns],
                [rng.integers(0, 2, len(column)) for column in columns],
            ]
        )
    )
    tokens = sum(int(column.sum()) for column in columns)
    return {
        "lengths": counted,
        "weights_S": integer_weights(shares.tolist()),
        "credits_S": credits_S,
        "budget": draw_from(st.integers(0, 1 + tokens) | st.integers(0, 1 + tokens // 10)),
        "sizes": None if counted is columns else columns,
        "ended": draw_from(st.sets(st.integers(0, num - 1))),
    }


@few(60, soak=1500)
@given(any_draws())
def test_samples_served_at_once_are_those_served_one_by_one(asked):
    with patch.object(deficit, "_FEW", 1 << 60):
        one_by_one = draw(**asked)

    with patch.object(deficit, "_FEW", 0), patch.object(deficit, "_LONG", 4):
        at_once = draw(**asked)

    assert_that_they_are_equal(at_once, one_by_one)


def test_samples_of_a_source_that_is_owed_much_are_drawn_until_the_budget_is_reached():
    # The first records are the shortest, so the first estimate of the served samples is too low. The other source has
    # no weight any more.
    sizes = np.repeat([1, 1000], [90, 10])

    drawn = draw(
        [np.ones(100, np.int64), np.ones(0, np.int64)],
        (WEIGHT_ONE, 0),
        (200 * WEIGHT_ONE, -200 * WEIGHT_ONE),
        budget=6_500,
        sizes=[sizes, np.ones(0, np.int64)],
    )

    assert (drawn.counts_S.tolist(), drawn.starved) == ([97, 0], None)


def assert_that_they_are_equal(drawn, other):
    assert drawn.sources_N.tolist() == other.sources_N.tolist()
    assert drawn.counts_S.tolist() == other.counts_S.tolist()
    assert drawn.credits_S == other.credits_S
    assert drawn.served_S == other.served_S
    assert drawn.starved == other.starved


@pytest.mark.parametrize("credit", [0, 1 << 61, 1 << 63])
def test_numbers_of_any_size_are_served_alike(credit):
    rng = np.random.default_rng(1)
    columns = [rng.integers(1, 1 << 20, 200) for _ in range(3)]
    asked = {"lengths": columns, "weights_S": integer_weights([1, 1e-9, 3]), "budget": 1 << 26}

    drawn = draw(**asked, credits_S=[credit, -credit, 0])

    with patch.object(deficit, "_FEW", 1 << 60):
        assert_that_they_are_equal(drawn, draw(**asked, credits_S=[credit, -credit, 0]))


@few(16, soak=200)
@given(st.lists(st.integers(1, 100), min_size=2, max_size=8), st.integers(0, 1 << 30))
def test_ten_thousand_samples_meet_the_mix_within_a_tenth_of_a_percent(weights, seed):
    rng = np.random.default_rng(seed)
    columns = [np.clip(rng.lognormal(6, 1, 11_000), 1, 2048).astype(np.int32) for _ in weights]
    weights_S = integer_weights(weights)

    drawn = draw(
        columns, weights_S, [0] * len(weights), budget=int(sum(map(int, columns[0][:10_000])))
    )

    served = np.array(drawn.served_S) / sum(drawn.served_S)
    assert np.abs(served - np.array(weights) / sum(weights)).max() <= 1e-3


@pytest.mark.parametrize("stages", [[(3, 1), (1, 3)], [(1, 0), (1, 9), (5, 5)], [(1, 1), (0, 1)]])
def test_the_mix_is_met_at_every_stage_boundary(stages):
    rng = np.random.default_rng(1)
    columns = [rng.integers(1, 1000, 40_000).astype(np.int32) for _ in range(2)]
    credits_S, owed, served, taken = (0, 0), np.zeros(2), np.zeros(2), [0, 0]

    for weights in stages:
        weights_S = integer_weights(weights)
        left = [column[t:] for column, t in zip(columns, taken, strict=True)]
        drawn = draw(left, weights_S, credits_S, budget=4_000_000)
        credits_S = drawn.credits_S
        taken = [t + n for t, n in zip(taken, drawn.counts_S.tolist(), strict=True)]
        served += drawn.served_S
        owed += np.array(weights) / sum(weights) * sum(drawn.served_S)

        assert np.abs(served - owed).max() <= 1000 * 2
        assert np.abs(served - owed).max() <= 1e-3 * served.sum()
