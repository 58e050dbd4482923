import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import StateError
from trainer_integration.config import SpikeGuardConfig
from trainer_integration.training.progress import TrainingProgress
from trainer_integration.training.spike_guard import MOST_IN_A_ROW, SpikeGuard

SKIP = SpikeGuardConfig(action="skip", window=10)
STEADY = [1.0, 1.2] * 5
"""Mean 1.1, deviation 0.1: six sigma are at 1.7."""


def test_a_norm_beyond_six_deviations_is_a_spike_and_one_within_is_none():
    assert SpikeGuard(SKIP, STEADY).judge(1.69, 10) is None

    spike = SpikeGuard(SKIP, STEADY).judge(1.71, 10)

    assert spike.sigmas == pytest.approx(6.1)
    assert (spike.mean, spike.window) == (pytest.approx(1.1), 10)


def test_nothing_is_a_spike_before_the_window_is_full():
    guard = SpikeGuard(SKIP, STEADY[:-1])

    assert guard.judge(50.0, 9) is None
    assert guard.norms[-1] == 50.0


def test_a_spike_stays_out_of_the_window_and_does_not_hide_the_next():
    guard = SpikeGuard(SKIP, STEADY)

    assert guard.judge(50.0, 10) is not None
    assert guard.norms == tuple(STEADY)
    assert guard.judge(50.0, 11) is not None
    assert guard.judge(1.1, 12) is None
    assert guard.in_a_row == 0


def test_a_run_that_is_to_stop_names_the_step_and_where_its_samples_are_found():
    guard = SpikeGuard(SKIP.model_copy(update={"action": "stop"}), STEADY)

    with pytest.raises(
        StateError, match=r"norm of step 41 is 50.*omniload mix audit RUN --step 41"
    ):
        guard.judge(50.0, 41)


def test_too_many_skipped_steps_in_a_row_end_the_run():
    guard = SpikeGuard(SKIP, STEADY)
    for step in range(MOST_IN_A_ROW):
        assert guard.judge(50.0, step) is not None

    with pytest.raises(StateError, match="the 11th in a row"):
        guard.judge(50.0, MOST_IN_A_ROW)


def test_norms_that_hardly_vary_make_no_spike_of_a_little_more():
    guard = SpikeGuard(SKIP, [1.0] * 10)

    assert guard.judge(1.05, 10) is None
    assert guard.judge(1.2, 11) is not None


def test_a_guard_that_is_off_keeps_nothing():
    guard = SpikeGuard(SpikeGuardConfig(), STEADY)

    assert guard.judge(1e9, 10) is None
    assert guard.norms == tuple(STEADY)


@given(
    norms=st.lists(st.floats(0.1, 5.0) | st.just(100.0), min_size=12, max_size=60),
    cut=st.integers(0, 60),
)
def test_a_run_that_is_resumed_anywhere_judges_as_one_that_was_not(norms, cut):
    def judged(progress, steps):
        found = []
        for step in steps:
            try:
                found.append(progress.guard.judge(norms[step], step))
            except StateError as error:
                found.append(str(error))
        return found

    unbroken = judged(TrainingProgress(SKIP), range(len(norms)))
    first = TrainingProgress(SKIP)
    cut = min(cut, len(norms))
    before = judged(first, range(cut))
    kept = json.loads(json.dumps(first.to_json()))

    assert before + judged(TrainingProgress.of(SKIP, kept), range(cut, len(norms))) == unbroken


def test_a_checkpoint_of_an_older_release_has_no_progress_and_one_of_a_later_is_refused():
    assert TrainingProgress.of(SKIP, {}).tokens == 0

    with pytest.raises(StateError, match="not of this release"):
        TrainingProgress.of(SKIP, {"version": 2})
