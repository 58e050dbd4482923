"""A shard of a job is left out by the command line while it runs, at rest, and on Ray."""

import json
import os
import signal

import pytest
import yaml

import omniload
from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.base.errors import ConfigError, StateError
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.mix.edits.edits_file import EDITS_NAME, read_history
from omniload.mix.run_record import write_run_record
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.edited_runs import AHEAD, a_spec, replayed, taken_by
from tests.support.plane.edits.mix_commands import a_mix_file, json_of, run_mix


@pytest.fixture
def mix_path(tmp_path, monkeypatch):
    """A mix of two sources, of two and three shards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = a_mix_file(tmp_path, rows=6, micro_rows=1)
    for shard in (1, 2):
        texts = [f"shard {shard} text {i} " * (i % 5 + 1) for i in range(60)]
        write_texts(tmp_path / "text" / f"{shard}.jsonl", texts)
    return path


@pytest.fixture
def run_dir(tmp_path, mix_path):
    write_run_record(tmp_path / "run", mix_path, {"dp": 1})
    return tmp_path / "run"


def shards_in(run, step):
    samples = json_of("audit", run, "--step", step)["samples"]
    return {"/".join(sample["shard"].split("/")[-2:]) for sample in samples}


@pytest.mark.parametrize("readers", [None, {"text": 3}])
def test_a_shard_of_a_run_of_threads_is_left_out_and_comes_back(
    mix_path, run_dir, tmp_path, readers
):
    with LocalPlane(a_spec(mix_path, run_dir=run_dir, readers=readers)) as plane:
        client = Client(plane.handle(0))
        digests = taken_by([client], 3)
        taken = json_of("skip", run_dir, "--shard", "text/1.jsonl")
        again = run_mix("skip", run_dir, "--shard", "text/1.jsonl")
        digests += taken_by([client], 4 * AHEAD)
        later = json_of("skip", run_dir, "--shard", "1.parquet", "--source", "ids", "--at", 25)
        digests += taken_by([client], 30 - len(digests))
        saved = json.loads(json.dumps(client.state_dict()))
        undone = json_of("undo", run_dir)
        digests += taken_by([client], 4 * AHEAD)
        whole = client.state_dict()
        digests += taken_by([client], 2 * AHEAD)

    edit, step = taken["edit"], taken["edit"]["step"]
    assert 3 <= step == taken["planned"] <= 3 + 2 * AHEAD
    assert edit["change"] == {
        "kind": "skip_shard",
        "file": str(tmp_path / "text" / "1.jsonl"),
        "source": "text",
        "number": 1,
        "of": 3,
    }
    assert "left out already" in str(again.exception)
    assert (later["edit"]["step"], undone["edit"]["undoes"]) == (25, 2)
    # A record that has begun is drawn to its end, and drawn pieces may wait for a row.
    back = undone["edit"]["step"]
    drawn = [shards_in(run_dir, at) for at in range(len(digests))]
    assert "text/1.jsonl" in set.union(*drawn[:step])
    assert "text/1.jsonl" not in set.union(*drawn[step + 2 :])
    assert "ids/1.parquet" in set.union(*drawn[step + 2 : 25])
    assert "ids/1.parquet" not in set.union(*drawn[27:back])
    assert "ids/1.parquet" in set.union(*drawn[back:])
    assert {"text/0.jsonl", "text/2.jsonl", "ids/0.parquet"} <= set.union(*drawn[step + 2 :])
    # The edits alone give the same steps again, from the start and from a state, in this folder or another.
    history = read_history(run_dir, load_mix(mix_path)[0])
    assert replayed(a_spec(mix_path, edits=history.edits), len(digests)) == digests
    at = saved["step"]
    assert (
        replayed(a_spec(mix_path, run_dir=run_dir, state=saved), len(digests) - at) == digests[at:]
    )
    moved = a_spec(mix_path, run_dir=tmp_path / "other", state=whole)
    assert replayed(moved, 2 * AHEAD) == digests[-2 * AHEAD :]
    assert json.loads((tmp_path / "other" / EDITS_NAME).read_bytes())["version"] == 3


def test_a_shard_that_is_left_out_is_shown_and_told_apart(mix_path, run_dir, tmp_path):
    with LocalPlane(a_spec(mix_path, run_dir=run_dir, num_steps=20)) as plane:
        client = Client(plane.handle(0))
        taken_by([client], 2)
        said = run_mix("skip", run_dir, "--shard", "text/2.jsonl")
        taken_by([client], 18)

    assert said.exit_code == 0
    assert "text/2.jsonl, one of 3 shards of source text" in said.output.replace("\n", " ")
    assert f"skip --shard {tmp_path}/text/2.jsonl --source text" in run_mix("show", run_dir).output
    shown = json_of("show", run_dir)
    assert [edit["change"]["number"] for edit in shown["edits"]] == [2]


@pytest.mark.parametrize("at_rest", [False, True])
def test_what_is_no_shard_or_several_is_refused_and_the_run_goes_on(mix_path, run_dir, at_rest):
    asked = (
        (("--shard", "text/9.jsonl"), "no shard of 2 sources is 'text/9.jsonl'"),
        (("--shard", "text/1.jsonl", "--source", "ids"), "no shard of source 'ids'"),
        (("--shard", "1.jsonl", "--source", "txt"), "did you mean 'text'"),
        (("--shard", "1.jsonl", "--steps", "1:2"), "one of them"),
        (("--shard", ""), "one of them"),
        ((), "one of them"),
    )
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        digests = taken_by([client], 3)
        if not at_rest:
            refuse(run_dir, asked)
            refuse(run_dir, [(("--shard", "1.jsonl", "--at", 1), "first step that can be changed")])
        digests += taken_by([client], 12)
    if at_rest:
        refuse(run_dir, asked)

    assert digests == replayed(a_spec(mix_path), 15)
    assert not (run_dir / EDITS_NAME).exists()


def refuse(run_dir, asked):
    for arguments, said in asked:
        result = run_mix("skip", run_dir, *arguments)
        assert isinstance(result.exception, ConfigError), (arguments, result.exception)
        assert said in str(result.exception)


def test_a_run_at_rest_goes_on_without_a_shard_from_a_step_that_it_was_trained_on(
    mix_path, tmp_path
):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=1) as loader:
        states = []
        for _ in range(12):
            states.append(loader.state_dict())
            loader.next_batch()
    audited = [json_of("audit", run, "--step", step)["samples"] for step in range(12)]

    said = run_mix("skip", run, "--shard", "ids/1.parquet", "--at", 6)
    taken = json_of("skip", run, "--shard", "0.jsonl", "--at", 6)
    refused = run_mix("skip", run, "--shard", "ids/0.parquet", "--at", 8)
    still = json_of("audit", run, "--step", 7)["samples"]  # of the run, before it resumes
    with pytest.raises(StateError, match="checkpoint of step 6 or before"):
        omniload.open(mix_path, run_dir=run, arrays="numpy", state=states[8])
    mistaken = run_mix("undo", run)
    json_of("undo", run)
    with omniload.open(mix_path, run_dir=run, arrays="numpy", state=states[8]) as loader:
        loader.next_batch()
        loader.next_batch()
    taken_back = json_of("audit", run, "--step", 9)[
        "samples"
    ]  # after the journal of the previous life
    for shard in ("ids/1.parquet", "0.jsonl"):
        run_mix("skip", run, "--shard", shard, "--at", 6)
    with omniload.open(
        mix_path, run_dir=run, arrays="numpy", prefetch_steps=1, state=states[4], steps=14
    ) as loader:
        list(loader)

    assert (taken["edit"]["step"], taken["edit"]["revision"]) == (6, 2)
    assert "go on from a state of step 6 or before" in said.output.replace("\n", " ")
    assert "the skip held at no step" in mistaken.output.replace("\n", " ")
    assert taken_back == audited[9]
    assert "last of 2 shards" in str(refused.exception)
    assert still == audited[7]
    again = [json_of("audit", run, "--step", step)["samples"] for step in range(4, 14)]
    assert again[:2] == audited[4:6]
    kept = {"/".join(s["shard"].split("/")[-2:]) for samples in again[4:] for s in samples}
    assert kept == {"text/1.jsonl", "text/2.jsonl", "ids/0.parquet"}
    # Records of the other shards keep their order: each record of text is at its old position, none twice.
    pieces = [
        (s["position"], s["sub"], s["first_token"])
        for samples in again
        for s in samples
        if s["source"] == "text"
    ]
    assert len({*pieces}) == len(pieces)


def test_a_run_of_which_an_edit_leaves_a_source_without_samples_says_how_it_goes_on(
    mix_path, run_dir
):
    mix = yaml.safe_load(mix_path.read_text())
    for part, lang in enumerate(("en", "de")):
        lines = [json.dumps({"text": f"{lang} {i}", "lang": lang}) + "\n" for i in range(40)]
        mix_path.with_name(f"parted-{part}.jsonl").write_text("".join(lines))
    mix["sources"]["text"] |= {"path": "parted-*.jsonl", "where": {"lang": "en"}}
    mix_path.write_text(yaml.safe_dump(mix))
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        taken_by([client], 2)
        state = client.state_dict()
        json_of("skip", run_dir, "--shard", "parted-0.jsonl")
        with pytest.raises(ConfigError, match=r"outside the files .* retire RUN text\), with --at"):
            taken_by([client], 40)

    json_of("retire", run_dir, "text", "--at", state["step"])

    with LocalPlane(a_spec(mix_path, run_dir=run_dir, state=state)) as plane:
        assert len(taken_by([Client(plane.handle(0))], 4)) == 4


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_two_ranks_of_a_plane_of_actors_go_on_without_a_shard_though_loaders_are_killed(
    mix_path, run_dir
):
    pytest.importorskip("ray")
    spec = a_spec(mix_path, dp=2, run_dir=run_dir, readers={"text": 2})
    with open_plane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        digests = taken_by(clients, 3)
        taken = json_of("skip", run_dir, "--shard", "text/1.jsonl")
        digests += taken_by(clients, 2 * AHEAD)
        json_of("skip", run_dir, "--shard", "ids/0.parquet")
        pids = plane.pids()
        for role in ("loader-0", "loader-1", "constructor-0"):
            os.kill(pids[role], signal.SIGKILL)
        digests += taken_by(clients, 3 * AHEAD)
        os.kill(plane.pids()["planner"], signal.SIGKILL)
        digests += taken_by(clients, 3 * AHEAD)
        with pytest.raises(ConfigError, match=r"no shard of 2 sources is 'text/9\.jsonl'"):
            json_of("skip", run_dir, "--shard", "text/9.jsonl")
        json_of("undo", run_dir)
        digests += taken_by(clients, 3 * AHEAD)

    history = read_history(run_dir, load_mix(mix_path)[0])
    assert [edit.change.kind for edit in history.edits] == ["skip_shard", "skip_shard", "undo"]
    assert replayed(a_spec(mix_path, edits=history.edits), len(digests)) == digests
    step = taken["edit"]["step"]
    drawn = [shards_in(run_dir, at) for at in range(len(digests))]
    assert "text/1.jsonl" not in set.union(*drawn[step + 2 :])
    assert "ids/0.parquet" in set.union(*drawn[-2 * AHEAD :])
