"""Numbers of the command line: an invalid one is refused before any wait."""

import click
import pytest

from omniload.commands.edits.verbs import retire
from omniload.commands.runs.doctor import doctor
from omniload.commands.simulate import simulate
from omniload.commands.stats import stats


@pytest.mark.parametrize(
    ("command", "name"),
    [(retire, "timeout_s"), (stats, "measure_s"), (simulate, "cores"), (doctor, "seconds")],
)
def test_every_verb_that_waits_or_divides_takes_finite_numbers(command, name):
    option = next(each for each in command.params if each.name == name)

    with pytest.raises(click.BadParameter, match="is no number to go by"):
        option.type.convert("nan", option, None)
