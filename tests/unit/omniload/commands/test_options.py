"""Numbers of the command line: what is none is refused before it is waited for."""

import click
import pytest

from omniload.commands.edits.verbs import retire
from omniload.commands.options import FiniteRange
from omniload.commands.runs.doctor import doctor
from omniload.commands.simulate import simulate
from omniload.commands.stats import stats


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_in_no_range(text):
    with pytest.raises(click.BadParameter, match=rf"'{text}' is no number to go by; give one"):
        FiniteRange().convert(text, None, None)


def test_a_number_in_the_range_is_taken_and_another_refused():
    assert FiniteRange(min=0).convert("2.5", None, None) == 2.5
    with pytest.raises(click.BadParameter, match="not in the range"):
        FiniteRange(min=0).convert("-1", None, None)


@pytest.mark.parametrize(
    ("command", "name"),
    [(retire, "timeout_s"), (stats, "measure_s"), (simulate, "cores"), (doctor, "seconds")],
)
def test_every_verb_that_waits_or_divides_takes_finite_numbers(command, name):
    option = next(each for each in command.params if each.name == name)

    with pytest.raises(click.BadParameter, match="is no number to go by"):
        option.type.convert("nan", option, None)
