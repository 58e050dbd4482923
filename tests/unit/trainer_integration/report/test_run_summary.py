"""What a log amounts to."""

import numpy as np
import pytest

from tests.support.plane.builders import a_mix
from tests.support.trainer.run_lines import a_killed_run, a_memory, a_step, an_event
from trainer_integration.report.run_summary import (
    attempts_of,
    compute_imbalance,
    events_of,
    memory_by_kind,
    role_kind,
    shares_of,
    source_shares,
    summary_of,
    wait_share,
)


def test_an_attempt_ends_where_the_ranks_are_started_again():
    first, second = attempts_of(a_killed_run())

    assert [line.step for line in first.steps] == [0, 1, 2, 3]
    assert [line.step for line in second.steps] == [2, 3, 4, 5]
    assert (first.resumed_from, second.resumed_from) == (None, 2)


def test_an_attempt_remembers_how_its_first_failing_rank_ended():
    lines = a_killed_run()
    lines.insert(8, an_event("exit", "rank 0: code 1: connection closed"))

    first, second = attempts_of(lines)

    assert first.cause == "rank 1: signal SIGKILL"
    assert second.cause is None


def test_a_second_launch_counts_as_such_though_its_attempts_count_from_0():
    lines = [an_event("start"), a_step(0), an_event("start"), an_event("resume", step=1), a_step(1)]

    assert [(a.launch, a.number, a.resumed_from) for a in attempts_of(lines)] == [
        (0, 0, None),
        (1, 0, 1),
    ]


def test_a_log_without_lines_has_no_attempt():
    assert attempts_of([]) == ()


def test_a_second_launch_goes_on_where_the_clock_of_the_first_stopped():
    lines = [
        an_event("start"),
        an_event("end", seconds=10.0),
        an_event("start", seconds=0.5),
        an_event("end", seconds=4.0),
    ]

    assert [event.seconds for event in events_of(lines)] == [0.0, 10.0, 10.5, 14.0]


def test_an_event_knows_the_step_before_it():
    by_kind = {event.line.what: event.after_step for event in events_of(a_killed_run())}

    assert by_kind["start"] is None
    assert by_kind["restart"] == 3
    assert by_kind["end"] == 5


@pytest.mark.parametrize(
    ("role", "kind"),
    [("rank 12", "rank"), ("loader-0", "loader"), ("planner", "planner"), ("ray", "ray")],
)
def test_roles_of_a_kind_differ_in_their_number_only(role, kind):
    assert role_kind(role) == kind


def test_memory_is_added_up_by_kind_with_the_greatest_first():
    seconds, memory = memory_by_kind(a_killed_run())

    assert seconds.tolist() == [5.0, 10.0]
    assert {kind: sizes.tolist() for kind, sizes in memory.items()} == {
        "rank": [220, 200],
        "planner": [30, 40],
    }
    assert list(memory) == ["rank", "planner"]


def test_a_role_that_was_not_sampled_once_counts_as_nothing_then():
    _, memory = memory_by_kind([a_memory(1.0, ray=5), a_memory(2.0, planner=7)])

    assert memory["ray"].tolist() == [5, 0]
    assert memory["planner"].tolist() == [0, 7]


def test_shares_so_far_weigh_every_step_by_its_tokens():
    steps = [
        a_step(0, tokens_by_source={"code": 100, "web": 0}),
        a_step(1, tokens_by_source={"code": 100, "web": 200}),
    ]

    shares = shares_of(steps, a_mix(weights={"code": 1, "web": 3}))

    np.testing.assert_allclose(shares.step_NS, [[1, 0], [1 / 3, 2 / 3]])
    np.testing.assert_allclose(shares.total_NS, [[1, 0], [0.5, 0.5]])
    np.testing.assert_allclose(shares.step_target_NS, [[0.25, 0.75], [0.25, 0.75]])


def test_targets_follow_the_ramp_and_count_so_far_by_tokens():
    mix = a_mix(
        mix={
            "stages": [
                {"from_step": 0, "weights": {"web": 1, "code": 0}},
                {"from_step": 1, "ramp_steps": 2, "weights": {"web": 0, "code": 1}},
            ]
        }
    )
    steps = [a_step(step, tokens_by_source={"web": 50, "code": 50}) for step in range(3)]

    shares = shares_of(steps, mix)

    np.testing.assert_allclose(shares.step_target_NS[:, 0], [0, 0.5, 1])
    np.testing.assert_allclose(shares.total_target_NS[:, 0], [0, 0.25, 0.5])


