"""Several faults of a mix file are one error, of the class that is the least likely to go away."""

import pytest

from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.commands.faults import raise_together


def test_no_error_is_no_error():
    raise_together([])


def test_one_error_stays_itself():
    error = UnavailableError("no answer")

    with pytest.raises(UnavailableError) as raised:
        raise_together([error])

    assert raised.value is error


def test_several_errors_are_one_with_a_line_for_each():
    with pytest.raises(ConfigError) as raised:
        raise_together([ConfigError("first"), ConfigError("second")])

    assert str(raised.value) == "first\nsecond"


@pytest.mark.parametrize(
    ("kinds", "gravest"),
    [
        ([UnavailableError, ConfigError], ConfigError),
        ([ConfigError, IntegrityError], IntegrityError),
        ([StateError, UnavailableError], StateError),
    ],
)
def test_together_they_are_what_is_least_likely_to_go_away(kinds, gravest):
    with pytest.raises(OmniloadError) as raised:
        raise_together([kind("wrong") for kind in kinds])

    assert type(raised.value) is gravest
