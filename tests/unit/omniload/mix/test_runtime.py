"""Settings of the runtime that do not go together."""

import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.mix.runtime import RuntimeConfig
from omniload.mix.schema.places import EnvConfig


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "local", "address": "auto"}, "runtime.kind is local; use kind: ray"),
        ({"address": "auto", "bind": "eth0"}, "leave out bind and ports"),
        ({"address": "auto", "ports": "20000-20099"}, "leave out bind and ports"),
        ({"ports": "20000"}, "no range of ports"),
        ({"place": {"planner": {"cpus": 1}}}, "place is of a Ray that runs already"),
        (
            {"address": "auto", "place": {"loaders": {"resources": {"GPU": 1}}}},
            "'GPU', a resource of Ray's own; no role computes on one",
        ),
        (
            {"address": "auto", "place": {"loaders": {"resources": {"CPU": 1}}}},
            "'CPU', a resource of Ray's own; give cpus",
        ),
        ({"env": {"pass_on": ["HOME"]}}, "env is of a Ray that runs already"),
        (
            {"address": "auto", "env": {"set": {"LD_PRELOAD": "x"}}},
            "which says what code a process",
        ),
        ({"address": "auto", "env": {"pass_on": ["PYTHONPATH"]}}, "which says what code a process"),
        ({"address": "auto", "env": {"set": {"HF_TOKEN": "x"}}}, "a secret by its name; .*pass_on"),
        ({"address": "auto", "env": {"set": {"AWS_SECRET_ACCESS_KEY": "x"}}}, "a secret by its"),
        ({"address": "auto", "env": {"set": {"NOT=ONE": "x"}}}, "should match pattern"),
        ({"scaling": {"least": 9}}, "runtime.scaling.least is 9, more than most, 8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        RuntimeConfig.model_validate(settings)


def test_variables_are_passed_on_by_name_and_one_that_is_missing_is_told_without_any_value():
    env = EnvConfig(pass_on=["HF_TOKEN", "AWS_PROFILE"])

    found = env.passed_on({"HF_TOKEN": "hf_1", "AWS_PROFILE": "team", "HOME": "/root"})

    assert found == {"HF_TOKEN": "hf_1", "AWS_PROFILE": "team"}
    with pytest.raises(
        ConfigError, match=r"pass_on names \['AWS_PROFILE'\], which the process"
    ) as told:
        env.passed_on({"HF_TOKEN": "hf_1"})
    assert "hf_1" not in str(told.value)
