"""A training run whose checkpoints lie on a store, striped, and no folder is shared."""

import json

import pytest

from omniload.base.errors import StateError
from tests.integration.trainer_integration.test_launch import a_job, launched
from trainer_integration.checkpoint.place import place_of
from trainer_integration.run.launch_plan import read_plan

pytestmark = pytest.mark.slow


def test_a_run_saves_to_a_store_and_is_continued_from_there(warm_python, tmp_path):
    config, where = a_job(tmp_path, ranks=1, steps=2, every=2), f"omnifs://a::file://{tmp_path}/s"
    (tmp_path / "s").mkdir()
    content = json.loads(config.read_text())
    content["checkpoint"]["folder"] = where
    config.write_text(json.dumps(content))

    with launched(config, **warm_python.for_launchers) as job:
        assert job.end() == 0, "".join(job.output)

    assert place_of(where).steps() == (2,)
    assert not (tmp_path / "run/checkpoints").exists()
    plan = read_plan(config)
    start = plan.start_of(1)
    assert (start.step, start.state) == (2, place_of(where).loader_state_of(2))
    assert plan.first_step("latest") == 2
    with pytest.raises(StateError, match=r"s/a holds step-00000002; pass --resume latest"):
        plan.first_step("never")
