"""The record of a run's starts: the request, the planner of each step, and refusals."""

import os
import shutil
import tracemalloc

import orjson
import pytest
import yaml

from omniload.base.errors import ConfigError, StateError
from omniload.mix.config import BalanceConfig
from omniload.mix.run_record import (
    NO_FILE_NAME,
    PLACEMENT,
    RUN_RECORD_NAME,
    RUN_RECORD_VERSION,
    read_run_record,
    write_run_record,
)
from tests.support.plane.builders import a_mix


def a_file(folder, **changes):
    """Write a mix file that loads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(a_mix(**changes).model_dump(mode="json")), encoding="utf-8")
    return path


def test_a_record_gives_back_the_mix_and_the_ranks(tmp_path):
    mix_path = a_file(tmp_path)

    write_run_record(tmp_path / "run", mix_path, {"dp": 4, "tp": 2})

    life = read_run_record(tmp_path / "run").last
    assert life.mix() == a_mix()
    assert life.base_dir == tmp_path.resolve()
    assert list(life.sizes.items()) == [("dp", 4), ("tp", 2)]
    assert life.from_step == 0


def test_the_mix_of_a_life_is_the_one_it_was_started_with(tmp_path):
    mix_path = a_file(tmp_path, seed=1)
    write_run_record(tmp_path / "run", mix_path, {"dp": 1})

    a_file(tmp_path, seed=2)

    assert read_run_record(tmp_path / "run").last.mix().seed == 1


def test_the_mix_file_is_found_where_it_was_or_where_it_came_with_the_folder(tmp_path):
    mix_path, run = a_file(tmp_path / "job"), tmp_path / "job" / "run"
    write_run_record(run, mix_path, {"dp": 1})

    (tmp_path / "deep").mkdir()
    alone = run.rename(tmp_path / "deep" / "run")
    found_alone = read_run_record(alone).last.mix_path
    copy = a_file(tmp_path / "deep")
    found_beside = read_run_record(alone).last.mix_path
    # A start from there records both paths again.
    write_run_record(alone, copy, {"dp": 1}, from_step=1)
    both_moved = (tmp_path / "deep").rename(tmp_path / "other") / "run"

    assert found_alone == mix_path
    assert found_beside == copy
    assert read_run_record(both_moved).last.mix_path == tmp_path / "other" / "mix.yaml"


@pytest.fixture
def without_a_file(tmp_path):
    """Note a start of a mix in no file, whose paths start at a folder of data, with the run's folder in it."""
    sources = {
        name: {"type": "jsonl", "path": path}
        for name, path in {
            "a": "data/web/*.jsonl",
            "b": ["{x,y}-*.jsonl", "s3://bucket/*.jsonl"],
            "c": "odd[1].jsonl",
        }.items()
    }
    mix = a_mix(sources=sources, tokenizer={"type": "bytes"})

    def noted(job, *places):
        run = job / "run"
        for name in places:
            (job / name).parent.mkdir(parents=True, exist_ok=True)
            (job / name).touch()
        text = mix.model_dump_json()
        write_run_record(run, job / NO_FILE_NAME, {"dp": 1}, text=text)
        return run

    return noted


DATA = ("data/web/0.jsonl", "y-0.jsonl", "odd[1].jsonl")


def test_the_folder_of_a_mix_in_no_file_is_where_its_data_is(without_a_file, tmp_path):
    run = without_a_file(tmp_path / "job", *DATA)
    assert read_run_record(run).last.base_dir == tmp_path / "job"

    # A folder of that name, without the data, is no reason to believe that it is here.
    (tmp_path / "archive" / "data").mkdir(parents=True)
    alone = run.rename(tmp_path / "archive" / "run")
    assert read_run_record(alone).last.base_dir == tmp_path / "job"

    both = (tmp_path / "job").rename(tmp_path / "moved")
    alone = alone.rename(both / "run")
    assert read_run_record(alone).last.base_dir == both


def test_a_copy_with_its_data_is_read_there_though_the_first_one_stays(without_a_file, tmp_path):
    without_a_file(tmp_path / "job", *DATA)
    shutil.copytree(tmp_path / "job", tmp_path / "copy")

    assert read_run_record(tmp_path / "copy" / "run").last.base_dir == tmp_path / "copy"


def test_without_its_data_anywhere_a_mix_in_no_file_is_with_the_run(without_a_file, tmp_path):
    alone = without_a_file(tmp_path / "job").rename(tmp_path / "run")

    assert read_run_record(alone).last.base_dir == tmp_path


