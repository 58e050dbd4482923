"""The bad records that a source tolerates: a number, or a percentage of its records."""

import pytest
from pydantic import ValidationError

from omniload.mix.schema.records import OnError


@pytest.mark.parametrize(
    ("limit", "records", "most"),
    [
        (7, 5, 7),
        ("2k", 5, 2_000),
        (1e3, 5, 1_000),
        ("0.1%", 999, 0),
        ("0.1%", 1_000, 1),
        ("0.1 %", 1_999, 1),
        ("29%", 100, 29),  # as a float less than 29
        ("0%", 10**12, 0),
        ("100%", 10**12, 10**12),
        ("0.000000000000001%", 10**12, 0),
    ],
)
def test_a_limit_is_a_count_or_a_percentage_rounded_down(limit, records, most):
    assert OnError(limit=limit).most_of(records) == most


def test_a_percentage_comes_back_from_json_as_it_was_and_says_what_it_is_of():
    limit = OnError(limit="0.5 %")

    assert OnError.model_validate_json(limit.model_dump_json()) == limit
    assert limit.said_of(12_345) == "0.5% (61 of 12,345 records)"


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("100.1%", "more than all records"),
        ("-1%", "is not a quantity"),
        ("1e9%", "is not a quantity"),
        (-1, "is not among 0 to"),
        ("2T", "is not among 0 to"),
        (0.5, "neither a count nor a percentage such as 0.1%"),
        (True, "neither a count nor a percentage"),
        ([1], "neither a count nor a percentage"),
    ],
)
def test_another_limit_is_refused_with_one_reason(limit, said):
    with pytest.raises(ValidationError, match=said) as caught:
        OnError(limit=limit)
    assert caught.value.error_count() == 1
