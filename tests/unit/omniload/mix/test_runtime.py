"""Settings of the runtime that do not go together."""

import pytest
from pydantic import ValidationError

from omniload.mix.runtime import RuntimeConfig


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
        ({"scaling": {"least": 9}}, "runtime.scaling.least is 9, more than most, 8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        RuntimeConfig.model_validate(settings)