def test_targets_are_those_of_the_steps_that_were_logged_not_of_their_places():
    mix = a_mix(
        mix={
            "stages": [
                {"from_step": 0, "weights": {"web": 1, "code": 0}},
                {"from_step": 50, "weights": {"web": 0, "code": 1}},
            ]
        }
    )

    shares = shares_of([a_step(49), a_step(50)], mix)

    assert shares.step_target_NS[:, 1].tolist() == [1.0, 0.0]


def test_weights_that_count_samples_give_tokens_no_target():
    mix = a_mix(
        mix={"level": "sample", "stages": [{"from_step": 0, "weights": {"web": 1, "code": 1}}]}
    )

    assert shares_of([a_step(0)], mix).step_target_NS is None
    assert [source.target for source in source_shares([a_step(0)], mix)] == [None, None]


def test_a_source_that_the_log_does_not_name_has_no_tokens():
    shares = source_shares([a_step(0, tokens_by_source={"web": 10})], a_mix())

    assert [(source.name, source.tokens, source.share) for source in shares] == [
        ("code", 0, 0.0),
        ("web", 10, 1.0),
    ]


def test_the_wait_is_that_of_the_rank_that_waited_longest():
    assert wait_share(a_step(0, seconds=2.0, wait_s=(0.1, 0.5))) == 0.25
    assert wait_share(a_step(0, seconds=0.0)) == 0.0


def test_measured_imbalance_is_the_slowest_rank_over_the_mean():
    assert compute_imbalance(a_step(0, compute_s=(3.0, 1.0))) == 1.5
    assert compute_imbalance(a_step(0, compute_s=(0.0, 0.0))) == 1.0


def test_a_summary_counts_each_step_once_and_tells_what_was_run_again():
    summary = summary_of(a_killed_run(), a_mix())

    assert (summary.steps, summary.attempts, summary.failures) == (6, 2, 1)
    assert summary.repeated_steps == 2
    assert summary.tokens == 6000
    assert summary.outcome == "done"
    assert summary.seconds == 12.0
    assert summary.peak_bytes == {"rank": 220, "planner": 40}
    assert summary.expert_imbalance == 1.25
    assert (summary.saves, summary.save_s, summary.longest_save_s) == (1, 0.25, 0.25)


def test_losses_at_the_ends_are_means_of_three_steps():
    summary = summary_of(a_killed_run(), a_mix())

    assert summary.first_loss == pytest.approx(8.9)
    assert summary.last_loss == pytest.approx(8.6)


def test_the_figures_of_steps_that_were_run_again_are_the_last_ones():
    lines = [a_step(0, loss=9.0, tokens=1), a_step(0, loss=5.0, tokens=7, attempt=1)]

    summary = summary_of(lines, a_mix())

    assert (summary.last_loss, summary.tokens) == (5.0, 7)


def test_a_run_that_was_cut_off_says_so_and_one_without_steps_has_no_figures():
    summary = summary_of([an_event("start")], a_mix())

    assert summary.outcome == "running or cut off"
    assert summary.sources == ()
    assert np.isnan(summary.last_loss)


def test_a_launch_that_goes_on_behind_the_end_of_another_has_not_ended():
    again = summary_of([*a_killed_run(), an_event("start")], a_mix(), "running")

    assert (again.outcome, again.has_ended, again.is_done) == ("running", False, False)
    assert summary_of(a_killed_run(), a_mix(), "running").is_done


def test_evaluations_are_those_of_the_steps_as_they_were_last_run():
    lines = [
        a_step(0),
        a_step(1, evaluation={"web": 9.0, "code": 7.0}),
        a_step(1, attempt=1, evaluation={"web": 5.0, "code": 3.0}),
        a_step(2, attempt=1),
    ]

    (found,) = summary_of(lines, a_mix()).evaluations

    assert (found.step, found.losses, found.mean) == (1, {"web": 5.0, "code": 3.0}, 4.0)


def test_a_save_beside_training_counts_by_how_long_it_stopped_it():
    lines = [
        an_event("start"),
        a_step(0),
        an_event("checkpoint", "step-00000001", step=1, took_s=9.0, stall_s=0.5),
        a_step(1),
    ]

    assert summary_of(lines, a_mix()).longest_save_s == 0.5
