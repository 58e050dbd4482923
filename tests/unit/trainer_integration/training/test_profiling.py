import json

import torch

from trainer_integration.training.profiling import StepProfile


def traced_steps(file):
    events = json.loads(file.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if str(e.get("name", "")).startswith("step ")})


def test_the_steps_of_the_range_are_in_the_trace_and_no_others(tmp_path):
    profile = StepProfile((2, 3), tmp_path / "profile", 1)
    told = []
    for step in range(5):
        with profile.step(step) as file:
            torch.ones(8) @ torch.ones(8)
        told.append(file)

    assert told == [None, None, None, tmp_path / "profile" / "rank-1-steps-2-3.json", None]
    assert traced_steps(told[3]) == ["step 2", "step 3"]


def test_a_run_that_ends_within_the_range_leaves_what_was_traced(tmp_path):
    profile = StepProfile((0, 9), tmp_path, 0)
    with profile.step(0):
        pass

    profile.close()

    (file,) = tmp_path.iterdir()
    assert traced_steps(file) == ["step 0"]


def test_a_range_that_is_never_reached_leaves_nothing(tmp_path):
    profile = StepProfile((7, 7), tmp_path / "profile", 0)
    with profile.step(0):
        pass
    profile.close()

    assert list(tmp_path.iterdir()) == []
