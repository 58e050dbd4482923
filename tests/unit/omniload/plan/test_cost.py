import numpy as np
import pytest

from omniload.plan.cost import QuadraticCost, row_costs


def test_cost_is_linear_plus_quadratic_in_the_length():
    cost_N = QuadraticCost(2.0, 0.5)(np.array([0, 1, 10]))

    assert cost_N.tolist() == [0.0, 2.5, 70.0]
    assert cost_N.dtype == np.float64


def test_the_square_of_a_long_document_does_not_overflow():
    lengths_N = np.array([1 << 20], np.int32)

    assert QuadraticCost(0.0, 1.0)(lengths_N).tolist() == [float(1 << 40)]


def test_unequal_packing_costs_more_than_equal_packing_of_the_same_tokens():
    cost = QuadraticCost(0.0, 1.0)

    assert cost(np.array([30, 70])).sum() / cost(np.array([50, 50])).sum() == pytest.approx(1.16)


@pytest.mark.parametrize(
    ("linear", "quadratic", "message"),
    [
        (-1.0, 1.0, "linear is -1.0"),
        (1.0, float("nan"), "quadratic is nan"),
        (float("inf"), 1.0, "linear is inf"),
        (0.0, 0.0, "both 0"),
    ],
)
def test_a_cost_that_cannot_balance_is_refused_with_its_value(linear, quadratic, message):
    with pytest.raises(ValueError, match=message):
        QuadraticCost(linear, quadratic)


def test_rows_sum_the_cost_of_their_pieces_and_empty_rows_cost_nothing():
    cost_P = np.array([1.0, 2.0, 4.0, 8.0])

    assert row_costs(cost_P, np.array([0, 0, 2, 2, 3, 4, 4])).tolist() == [0, 3, 0, 4, 8, 0]


def test_no_rows_cost_nothing():
    assert row_costs(np.empty(0), np.array([0])).tolist() == []
    assert row_costs(np.empty(0), np.array([0, 0, 0])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("row_offsets", "message"),
    [
        ([0, 3], r"runs over \(0, 3\) for 4 pieces"),
        ([1, 4], r"runs over \(1, 4\) for 4 pieces"),
        ([], r"runs over \(\) for 4 pieces"),
        ([0, 3, 1, 4], "falls from 3 to 1 at row 1"),
    ],
)
def test_boundaries_that_do_not_cover_the_pieces_are_refused(row_offsets, message):
    with pytest.raises(ValueError, match=message):
        row_costs(np.ones(4), np.array(row_offsets, np.int64))


def measurements(linear, quadratic, *, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    tokens_M = rng.integers(1_000, 100_000, 200)
    squares_M = tokens_M * rng.integers(100, 30_000, 200)
    seconds_M = linear * tokens_M + quadratic * squares_M
    return tokens_M, squares_M, seconds_M * (1 + noise * rng.standard_normal(200))


def test_exact_measurements_give_back_their_cost():
    fitted = QuadraticCost.fit(*measurements(3e-6, 2e-10))

    assert fitted.linear == pytest.approx(3e-6)
    assert fitted.quadratic == pytest.approx(2e-10)


def test_noisy_measurements_give_a_cost_near_theirs():
    fitted = QuadraticCost.fit(*measurements(3e-6, 2e-10, noise=0.02))

    assert fitted.linear == pytest.approx(3e-6, rel=0.05)
    assert fitted.quadratic == pytest.approx(2e-10, rel=0.05)


def test_a_term_that_would_be_negative_is_left_out_of_the_fit():
    tokens_M, squares_M, _ = measurements(1.0, 1.0)

    fitted = QuadraticCost.fit(tokens_M, squares_M, 5e-6 * tokens_M - 1e-12 * squares_M)

    assert fitted.quadratic == 0
    assert fitted.linear > 0


def test_documents_of_one_length_are_fitted_by_one_term():
    tokens_M = np.array([1_000, 2_000, 3_000])

    fitted = QuadraticCost.fit(tokens_M, tokens_M * 512, tokens_M * 1e-6)

    cost_of_one = fitted.linear * 512 + fitted.quadratic * 512**2
    assert cost_of_one == pytest.approx(512e-6)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1], [1], [1]), r"\[1, 1, 1\]"),
        (([1, 2], [1, 2], [1]), r"\[2, 2, 1\]"),
        (([1, 2], [1, 2], [1, float("nan")]), "not finite"),
        (([1, 2], [1, 4], [0, 0]), "no cost above 0"),
        (([1, 2], [1, 4], [-1, -2]), "sum to -3.0"),
    ],
)
def test_measurements_that_say_nothing_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        QuadraticCost.fit(*map(np.array, columns))