def test_a_file_that_is_called_as_a_mix_in_none_is_one(tmp_path):
    mix_path = a_file(tmp_path / "job").rename(tmp_path / "job" / NO_FILE_NAME)
    write_run_record(tmp_path / "job" / "run", mix_path, {"dp": 1})
    alone = (tmp_path / "job" / "run").rename(tmp_path / "run")

    assert read_run_record(alone).last.mix_path == mix_path
    mix_path.unlink()
    assert read_run_record(alone).last.mix_path == tmp_path / NO_FILE_NAME


def test_a_record_of_a_release_that_noted_no_absolute_place_is_read(tmp_path):
    run = tmp_path / "run"
    write_run_record(run, a_file(tmp_path), {"dp": 1})
    record = orjson.loads((run / RUN_RECORD_NAME).read_bytes())
    del record["lives"][0]["mix_at"]
    (run / RUN_RECORD_NAME).write_bytes(orjson.dumps(record))

    assert read_run_record(run).last.mix_path == tmp_path / "mix.yaml"


def test_a_life_keeps_how_rows_were_dealt(tmp_path):
    mix_path = a_file(tmp_path)
    balance = BalanceConfig(method="karmarkar_karp", linear=0.1 + 0.2, quadratic=1 / 3)

    write_run_record(tmp_path / "run", mix_path, {"dp": 2}, balance=balance)

    life = read_run_record(tmp_path / "run").last
    assert life.mix() == a_mix().model_copy(update={"balance": balance})


def test_the_balance_of_an_earlier_life_outlives_later_starts(tmp_path):
    mix_path = a_file(tmp_path)
    balance = BalanceConfig(linear=5.0)
    write_run_record(tmp_path / "run", mix_path, {"dp": 2}, balance=balance)

    write_run_record(tmp_path / "run", mix_path, {"dp": 2}, from_step=10)

    record = read_run_record(tmp_path / "run")
    assert record.life_at(9).balance == balance
    assert record.life_at(10).balance is None


def test_a_start_of_a_release_that_noted_no_placement_is_told_from_those_after_it(tmp_path):
    mix_path, run = a_file(tmp_path), tmp_path / "run"
    write_run_record(run, mix_path, {"dp": 2})
    record = orjson.loads((run / RUN_RECORD_NAME).read_bytes())
    del record["lives"][0]["placement"]
    (run / RUN_RECORD_NAME).write_bytes(orjson.dumps(record))

    write_run_record(run, mix_path, {"dp": 2}, from_step=10)

    assert [life.placement for life in read_run_record(run).lives] == [0, PLACEMENT]


def test_a_text_that_was_read_before_is_kept_though_the_file_was_edited(tmp_path):
    mix_path = a_file(tmp_path, seed=1)
    text = mix_path.read_text()
    a_file(tmp_path, seed=2)

    write_run_record(tmp_path / "run", mix_path, {"dp": 1}, text=text)

    assert read_run_record(tmp_path / "run").last.mix().seed == 1


def test_a_resumed_run_has_a_life_for_every_start(tmp_path):
    mix_path = a_file(tmp_path)
    for step, dp in ((0, 2), (10, 4), (25, 8)):
        write_run_record(tmp_path / "run", mix_path, {"dp": dp}, from_step=step)

    record = read_run_record(tmp_path / "run")

    assert [record.life_at(step).sizes["dp"] for step in (0, 9, 10, 24, 25, 900)] == [
        2,
        2,
        4,
        4,
        8,
        8,
    ]


def test_a_start_at_an_earlier_step_drops_the_lives_whose_work_was_lost(tmp_path):
    mix_path = a_file(tmp_path)
    for step, dp in ((0, 2), (10, 4), (20, 8), (10, 16)):
        write_run_record(tmp_path / "run", mix_path, {"dp": dp}, from_step=step)

    lives = read_run_record(tmp_path / "run").lives

    assert [(life.from_step, life.sizes["dp"]) for life in lives] == [(0, 2), (10, 16)]


def test_a_step_before_the_first_life_is_refused(tmp_path):
    write_run_record(tmp_path / "run", a_file(tmp_path), {"dp": 1}, from_step=5)

    with pytest.raises(StateError, match="begins at step 5, step 3 is before it"):
        read_run_record(tmp_path / "run").life_at(3)


def test_run_and_mix_may_be_moved_together(tmp_path):
    write_run_record(tmp_path / "a" / "run", a_file(tmp_path / "a"), {"dp": 1})

    (tmp_path / "a").rename(tmp_path / "b")

    life = read_run_record(tmp_path / "b" / "run").last
    assert life.mix_path == (tmp_path / "b" / "mix.yaml").resolve()


