"""What is told of a wait whose limit has passed."""

from concurrent.futures import Future

import pytest

from omniload.actors.patience import heard_within
from omniload.base.errors import UnavailableError


def test_a_planner_that_is_late_to_hear_of_a_loader_is_told_as_late():
    with pytest.raises(UnavailableError, match=r"come to the take-over by loader-0\+1"):
        heard_within(0.0, Future(), "loader-0+1")
