"""A mix file is edited and saved while a run continues, and the run adopts the file's settings."""

import threading
import time

import pytest
import yaml

import omniload
from omniload.base.errors import ConfigError
from omniload.commands.edits import pulse, watch
from omniload.mix.config import load_mix
from omniload.mix.edits.edits_file import EDITS_NAME, read_history
from omniload.mix.run_record import write_run_record
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.mix_commands import a_mix_file, json_of, run_mix

WAIT_S = 120.0


@pytest.fixture
def mix_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    path = a_mix_file(tmp_path, rows=6, micro_rows=1)
    mix = yaml.safe_load(path.read_text())
    mix["runtime"]["prefetch_steps"] = 2
    path.write_text(yaml.safe_dump(mix))
    write_texts(tmp_path / "books.jsonl", [f"book {i} " * (i % 9 + 1) for i in range(40)])
    return path


def with_weights(path, weights, **sources):
    """Return the text of a mix file with other weights and further sources."""
    mix = yaml.safe_load(path.read_text())
    mix["mix"]["stages"] = [{"from_step": 0, "weights": weights}]
    mix["sources"] |= sources
    return yaml.safe_dump(mix)


def taken_until(loader, is_so, beside):
    """Take batches until a condition is true; return the last batch.

    Code that watches in the background continues meanwhile.
    """
    until_s = time.monotonic() + WAIT_S
    while True:
        batch = loader.next_batch()
        if is_so():
            return batch
        assert beside.is_alive()
        assert time.monotonic() < until_s


def edits_of(run, path):
    return [edit.change.kind for edit in read_history(run, path).edits]


