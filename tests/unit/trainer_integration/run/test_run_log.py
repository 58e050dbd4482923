"""The log of a run on disk."""

import math
import threading

import pytest

from omniload.base.errors import StateError
from omniload.mix.run_record import RUN_RECORD_NAME
from tests.support.trainer.run_lines import a_killed_run, a_step, an_event
from trainer_integration.run.run_log import (
    LOG_NAME,
    RunLog,
    figures_of,
    last_of_each_step,
    parse_line,
    read_log,
)
from trainer_integration.training.step_figures import StepFigures


def write(run, lines, **named):
    with RunLog(run, **named) as log:
        for line in lines:
            log.write(line)


def test_a_log_is_read_as_it_was_written(tmp_path):
    write(tmp_path, a_killed_run())

    assert read_log(tmp_path) == a_killed_run()


def test_what_ends_a_line_for_others_ends_none_here(tmp_path):
    said = an_event("exit", "rank 0: a key of a record is 'a\u2028b\x85c\x1cd'")
    write(tmp_path, [said, a_step(0)])

    assert read_log(tmp_path) == [said, a_step(0)]


def test_a_second_launch_appends(tmp_path):
    write(tmp_path, [a_step(0)])
    write(tmp_path, [a_step(1)])

    assert [line.step for line in read_log(tmp_path)] == [0, 1]


def test_a_fresh_log_drops_work_that_left_no_checkpoint(tmp_path):
    write(tmp_path, [a_step(0)])
    write(tmp_path, [an_event("start")], fresh=True)

    assert read_log(tmp_path) == [an_event("start")]


def test_a_torn_last_line_is_left_out(tmp_path):
    write(tmp_path, [a_step(0)])
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write('{"kind":"step","vers')

    assert read_log(tmp_path) == [a_step(0)]


def test_a_launch_after_a_torn_line_does_not_join_its_own_to_it(tmp_path):
    write(tmp_path, [a_step(0)])
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write('{"kind":"step","vers')

    write(tmp_path, [a_step(1)])

    assert read_log(tmp_path) == [a_step(0), a_step(1)]


def test_a_log_that_is_all_torn_begins_anew(tmp_path):
    (tmp_path / LOG_NAME).write_text('{"kind"')

    write(tmp_path, [a_step(0)])

    assert read_log(tmp_path) == [a_step(0)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    write(tmp_path, [a_step(0)])
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write("{}\n")
    write(tmp_path, [a_step(1)])

    with pytest.raises(StateError, match=r"log\.jsonl:2: not a line"):
        read_log(tmp_path)


def test_a_folder_without_a_log_is_no_run(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / RUN_RECORD_NAME).touch()

    with pytest.raises(
        StateError, match=rf"has no log.jsonl; there are runs in {tmp_path}/a; give"
    ):
        read_log(tmp_path)


def test_a_run_of_another_loop_is_told_as_that_with_the_commands_that_read_it(tmp_path):
    (tmp_path / RUN_RECORD_NAME).touch()

    with pytest.raises(StateError, match=r"For a loop of your own, .*`omniload mix audit` proves"):
        read_log(tmp_path)


def test_a_line_of_somebody_else_is_none_of_ours():
    with pytest.raises(ValueError, match="validation error"):
        parse_line('{"kind": "gossip"}')


def test_steps_that_were_run_again_count_as_they_were_run_last():
    lines = [a_step(0), a_step(1, loss=1.0), an_event("restart"), a_step(1, loss=2.0)]

    assert [(line.step, line.loss) for line in last_of_each_step(lines)] == [(0, 9.0), (1, 2.0)]


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_no_number_is_logged_all_the_same(tmp_path, loss):
    write(tmp_path, [a_step(0, loss=loss)])

    (line,) = read_log(tmp_path)
    assert repr(line.loss) == repr(loss)
    assert repr(parse_line(line.model_dump_json()).loss) == repr(loss)


def test_the_end_of_the_data_is_an_event(tmp_path):
    line = an_event("data_end", "after step 6", step=7)

    write(tmp_path, [line])

    assert read_log(tmp_path) == [line]


def test_lines_of_many_threads_stay_whole(tmp_path):
    with RunLog(tmp_path) as log:
        threads = [
            threading.Thread(
                target=lambda t=t: [log.write(a_step(100 * t + i)) for i in range(100)]
            )
            for t in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [line.step for line in last_of_each_step(read_log(tmp_path))] == list(range(400))


def test_figures_of_a_step_hold_evaluations_flops_and_the_load_of_each_expert():
    line = a_step(
        3,
        seconds=2.0,
        model_flops=6e9,
        mfu=0.4,
        evaluation={"law": 2.5},
        expert_slots=(30, 10),
    )

    found = figures_of(line)

    assert found["model_flops_per_s"] == 3e9
    assert (found["mfu"], found["evaluation/law"]) == (0.4, 2.5)
    assert (found["expert_load/0"], found["expert_load/1"]) == (1.5, 0.5)
    assert not figures_of(a_step(3)).keys() & {"mfu", "model_flops_per_s", "expert_load/0"}


def test_each_number_that_a_step_tells_of_the_model_is_a_figure_by_its_name():
    told = {
        name: float(n) for n, name in enumerate(StepFigures.model_fields) if name != "expert_slots"
    }

    found = figures_of(a_step(3, **told))

    assert {name: found[name] for name in told} == told
