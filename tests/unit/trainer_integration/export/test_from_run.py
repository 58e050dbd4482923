"""Text that a model goes on with."""

import pytest

from omniload.base.errors import ConfigError
from tests.support.trainer.moe_builders import a_model
from trainer_integration.export.from_run import continued


def test_the_likeliest_tokens_are_those_of_the_logits_and_a_seed_decides_the_others():
    model = a_model()

    likeliest = continued(model, [3, 1], 3, temperature=0)
    drawn = [continued(model, [3, 1], 8, seed=seed) for seed in (0, 0, 1)]

    assert likeliest == continued(model, [3, 1], 3, temperature=1e-4)
    assert likeliest[1:] == continued(model, [3, 1, likeliest[0]], 2, temperature=0)
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ConfigError, match="give at least one token"):
        continued(model, [], 3)


def test_the_smallest_temperature_takes_the_likeliest_and_one_that_is_no_number_is_refused():
    model = a_model()

    assert continued(model, [3, 1], 3, temperature=5e-324) == continued(
        model, [3, 1], 3, temperature=0
    )
    with pytest.raises(ConfigError, match="temperature is nan; give a number from 0 on"):
        continued(model, [3, 1], 3, temperature=float("nan"))
