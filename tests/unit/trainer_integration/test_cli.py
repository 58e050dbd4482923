"""What ``omniload train`` understands of its options."""

import pytest
from click.testing import CliRunner

from trainer_integration.cli import command


@pytest.mark.parametrize("resume", ["newest", "-1", "\u0661", pytest.param("9" * 5000, id="long")])
def test_a_resume_from_no_step_is_refused(resume, tmp_path):
    config = tmp_path / "train.yaml"

    result = CliRunner().invoke(command, ["run", str(config), "--resume", resume])

    assert result.exit_code == 2
    assert "neither never nor latest nor the step of a checkpoint" in result.output
