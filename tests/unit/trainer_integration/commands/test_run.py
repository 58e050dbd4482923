"""``omniload train run``: what it understands of its options, and how it ends."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from tests.support.plane.builders import a_mix
from trainer_integration.commands import run, run_folder


@pytest.mark.parametrize("resume", ["newest", "-1", "\u0661", pytest.param("9" * 5000, id="long")])
def test_a_resume_from_no_step_is_refused(resume, tmp_path):
    config = tmp_path / "train.yaml"

    result = CliRunner().invoke(run.run_job, [str(config), "--resume", resume])

    assert result.exit_code == 2
    assert "neither never nor latest nor the step of a checkpoint" in result.output


def test_a_job_that_trained_ends_well_though_it_has_no_report(monkeypatch, tmp_path):
    def refuse(_run):
        raise ConfigError("the report needs the package jinja2")

    class Launched:
        def __init__(self, *_args, **_named):
            self.train, self.mix, self.run_dir = SimpleNamespace(steps=1), a_mix(), tmp_path
            self.plan = SimpleNamespace(require_ranks=lambda launch: None)

        def run(self):
            return 0

    monkeypatch.setattr(run_folder, "write_report", refuse)
    monkeypatch.setattr(run, "Launcher", Launched)

    result = CliRunner().invoke(run.run_job, ["train.yaml"], standalone_mode=False)

    assert result.return_value == 0
    assert "no report: the report needs the package jinja2" in result.output