def test_each_save_is_followed_and_a_faulty_or_half_written_one_changes_nothing(
    mix_path, tmp_path, monkeypatch
):
    run, found, base = tmp_path / "run", [], load_mix(mix_path)[0]
    told, fault_of = threading.Event(), watch._fault_of
    monkeypatch.setattr(watch, "_fault_of", lambda error: (told.set(), fault_of(error))[1])
    file = (
        tmp_path / "edited.yaml"
    )  # a copy, because every start records the contents of the run's own file
    file.write_text(mix_path.read_text())
    whole = with_weights(
        file, {"ids": 1, "text": 3, "books": 4}, books={"type": "jsonl", "path": "books.jsonl"}
    )
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        loader.next_batch()
        beside = threading.Thread(target=lambda: found.append(run_mix("watch", run, file)))
        beside.start()
        file.write_text(with_weights(file, {"ids": 1, "text": 3}))
        taken_until(loader, (run / EDITS_NAME).exists, beside)
        # As an editor saves it: emptied, the first half, then all of it under another name. On a busy machine the
        # pauses may last as long as the time after which a file counts as saved.
        with monkeypatch.context() as saving:
            saving.setattr(watch, "STILL_S", WAIT_S)
            file.write_text("")
            file.write_text(whole[: len(whole) // 2])
            (tmp_path / "new.yaml").write_text(whole)
            (tmp_path / "new.yaml").replace(file)
        batch = taken_until(loader, lambda: edits_of(run, base) == ["set", "add"], beside)
        file.write_text(whole.replace("ids: 1", "ids: -1"))
        batch = taken_until(loader, told.is_set, beside)
        assert edits_of(run, base) == ["set", "add"]
        while not batch.tokens_by_source.get("books"):
            batch = loader.next_batch()
    # Set only now, because a plane on a busy machine is sometimes silent for as long, and the watch would end.
    monkeypatch.setattr(pulse, "_GONE_S", 3.0)
    beside.join(WAIT_S)

    (result,) = found
    assert result.exit_code == 0
    assert "edited.yaml: set ids=1 text=3" in result.output
    assert "add books --weight 4" in result.output
    assert "holds from step" in result.output
    assert result.stderr.count("not applied, the run goes on with what it has") == 1
    assert "edited.yaml:" in result.stderr.partition("not applied")[2]
    assert "has ended: it was silent for 3 s; " in result.stderr
    history = read_history(run, base)
    shares = history.shares_at(history.edits[-1].step)
    assert shares == pytest.approx({"ids": 1 / 8, "text": 3 / 8, "books": 4 / 8})


def test_a_save_is_of_the_stage_that_ranks_are_in_however_far_plans_are_ahead(mix_path, tmp_path):
    """Earlier, the save was refused because of the ramp of a later stage, or reported that its own stage was over."""
    run, mix = tmp_path / "run", yaml.safe_load(mix_path.read_text())
    mix["mix"]["stages"] = [
        {"from_step": 0, "weights": {"ids": 1, "text": 1}},
        {"from_step": 20, "ramp_steps": 10, "weights": {"ids": 1, "text": 2}},
    ]
    mix_path.write_text(yaml.safe_dump(mix))
    mix["mix"]["stages"][0]["weights"]["text"] = 3
    file = tmp_path / "edited.yaml"
    file.write_text(yaml.safe_dump(mix))
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=40) as loader:
        while json_of("show", run)["next_step"] <= 20:
            loader.next_batch()
            assert loader.next_step < 20
        step, said = loader.next_step, json_of("watch", run, file, "--once")

    assert (said["asked"], said["over"]) == (["set ids=1 text=3"], [])
    assert said["edits"][0]["edit"]["step"] == step
    assert said["edits"][0]["after"] == {"ids": 0.25, "text": 0.75}


def test_a_file_is_applied_once_to_a_run_at_rest_and_what_may_not_change_is_told_with_its_line(
    mix_path, tmp_path
):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        loader.next_batch()
    file = tmp_path / "edited.yaml"
    file.write_text(with_weights(mix_path, {"ids": 9, "text": 1}))

    said = json_of("watch", run, file, "--once")

    assert said["asked"] == ["set ids=9 text=1"]
    assert [edit["edit"]["revision"] for edit in said["edits"]] == [1]
    assert json_of("watch", run, file, "--once") == {
        "asked": [],
        "edits": [],
        "later": [],
        "over": [],
        "scheduled": [],
    }
    file.write_text(file.read_text().replace("seed: ", "seed: 9"))
    result = run_mix("watch", run, file, "--once")
    assert isinstance(result.exception, ConfigError)
    line = 1 + next(i for i, text in enumerate(file.read_text().splitlines()) if "seed: 9" in text)
    assert f"{file}:{line}: seed is" in str(result.exception)
    assert "put it back, or start a new run" in str(result.exception)
    own = run_mix("watch", run, mix_path, "--once")
    assert isinstance(own.exception, ConfigError)
    assert "a resume needs it as it was; copy it" in str(own.exception)


def test_other_spellings_of_the_files_of_a_run_change_nothing_and_another_file_is_refused(
    mix_path, tmp_path
):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        loader.next_batch()
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(tmp_path)
    mix = yaml.safe_load(mix_path.read_text())
    (name, source), *_ = mix["sources"].items()
    own = source["path"]
    for spelling in (f"../{own}", f"link/{own}", str(tmp_path / "elsewhere" / ".." / own)):
        source["path"] = spelling
        others = {
            key: each | {"path": f"link/{each['path']}"}
            for key, each in mix["sources"].items()
            if key != name
        }
        file = elsewhere / "live.yaml"
        file.write_text(yaml.safe_dump(mix | {"sources": mix["sources"] | others}))

        assert json_of("watch", run, file, "--once")["asked"] == []

    source["path"] = own
    file.write_text(yaml.safe_dump(mix))
    told = str(run_mix("watch", run, file, "--once").exception)
    assert f"is '{elsewhere / own}' in the file, and '{tmp_path / own}' in the run" in told
    assert "keep it beside the mix file of the run, or write them absolute" in told


def test_a_tokenizer_is_the_one_of_the_run_however_its_path_is_spelled(mix_path, tmp_path):
    mix, run, file = yaml.safe_load(mix_path.read_text()), tmp_path / "run", tmp_path / "live.yaml"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        loader.next_batch()
    mix_path.write_text(yaml.safe_dump(mix | {"tokenizer": {"type": "bpe", "path": "tok.json"}}))
    write_run_record(run, mix_path, {"dp": 1})

    def said(path):
        file.write_text(yaml.safe_dump(mix | {"tokenizer": {"type": "bpe", "path": path}}))
        return run_mix("watch", run, file, "--once")

    assert "the run is as it says" in said(f"../{tmp_path.name}/tok.json").output
    assert "tokenizer.path is 'other.json' in the file, and 'tok.json'" in str(
        said("other.json").exception
    )


def test_a_change_of_a_stage_that_is_over_is_told_with_its_line(mix_path, tmp_path):
    run, file = tmp_path / "run", tmp_path / "edited.yaml"
    mix = yaml.safe_load(mix_path.read_text())
    weights = {"ids": 1, "text": 1}
    mix["mix"]["stages"] = [
        {"from_step": 0, "weights": weights},
        {"from_step": 1, "weights": weights},
    ]
    mix_path.write_text(yaml.safe_dump(mix))
    with omniload.open(mix_path, run_dir=run, arrays="numpy", steps=3) as loader:
        assert len(list(loader)) == 3
    mix["mix"]["stages"][0] = {"from_step": 0, "weights": {"ids": 9, "text": 1}}
    file.write_text(yaml.safe_dump(mix))

    told = run_mix("watch", run, file, "--once")

    assert told.exit_code == 0
    assert "the run is as it says" in told.output
    line = 1 + next(
        i for i, text in enumerate(file.read_text().splitlines()) if "from_step: 0" in text
    )
    assert f"warning: {file}:{line}: mix.stages.0 is over, of steps 0 to 0" in " ".join(
        told.output.split()
    )


def test_a_save_holds_up_to_the_step_that_a_change_was_set_for_before(mix_path, tmp_path):
    run, file = tmp_path / "run", tmp_path / "live.yaml"
    with omniload.open(mix_path, run_dir=run, arrays="numpy") as loader:
        loader.next_batch()
        json_of("set", run, "ids=9", "text=1", "--at", 20)
        file.write_text(with_weights(mix_path, {"ids": 1, "text": 3}))
        said = json_of("watch", run, file, "--once")
        told = run_mix("watch", run, file, "--once").output
        while loader.next_step < 22:
            loader.next_batch()

    assert said["asked"] == ["set ids=1 text=3"]
    (scheduled,) = said["scheduled"]
    assert f"{file}:" in scheduled
    assert "edit 1 (set ids=9 text=1) is set for step 20, and stays" in scheduled
    assert "warning: " in told
    assert "the run is as it says" in told
    history = read_history(run, load_mix(mix_path)[0])
    shares = [history.shares_at(step)["ids"] for step in (said["edits"][0]["edit"]["step"], 19, 20)]
    assert shares == pytest.approx([0.25, 0.25, 0.9])
