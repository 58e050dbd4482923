"""``omniload mix diff``: two files, or two runs."""

import pytest
import yaml

from omniload.mix.config import load_mix
from omniload.mix.edits.history import History
from omniload.mix.journal.reading import read_journal
from omniload.mix.progress import state_json_at
from tests.support.plane.edits.mix_commands import a_mix_file, a_run, json_of, run_mix


@pytest.fixture
def mix_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return a_mix_file(tmp_path)


def changed(mix_path, change):
    content = yaml.safe_load(mix_path.read_text())
    change(content)
    other = mix_path.with_name("other.yaml")
    other.write_text(yaml.safe_dump(content))
    return other


def test_files_are_compared_by_key_and_by_the_first_step_of_other_shares(mix_path):
    def change(content):
        content["pack"]["lookahead_rows"] = 7
        content["runtime"]["prefetch_steps"] = 5
        stage = {"from_step": 30, "weights": {"ids": 3, "text": 1}, "ramp_steps": 10}
        content["mix"]["stages"].append(stage)

    found = json_of("diff", mix_path, changed(mix_path, change))
    shown = run_mix("diff", mix_path, changed(mix_path, change)).stdout

    differ = {each["key"]: each["other"] for each in found["keys"]}
    assert differ == {"pack.lookahead_rows": 7, "runtime.prefetch_steps": 5}
    assert found["taken_at_next_start"] == ["runtime.prefetch_steps"]
    assert "of the keys a run takes at its next start: runtime.prefetch_steps\n" in shown
    assert found["shares_differ_from_step"] == 30
    assert "shares differ from step 30 on" in shown
    assert found["steps_compared"] == 0
    same = json_of("diff", mix_path, mix_path)
    assert (same["keys"], same["shares_differ_from_step"]) == ([], None)
    assert run_mix("diff", mix_path, mix_path).stdout.splitlines() == [
        "no key differs",
        "shares are the same in every step",
    ]


def test_runs_are_compared_by_their_data_and_the_first_step_of_other_samples(mix_path, tmp_path):
    def change(content):
        content["mix"]["stages"].append({"from_step": 5, "weights": {"ids": 3, "text": 1}})

    a_run(tmp_path / "one", mix_path, steps=12)
    a_run(tmp_path / "again", mix_path, dp=1, steps=9)
    a_run(tmp_path / "other", changed(mix_path, change), steps=12)
    history = History(load_mix(mix_path)[0])
    state = state_json_at(history, *read_journal(tmp_path / "one" / "journal.jsonl", 7), 7)
    a_run(tmp_path / "later", mix_path, state=state)
    a_run(tmp_path / "early", mix_path, steps=3)

    again = json_of("diff", tmp_path / "one", tmp_path / "again")
    later = json_of("diff", tmp_path / "later", tmp_path / "one")
    other = json_of("diff", tmp_path / "one", tmp_path / "other")

    assert (again["steps_compared"], again["samples_differ_from_step"]) == (9, None)
    # Its journal begins at step 7, with the state from which the run in another folder resumed.
    assert (later["steps_compared"], later["fingerprint"]) == (5, [])
    assert later["samples_differ_from_step"] is None
    apart = run_mix("diff", tmp_path / "early", tmp_path / "later").stdout
    assert "no step is in both journals, so no samples were compared\n" in apart
    assert other["samples_differ_from_step"] == other["shares_differ_from_step"] == 5
    assert [each["key"] for each in other["fingerprint"]] == ["mix"]


def amounts(ids, text):
    def change(content):
        content["version"] = 2
        content["mix"] = {"amounts": {"ids": ids, "text": text}}

    return change


def test_amounts_are_compared_as_amounts_and_never_as_shares(mix_path, tmp_path):
    one = changed(mix_path, amounts({"epochs": 2}, {"tokens": 1000}))
    one = one.rename(tmp_path / "one.yaml")
    other = changed(mix_path, amounts({"samples": 5}, {"tokens": 1000}))

    found = json_of("diff", one, other)

    assert found["amounts"] == {"ids": ["2 epochs", "5 samples"]}
    assert (found["shares_differ_from_step"], found["shares"]) == (None, {})
    assert "amounts differ: ids 2 epochs and 5 samples" in run_mix("diff", one, other).stdout
    assert "amounts are the same" in run_mix("diff", one, one).stdout
    weighed = json_of("diff", mix_path, other)
    assert weighed["amounts"] == {"ids": [None, "5 samples"], "text": [None, "1,000 tokens"]}
    assert weighed["shares"] == {}
    shown = run_mix("diff", mix_path, other).stdout
    assert "the second gives amounts of sources, the other weights" in shown
    assert "shares are the same" not in shown


def test_runs_are_compared_by_the_files_that_are_left_out(mix_path, tmp_path):
    for name in ("one", "other"):
        a_run(tmp_path / name, mix_path, steps=4)
    step = json_of("skip", tmp_path / "other", "--shard", "ids/1.parquet")["edit"]["step"]

    found = json_of("diff", tmp_path / "one", tmp_path / "other")
    shown = run_mix("diff", tmp_path / "one", tmp_path / "other").stdout

    assert found["left_out_differs_from_step"] == step
    assert found["left_out"] == {"ids": [None, "1"]}
    assert f"from step {step} on other files are left out: of ids none and 1.parquet" in shown
    assert json_of("diff", tmp_path / "one", tmp_path / "one")["left_out"] == {}


def test_what_is_not_there_may_have_been_meant_as_a_file_or_a_run(mix_path, tmp_path):
    said = str(run_mix("diff", mix_path, tmp_path / "gone").exception)

    assert "gone: no such file or folder; give a mix file or the folder of a run" in said
