"""What ``omniload mix set`` understands."""

import pytest

from omniload.base.errors import ConfigError
from omniload.commands.edits.saying import what_is_set
from omniload.mix.edits.edit import SetAmounts, SetWeights
from omniload.mix.schema.amounts import Amount


def test_numbers_are_weights_and_what_has_a_unit_is_an_amount():
    weights = what_is_set(("web=0.2", "code=8e-1"))
    amounts = what_is_set(("web=1epoch", "code=5Btokens", "chat=50ksamples", "ids=1.5epochs"))

    assert weights == SetWeights(weights={"web": 0.2, "code": 0.8})
    assert amounts == SetAmounts(
        amounts={
            "web": Amount(epochs=1),
            "code": Amount(tokens=5_000_000_000),
            "chat": Amount(samples=50_000),
            "ids": Amount(epochs=1.5),
        }
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("web",), "NAME=NUMBER"),
        (("=2",), "NAME=NUMBER"),
        (("web=nan",), "NAME=NUMBER"),
        (("web=2pochs",), "web=2epochs"),
        (("web=-1epochs",), "NAME=AMOUNT"),
        (("web=1", "web=2"), "two weights, 1 and 2"),
        (("web=1epoch", "web=2"), "two weights, 1 epoch and 2"),
        (("web=1", "code=2epochs"), "a run has one or the other"),
        (("web=0epochs",), "greater than 0"),
        (("web=5xtokens",), "not a quantity"),
        (("web=0tokens",), "greater than or equal to 1"),
        (("web=-1",), "greater than or equal to 0"),
    ],
)
def test_what_is_neither_is_refused_with_what_to_say(texts, said):
    with pytest.raises(ConfigError, match=said):
        what_is_set(texts)
