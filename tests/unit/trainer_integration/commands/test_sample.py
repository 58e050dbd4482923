"""``omniload train sample``: what it understands of its options."""

from click.testing import CliRunner

from trainer_integration.commands.sample import sample


def test_a_temperature_that_is_no_number_is_refused(tmp_path):
    result = CliRunner().invoke(sample, [str(tmp_path), "--prompt", "a", "--temperature", "nan"])

    assert result.exit_code == 2
    assert "'nan' is no number to go by" in result.output