def test_nothing_unfinished_is_left_beside_the_record(tmp_path):
    write_run_record(tmp_path / "run", a_file(tmp_path), {"dp": 1})

    assert [path.name for path in (tmp_path / "run").iterdir()] == [RUN_RECORD_NAME]


def test_a_missing_mix_file_is_a_fault_of_the_input(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        write_run_record(tmp_path / "run", tmp_path / "no.yaml", {"dp": 1})


def test_a_folder_without_a_record_is_no_run(tmp_path):
    with pytest.raises(StateError, match=r"it has no run\.json; give the folder of a run"):
        read_run_record(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"3",
        b'{"version": 1}',
        b'{"version": 1, "lives": []}',
        b'{"version": 1, "lives": [{}]}',
        b'{"version": 1, "lives": [{"from_step": 0, "mix": "m", "text": "", "sizes": []}]}',
        b'{"version": 1, "lives": [{"from_step": "x", "mix": "m", "text": "", "sizes": {}}]}',
        b'{"version": 1, "lives": [{"from_step": 0, "mix": "m", "text": "", "sizes": {}, "balance": 3}]}',
        b'{"version": 1, "lives": [{"from_step": -1, "mix": "m", "text": "", "sizes": {}}]}',
        b'{"version": 1, "lives": [{"from_step": 1.5, "mix": "m", "text": "", "sizes": {}}]}',
        b'{"version": 1, "lives": [{"from_step": true, "mix": "m", "text": "", "sizes": {}}]}',
        b'{"version": 1, "lives": [{"from_step": 0, "mix": "m", "text": 3, "sizes": {}}]}',
        b'{"version": 1, "lives": [{"from_step": 0, "mix": "m", "mix_at": 3, "text": "", "sizes": {}}]}',
        b'{"version": 1, "lives": [{"from_step": 0, "mix": "m", "text": "", "sizes": {"dp": 0}}]}',
        b'{"version": 1, "lives": [{"from_step": 0, "mix": "m", "text": "", "sizes": {"dp": "2"}}]}',
        b'{"version": 1, "lives": [{"from_step": 0, "mix": "m", "text": "", "sizes": {"dp": 1e12}}]}',
        (
            b'{"version": 1, "lives": ['
            b'{"from_step": 0, "mix": "m", "text": "", "sizes": {}}, '
            b'{"from_step": 0, "mix": "m", "text": "", "sizes": {}}]}'
        ),
    ],
)
def test_a_damaged_record_is_refused_with_what_to_do(tmp_path, content):
    (tmp_path / RUN_RECORD_NAME).write_bytes(content)

    with pytest.raises(
        StateError, match=r"not the record of a run.*; expected what a launch writes"
    ):
        read_run_record(tmp_path)


def test_a_file_in_place_of_a_runs_folder_is_told_from_a_damaged_record(tmp_path):
    (tmp_path / "mix.yaml").write_text("version: 1\n")

    with pytest.raises(StateError, match=r"mix\.yaml is a file; expected the folder of a run"):
        read_run_record(tmp_path / "mix.yaml")


def test_a_record_of_another_version_is_refused(tmp_path):
    write_run_record(tmp_path, a_file(tmp_path / "m"), {"dp": 1})
    content = orjson.loads((tmp_path / RUN_RECORD_NAME).read_bytes())
    content["version"] = RUN_RECORD_VERSION + 1
    (tmp_path / RUN_RECORD_NAME).write_bytes(orjson.dumps(content))

    with pytest.raises(StateError, match="run state has version 2, this code reads 1"):
        read_run_record(tmp_path)


def test_a_record_written_by_the_first_release_is_read(tmp_path):
    text = yaml.safe_dump(a_mix().model_dump(mode="json"))
    life = {"from_step": 0, "mix": "../mix.yaml", "text": text, "sizes": {"dp": 2}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_RECORD_NAME).write_bytes(orjson.dumps({"version": 1, "lives": [life]}))

    record = read_run_record(tmp_path / "run")

    assert record.last.mix() == a_mix()
    assert record.last.mix_path == (tmp_path / "mix.yaml").resolve()


@pytest.mark.timeout(120)
def test_a_pipe_is_no_record_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / RUN_RECORD_NAME)

    with pytest.raises(StateError, match="is a pipe, not the record of a run"):
        read_run_record(tmp_path)


def test_a_record_larger_than_any_is_refused_before_it_is_held(tmp_path):
    with (tmp_path / RUN_RECORD_NAME).open("wb") as file:
        file.truncate(3 << 30)

    tracemalloc.start()
    try:
        with pytest.raises(StateError, match=r"run.json: holds 3221225472 bytes.*another run_dir"):
            read_run_record(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
