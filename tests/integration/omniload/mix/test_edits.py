"""The mix of a job is changed while it runs, by the command line: threads, a run at rest, and Ray."""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import yaml

import omniload
from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.actors.status_file import STATUS_NAME, read_status
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.writing import write_whole
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.commands.edits import asking, at_rest
from omniload.commands.edits.asking import change_mix
from omniload.machine.plans import fetch_pace
from omniload.mix.config import load_mix
from omniload.mix.edits.answers import ANSWER_NAME, REQUEST_NAME, EditAnswer, EditRequest
from omniload.mix.edits.edit import SetWeights, Undo
from omniload.mix.edits.edits_file import EDITS_NAME, read_history
from omniload.mix.run_record import write_run_record
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.edited_runs import AHEAD, a_spec, replayed, taken_by
from tests.support.plane.edits.mix_commands import a_mix_file, json_of, run_mix
from tests.support.trainer.run_lines import a_step
from trainer_integration.report.proof import prove
from trainer_integration.run.run_log import RunLog


@pytest.fixture
def mix_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return a_mix_file(tmp_path, rows=6, micro_rows=1)


@pytest.fixture
def run_dir(tmp_path, mix_path):
    write_run_record(tmp_path / "run", mix_path, {"dp": 1})
    return tmp_path / "run"


@pytest.fixture
def books(tmp_path):
    """A file that declares another source."""
    write_texts(tmp_path / "more" / "books.jsonl", [f"book {i} " * (i % 9 + 1) for i in range(40)])
    path = tmp_path / "more" / "books.yaml"
    source = {"type": "jsonl", "path": "books.jsonl", "tags": {"domain": "prose"}}
    path.write_text(yaml.safe_dump({"sources": {"books": source}}), encoding="utf-8")
    return path


def test_a_run_of_threads_is_changed_by_the_command_line_and_goes_on_elsewhere(
    mix_path, run_dir, books, tmp_path
):
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane:
        client = Client(plane.handle(0))
        digests = taken_by([client], 3)

        shown = json_of("set", run_dir, "ids=3", "text=1")
        digests += taken_by([client], 2 * AHEAD)
        added = json_of("add", run_dir, "books", "--from", books, "--weight", 4, "--at", 20)
        digests += taken_by([client], 3 * AHEAD)
        saved = json.loads(json.dumps(client.state_dict()))
        retired = json_of("retire", run_dir, "text")
        digests += taken_by([client], 2 * AHEAD)
        json_of("undo", run_dir)
        digests += taken_by([client], 2 * AHEAD)
        last = [client.next_batch() for _ in range(AHEAD)]
        whole = client.state_dict()

    # Steps that were handed out keep their mix; the first step that was not planned has the new one.
    assert 3 <= shown["edit"]["step"] == shown["planned"] <= 3 + 2 * AHEAD
    assert shown["after"] == {"ids": 0.75, "text": 0.25}
    assert added["after"] == {"ids": 0.375, "text": 0.125, "books": 0.5}
    assert retired["after"] == pytest.approx({"ids": 3 / 7, "text": 0, "books": 4 / 7})
    batch = last[-1]
    assert list(batch.tokens_by_source) == ["ids", "text", "books"]
    assert all(any(b.tokens_by_source[name] for b in last) for name in batch.tokens_by_source)
    assert batch.source_tags == {"books": {"domain": "prose"}}
    history = read_history(run_dir, load_mix(mix_path)[0])
    assert [edit.change.kind for edit in history.edits] == ["set", "add", "retire", "undo"]
    # The edits alone give the same steps again, from the start and from a state.
    assert replayed(a_spec(mix_path, edits=history.edits), len(digests)) == digests
    at = saved["step"]
    assert at == 3 + 5 * AHEAD
    again = a_spec(mix_path, run_dir=run_dir, state=saved)
    assert replayed(again, len(digests) - at) == digests[at:]
    # A state alone brings the edits that apply by then to another folder.
    moved = a_spec(mix_path, run_dir=tmp_path / "other", state=whole)
    with LocalPlane(moved) as plane, Client(plane.handle(0)) as client:
        assert client.next_batch().source_tags == batch.source_tags
    assert replayed(moved, 2) == replayed(a_spec(mix_path, run_dir=run_dir, state=whole), 2)
    assert (tmp_path / "other" / EDITS_NAME).exists()


def test_steps_of_an_edited_run_are_audited_and_shown(mix_path, run_dir, books):
    spec = a_spec(mix_path, run_dir=run_dir, num_steps=40)
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        taken_by([client], 2)
        step = json_of("add", run_dir, "books", "--from", books, "--weight", 2)["edit"]["step"]
        json_of("set", run_dir, "text=0")
        taken_by([client], 38)

    shown = json_of("show", run_dir)
    samples = json_of("audit", run_dir, "--step", step + 20)["samples"]
    before = json_of("audit", run_dir, "--step", step - 1)["samples"]

    assert [source["name"] for source in shown["sources"]] == ["ids", "text", "books"]
    assert [edit["revision"] for edit in shown["edits"]] == [1, 2]
    assert {sample["source"] for sample in samples} == {"ids", "books"}
    assert {sample["source"] for sample in before} == {"ids", "text"}


def test_a_run_at_rest_is_changed_from_the_first_step_that_it_never_planned(mix_path, run_dir):
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane:
        client = Client(plane.handle(0))
        digests = taken_by([client], 6)
        saved = client.state_dict()

    taken = json_of("set", run_dir, "ids=9")
    step = taken["edit"]["step"]

    assert step >= 6
    json_of("set", run_dir, "ids=4")
    told = run_mix("undo", run_dir).output + run_mix("show", run_dir).output
    assert f"edit 3 undoes edit 2 (set ids=4), and holds from step {step}" in told
    assert f"edit 3, from step {step} on: undo of edit 2" in told
    spec = a_spec(mix_path, run_dir=run_dir, state=saved)
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        digests += taken_by([client], 20)
    unedited = replayed(a_spec(mix_path), len(digests))
    assert digests[:step] == unedited[:step]
    assert digests[step:] != unedited[step:]


class TestPlaneOfAnotherHost:
    """Its lock may not be visible here, and its clock may differ."""

    HOUR_S = 3_600.0

    @pytest.fixture
    def write(self, mix_path, run_dir, monkeypatch):
        """Write the status of a run at rest, from a host whose clock is some seconds ahead."""
        monkeypatch.setattr(at_rest, "UP_S", 0.5)
        with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as c:
            taken_by([c], 2)
        last = read_status(run_dir).model_copy(update={"host": "elsewhere", "has_ended": False})

        def written(ahead_s):
            now = last.model_copy(update={"written_at": time.time() + ahead_s})
            write_whole(run_dir / STATUS_NAME, now.model_dump_json().encode())

        return written

    @pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
    def test_one_whose_status_changes_is_up_whatever_its_clock(
        self, write, run_dir, monkeypatch, ahead_s
    ):
        write(ahead_s)
        monkeypatch.setattr(at_rest, "UP_S", 60.0)  # it ends with the first change
        monkeypatch.setattr(at_rest.time, "sleep", lambda _: write(ahead_s))

        result = run_mix("set", run_dir, "ids=9")

        assert isinstance(result.exception, UnavailableError)
        assert "on elsewhere, and its lock is not seen here" in str(result.exception)

    @pytest.mark.parametrize("ahead_s", [-60.0, -HOUR_S, HOUR_S])
    def test_one_whose_status_stays_is_at_rest_whatever_its_clock(self, write, run_dir, ahead_s):
        write(ahead_s)

        assert json_of("set", run_dir, "ids=9")["edit"]["step"] >= 2


def test_what_cannot_be_is_refused_and_the_run_goes_on(mix_path, run_dir, books, tmp_path):
    books.write_text(books.read_text().replace("books.jsonl", "nothing.jsonl"))
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        digests = taken_by([client], 3)
        for arguments, said in (
            (("set", run_dir, "txt=1"), "did you mean 'text'"),
            (("set", run_dir, "ids=0", "text=0"), "no source would have a weight"),
            (("set", run_dir, "ids=-1"), "found -1.0; give at least 0"),
            (("set", run_dir, "ids"), "NAME=NUMBER"),
            (("set", run_dir, "ids=1", "ids=2"), "two weights"),
            (("set", run_dir, "ids=2", "--at", 2), "the first step that can be changed is"),
            (("retire", run_dir, "boks"), "not in the mix"),
            (("undo", run_dir), "nothing to undo"),
            (("add", run_dir, "boks", "--from", books, "--weight", 1), "declare it there"),
            (("add", run_dir, "books", "--from", books, "--weight", 1), "nothing.jsonl"),
        ):
            result = run_mix(*arguments)
            assert isinstance(result.exception, ConfigError), (arguments, result.exception)
            assert said in str(result.exception)
        digests += taken_by([client], 12)

    assert digests == replayed(a_spec(mix_path), 15)
    assert not (run_dir / EDITS_NAME).exists()
    with pytest.raises(StateError, match="nowhere: no such folder"):
        change_mix(tmp_path / "nowhere", Undo(), None, 1.0)


def test_an_edit_that_the_run_may_never_come_to_says_so_and_is_shown_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stages = [{"weights": {"ids": 3, "text": 1}}]
    path = a_mix_file(tmp_path, rows=6, micro_rows=1, mix={"stages": stages, "stop": "each_once"})
    run = tmp_path / "run"
    write_run_record(run, path, {"dp": 1})

    with LocalPlane(a_spec(path, run_dir=run)) as plane:
        client = Client(plane.handle(0))
        taken_by([client], 1)
        late = json_of("set", run, "ids=1", "--at", 500)
        steps = 1 + sum(1 for _ in iter(client.next_batch, None))
        with pytest.raises(ConfigError, match=f"which ends before step {steps}"):
            json_of("set", run, "ids=1")
    at_rest = json_of("set", run, "ids=2")

    assert "should that be before step 500, the edit never holds" in late["unsure"]
    assert "the run ends before edit 1 takes effect: set ids=1" in caplog.text
    assert at_rest["unsure"].endswith(f"it holds once the run goes on to step {steps}")
    shown = run_mix("show", run).stdout
    assert (
        f"from step 500 on: set ids=1; takes effect once the run reaches that step; it ended before step {steps}"
        in (" ".join(shown.split()))
    )
    found = json_of("show", run)
    assert (found["edits_ahead"], found["has_ended"]) == ([1, 2], True)


def test_a_stage_that_is_due_behind_the_last_step_is_shown_as_not_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stages = [
        {"weights": {"ids": 1, "text": 1}},
        {"from_epochs": {"ids": 1}, "weights": {"ids": 1, "text": 9}},
    ]
    path = a_mix_file(tmp_path, rows=6, micro_rows=1, version=2, mix={"stages": stages})
    for name in ("long", "short"):
        write_run_record(tmp_path / name, path, {"dp": 1})
    with LocalPlane(a_spec(path, run_dir=tmp_path / "long", num_steps=60)) as plane:
        digests = taken_by([Client(plane.handle(0))], 60)
    (began,) = read_history(tmp_path / "long", load_mix(path)[0]).edits
    run, steps = tmp_path / "short", began.step

    with LocalPlane(a_spec(path, run_dir=run, num_steps=steps)) as plane:
        client = Client(plane.handle(0))
        assert taken_by([client], steps) == digests[:steps]
        assert client.next_batch() is None
        state = json.loads(json.dumps(client.state_dict()))

    found = json_of("show", run)
    assert [edit["step"] for edit in found["edits"]] == [steps]
    assert found["edits_ahead"] == [1]
    # A run that resumes from there finds the same, with the folder or without it.
    for folder in (run, tmp_path / "other"):
        spec = a_spec(path, run_dir=folder, state=state, num_steps=60)
        with LocalPlane(spec) as plane:
            assert taken_by([Client(plane.handle(0))], 60 - steps) == digests[steps:]
        assert read_history(folder, load_mix(path)[0]).edits == (began,)
    assert 1 not in json_of("show", run)["edits_ahead"]


def test_edits_that_are_damaged_or_of_another_mix_are_refused(mix_path, run_dir):
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        taken_by([client], 1)
        json_of("set", run_dir, "ids=3")
    kept = json.loads((run_dir / EDITS_NAME).read_bytes())
    kept["edits"][0]["step"] += 1
    whole = (run_dir / EDITS_NAME).read_bytes()

    (run_dir / EDITS_NAME).write_text(json.dumps(kept))
    with pytest.raises(StateError, match="damaged"):
        LocalPlane(a_spec(mix_path, run_dir=run_dir))
    (run_dir / EDITS_NAME).write_bytes(whole)
    spec = a_spec(mix_path, run_dir=run_dir)
    with pytest.raises(StateError, match="holds 1 edit of a mix with digest"):
        LocalPlane(PlaneSpec(**{**vars_of(spec), "mix": spec.mix.model_copy(update={"seed": 8})}))


def test_a_state_of_another_run_that_is_refused_leaves_nothing_in_the_folder(mix_path, tmp_path):
    """Otherwise edits of that run would take effect in this one unnoticed."""
    one, other = (a_spec(mix_path, run_dir=tmp_path / name) for name in ("one", "other"))
    other = replace(other, mix=other.mix.model_copy(update={"seed": 8}))
    write_run_record(tmp_path / "one", mix_path, {"dp": 1})
    with LocalPlane(one) as plane, Client(plane.handle(0)) as client:
        taken_by([client], 1)
        json_of("set", tmp_path / "one", "ids=3")
        taken_by([client], 3 * AHEAD)
        state = client.state_dict()
    assert state["edits"]
    with LocalPlane(other) as plane, Client(plane.handle(0)) as client:
        taken_by([client], 2)
    before = files_of(tmp_path / "other")

    with pytest.raises(StateError, match="seed"):
        LocalPlane(replace(other, state=state))

    assert files_of(tmp_path / "other") == before


def files_of(folder):
    """Return the content of each file, except the logs, which record that the run was opened."""
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def vars_of(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_files_of_others_beside_a_run_change_nothing(mix_path, run_dir, monkeypatch, caplog):
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        (run_dir / ANSWER_NAME).write_text('{"version": 9}')
        asked = json_of("set", run_dir, "ids=3", "text=1")
        (run_dir / REQUEST_NAME).write_text('{"version": 1, "id": "no"}')
        wait_for(lambda: "is ignored" in caplog.text)
        caplog.clear()
        monkeypatch.setattr("omniload.actors.answering_edits.os.geteuid", lambda: os.getuid() + 7)
        monkeypatch.setattr("omniload.actors.answering_edits._ROOT", -1)
        request = EditRequest(id="0" * 32, change=Undo()).model_dump_json()
        write_whole(run_dir / REQUEST_NAME, request.encode())
        wait_for(lambda: "is of user" in caplog.text)
        taken_by([client], 12)

    assert asked["edit"]["revision"] == 1
    assert (run_dir / ANSWER_NAME).stat().st_mode & 0o777 == 0o600
    assert len(read_history(run_dir, load_mix(mix_path)[0]).edits) == 1


def wait_for(happens):
    for _ in range(5000):
        if happens():
            return
        threading.Event().wait(0.02)
    pytest.fail("it did not happen within 100 s")


def test_a_change_that_is_asked_for_while_the_plane_opens_is_taken_up_once_it_is_open(
    mix_path, run_dir, monkeypatch
):
    said, opens = [], LocalPlane._open
    change = SetWeights(weights={"ids": 3.0})
    beside = threading.Thread(target=lambda: said.append(change_mix(run_dir, change, None, 60.0)))

    def opens_once_asked(plane, spec):
        beside.start()
        wait_for((run_dir / REQUEST_NAME).exists)
        opens(plane, spec)

    monkeypatch.setattr(LocalPlane, "_open", opens_once_asked)
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)):
        beside.join(60)

    (taken,) = said
    assert taken.edit.revision == 1


def test_a_plane_that_opens_waits_for_the_change_of_its_run_at_rest(mix_path, run_dir, monkeypatch):
    LocalPlane(a_spec(mix_path, run_dir=run_dir)).close()
    changes, changing, may_end = asking.change_at_rest, threading.Event(), threading.Event()

    def changes_slowly(*what):
        changing.set()
        assert may_end.wait(60)
        return changes(*what)

    monkeypatch.setattr(asking, "change_at_rest", changes_slowly)
    change = SetWeights(weights={"ids": 3.0})
    beside = threading.Thread(target=change_mix, args=(run_dir, change, None, 60.0))
    beside.start()
    assert changing.wait(60)
    ends = threading.Timer(0.1, may_end.set)
    ends.start()

    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane:
        assert [edit.change for edit in plane.spec.history.edits] == [change]
    for thread in (beside, ends):
        thread.join(60)


def test_a_plane_that_does_not_answer_is_named(mix_path, run_dir, monkeypatch):
    monkeypatch.setattr("omniload.actors.local.plane.answer_edits", lambda *_: lambda: None)
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)):
        with pytest.raises(UnavailableError, match=f"open in process {os.getpid()}"):
            change_mix(run_dir, Undo(), None, 0.2)
        assert not (run_dir / REQUEST_NAME).exists()


# `make test` has edits of a job on Ray whose rank is killed, and histories of edits whose loaders are killed.
@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_two_ranks_of_a_plane_of_actors_see_the_edits_though_loaders_are_killed(
    mix_path, run_dir, books
):
    pytest.importorskip("ray")
    with open_plane(a_spec(mix_path, dp=2, run_dir=run_dir)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        digests = taken_by(clients, 3)
        json_of("set", run_dir, "ids=3", "text=1")
        digests += taken_by(clients, 2 * AHEAD)
        json_of("add", run_dir, "books", "--from", books, "--weight", 4)
        digests += taken_by(clients, 2 * AHEAD)
        pids = plane.pids()
        for role in ("loader-0", "loader-1", "constructor-0"):
            os.kill(pids[role], signal.SIGKILL)
        digests += taken_by(clients, 3 * AHEAD)
        with pytest.raises(ConfigError, match="in the mix already"):
            json_of("add", run_dir, "books", "--from", books, "--weight", 4)
        json_of("retire", run_dir, "ids")
        digests += taken_by(clients, 3 * AHEAD)
        last = clients[0].next_batch()

    history = read_history(run_dir, load_mix(mix_path)[0])
    assert len(history.edits) == 3
    assert replayed(a_spec(mix_path, edits=history.edits), len(digests)) == digests
    assert last.tokens_by_source["books"] > 0
    assert last.tokens_by_source["ids"] == 0
    assert last.source_tags == {
        "books": {"domain": "prose"}
    }  # from a constructor that started later


# Real actors take 13 s beside other work. A simulation has neither a rank's handle nor the arguments of its calls.
@pytest.mark.ray
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_what_ranks_through_ray_are_lent_is_taken_back_for_a_change_and_lost_with_its_constructor(
    mix_path, run_dir, monkeypatch
):
    monkeypatch.setattr(fetch_pace, "_LONG_S", 0.0)
    with open_plane(a_spec(mix_path, dp=2, run_dir=run_dir)) as plane:
        handles = [plane.handle(rank) for rank in range(2)]
        clients = [Client(handle) for handle in handles]
        digests = taken_by(clients, 3 * AHEAD)
        wait_for(lambda: all(handle.is_ready(len(digests)) for handle in handles))
        step = json_of("set", run_dir, "ids=3", "text=1")["edit"]["step"]
        digests += taken_by(clients, 2 * AHEAD)
        wait_for(lambda: all(handle.is_ready(len(digests)) for handle in handles))
        os.kill(plane.pids()["constructor-0"], signal.SIGKILL)
        digests += taken_by(clients, 2 * AHEAD)

    assert step == 3 * AHEAD, "what ranks hold of it is none of theirs yet"
    history = read_history(run_dir, load_mix(mix_path)[0])
    assert replayed(a_spec(mix_path, edits=history.edits), len(digests)) == digests


def test_the_first_steps_are_skipped_by_a_run_that_begins_anew_as_no_state_is_before_them(
    mix_path, tmp_path
):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=1) as loader:
        states = []
        for _ in range(4):
            loader.next_batch()
            states.append(loader.state_dict())
        up = run_mix("skip", run, "--steps", "0:2")
    audited = [json_of("audit", run, "--step", step)["samples"] for step in range(4)]

    said = run_mix("skip", run, "--steps", "0:2").output.replace("\n", " ")
    with pytest.raises(StateError, match="from step 0 on; begin it anew, without a state"):
        omniload.open(mix_path, run_dir=run, arrays="numpy", state=states[1])
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=1, steps=2) as loader:
        list(loader)

    assert "skip them, and begin it anew, without a state" in str(up.exception)
    assert "would have drawn; begin it anew in this folder, without a state" in said
    again = [json_of("audit", run, "--step", step)["samples"] for step in range(2)]
    assert again == audited[2:]


def test_steps_that_were_trained_on_are_skipped_and_the_run_goes_on_behind_them(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=1) as loader:
        states = []
        for _ in range(12):
            states.append(loader.state_dict())
            loader.next_batch()
        up = run_mix("skip", run, "--steps", "6:8")
    audited = [json_of("audit", run, "--step", step)["samples"] for step in range(12)]

    taken = json_of("skip", run, "--steps", "6:9")
    still = json_of("audit", run, "--step", 7)["samples"]  # of the run, before it resumes
    with pytest.raises(StateError, match="checkpoint of step 6 or before"):
        omniload.open(mix_path, run_dir=run, arrays="numpy", state=states[8])
    with omniload.open(
        mix_path, run_dir=run, arrays="numpy", prefetch_steps=1, state=states[4], steps=9
    ) as loader:
        list(loader)
    again = [json_of("audit", run, "--step", step)["samples"] for step in range(4, 9)]

    assert isinstance(up.exception, StateError)
    assert "end the run" in str(up.exception)
    assert (taken["edit"]["step"], taken["edit"]["revision"]) == (6, 1)
    assert still == audited[7]
    assert again == audited[4:6] + audited[9:12]
    assert json_of("show", run)["next_step"] == 9
    for at in ("next", 6, 9):
        refused = run_mix("undo", run, "--at", at)
        assert "edit 1 (skip --steps 6:9) can only be undone of a run at rest, before" in str(
            refused.exception
        )
    # As the message says.
    with omniload.open(mix_path, run_dir=run, arrays="numpy", state=states[4], steps=6) as loader:
        list(loader)
    assert json_of("undo", run, "--at", 6)["edit"]["undoes"] == 1
    with omniload.open(
        mix_path, run_dir=run, arrays="numpy", prefetch_steps=1, state=states[4], steps=9
    ) as loader:
        list(loader)
    assert [json_of("audit", run, "--step", step)["samples"] for step in range(9)] == audited[:9]


def test_a_skip_that_was_mistyped_is_undone_before_the_run_goes_on(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=1) as loader:
        for _ in range(8):
            loader.next_batch()
    plain = json_of("audit", run, "--step", 5)["samples"]

    json_of("skip", run, "--steps", "2:5")
    undone = json_of("undo", run)
    for wrong, said in (
        ("7:90", "not all trained on"),
        (
            "5:5",
            "--steps 5:5 are none: the second number is the first step that is not skipped; say 5:B",
        ),
        ("50:90", "skip steps below"),
        ("5", "A:B"),
    ):
        refused = run_mix("skip", run, "--steps", wrong)
        assert isinstance(refused.exception, ConfigError)
        assert said in str(refused.exception)
    with omniload.open(mix_path, run_dir=run, arrays="numpy", steps=6) as loader:
        list(loader)

    assert undone["edit"]["step"] == 2
    assert json_of("audit", run, "--step", 5)["samples"] == plain


def test_a_loop_of_ones_own_is_shown_and_changed_at_rest(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy", prefetch_steps=AHEAD) as loader:
        for _ in range(6):
            loader.next_batch()
        state = loader.state_dict()

    taken = json_of("set", run, "ids=9", "text=1")
    step = taken["edit"]["step"]
    with omniload.open(
        mix_path, run_dir=run, state=state, arrays="numpy", pack_lookahead_rows=1, steps=step + 20
    ) as loader:
        batches = list(loader)

    assert json_of("show", run)["next_step"] == step + 20
    at = step + 3
    (batch,) = [batch for batch in batches if batch.step == at]
    audited = json_of("audit", run, "--step", at)["samples"]
    tokens = sum(piece["stop_token"] - piece["first_token"] for piece in audited)
    assert tokens == sum(batch.tokens_by_source.values())


def test_the_document_behind_a_spike_is_named_by_its_loss(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(mix_path, run_dir=run, arrays="numpy", steps=4) as loader:
        for batch in loader:
            for rows in batch.microbatches:
                loader.observe(rows, rows.position_ids * 1.0)

    told = json_of("audit", run, "--step", 2)["samples"]

    lengths = [piece["stop_token"] - piece["first_token"] for piece in told]
    # In a document of n tokens, the first n - 1 predict one each, with losses 0, 1, ..., n - 2. In a cut piece the
    # last token predicts too.
    assert [piece["loss"] for piece in told[:5]] == pytest.approx(
        [(length - 2) / 2 for length in lengths[:5]], abs=0.5
    )
    told_losses = [-1 if piece["loss"] is None else piece["loss"] for piece in told]
    assert told_losses == sorted(told_losses, reverse=True)
    assert told_losses[0] > 5


def test_amounts_of_a_run_of_threads_are_changed_and_exactly_those_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    amounts = {"ids": {"tokens": 3000}, "text": {"epochs": 1.5}}
    mix_path = a_mix_file(tmp_path, rows=6, micro_rows=1, version=2, mix={"amounts": amounts})
    run_dir, books = tmp_path / "run", tmp_path / "books.yaml"
    write_run_record(run_dir, mix_path, {"dp": 1})
    write_texts(tmp_path / "books.jsonl", [f"book {i} " * (i % 9 + 1) for i in range(40)])
    declared = {"books": {"type": "jsonl", "path": "books.jsonl"}}
    books.write_text(yaml.safe_dump({"sources": declared}), encoding="utf-8")

    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        digests = taken_by([client], 3)
        saved = json.loads(json.dumps(client.state_dict()))
        grown = json_of("set", run_dir, "ids=6ktokens", "text=3epochs")
        added = json_of("add", run_dir, "books", "--from", books, "--amount", "40samples")
        below = run_mix("set", run_dir, "ids=1token")
        digests += taken_by([client], 2 * AHEAD)

    assert grown["amounts"] == {
        "ids": ["3,000 tokens", "6,000 tokens"],
        "text": ["1.5 epochs", "3 epochs"],
    }
    assert added["amounts"] == {"books": [None, "40 samples"]}
    assert isinstance(below.exception, ConfigError)
    assert "are drawn; give at least that much" in str(below.exception)
    # At rest, the edit starts at the first step that was never planned.
    json_of("set", run_dir, "text=2epochs")
    assert run_mix("set", run_dir, "ids=1token").exception is not None
    shown = json_of("show", run_dir)
    assert [edit["change"]["kind"] for edit in shown["edits"]] == [
        "set_amounts",
        "add",
        "set_amounts",
    ]
    spec = a_spec(mix_path, run_dir=run_dir, state=saved)
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        again = [combined([batch_digest(b)]) for b in iter(client.next_batch, None)]
    assert again[: len(digests) - 3] == digests[3:]
    progress = {source["name"]: source for source in json_of("show", run_dir)["sources"]}
    assert 6000 <= progress["ids"]["drawn"] < 6000 + 64
    assert (progress["text"]["epochs"], progress["books"]["drawn"]) == (2, 40)
    assert [each["target"] for each in progress.values()] == pytest.approx([1, 1, 1], abs=0.03)
    logged = [*enumerate(digests), *enumerate(again, 3)]
    _log_steps(run_dir, logged)
    assert prove(run_dir).require().num_logged == len(logged)
    at_last = shown["edits"][-1]["step"]
    assert all(prove(run_dir, from_step=at_last + n).holds for n in (-1, 0, 1))
    last = json_of("audit", run_dir, "--step", 2 + len(again))["samples"]
    assert {sample["source"] for sample in last} <= {"ids", "text", "books"}
    differs = json_of("diff", run_dir, mix_path)["amounts"]
    assert differs["text"] == ["2 epochs", "1.5 epochs"]


def test_of_a_run_of_amounts_a_skip_and_its_undoing_tell_no_shares_and_no_policy_steers_it(
    tmp_path, monkeypatch
):
    """Sources with amounts have no shares.

    They were reported as equal shares, by which a policy would have divided the amounts.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    amounts = {"ids": {"tokens": 3000}, "text": {"tokens": 1000}}
    mix_path = a_mix_file(tmp_path, rows=6, micro_rows=1, version=2, mix={"amounts": amounts})
    run_dir, steering = tmp_path / "run", tmp_path / "steer.yaml"
    write_run_record(run_dir, mix_path, {"dp": 1})
    steering.write_text("{version: 1, every: 6, policy: {type: constant}}", encoding="utf-8")
    (shard, *_) = sorted((tmp_path / "ids").iterdir())

    with LocalPlane(a_spec(mix_path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        taken_by([client], 2)
        skipped = json_of("skip", run_dir, "--shard", shard.name)
        undone = run_mix("undo", run_dir)
        steered = run_mix("steer", run_dir, steering, "--once")

    assert (skipped["before"], skipped["after"]) == ({}, {})
    assert "edit 2 undoes edit 1 (skip --shard" in undone.output
    assert "share" not in undone.output
    assert isinstance(steered.exception, ConfigError)
    assert "draws amounts, and a policy moves weights" in str(steered.exception)


def _log_steps(run_dir, digests):
    """Write the log of trainers that saw steps with these digests."""
    with RunLog(run_dir) as log:
        for step, digest in digests:
            log.write(a_step(step, digest=f"{digest:016x}"))


def test_a_stage_by_epochs_begins_at_one_step_for_every_run_and_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stages = [
        {"weights": {"ids": 3, "text": 1}},
        {"from_epochs": {"ids": 2}, "ramp_steps": 5, "weights": {"ids": 1, "text": 9}},
    ]
    path = a_mix_file(tmp_path, rows=6, micro_rows=1, version=2, mix={"stages": stages})
    run = tmp_path / "run"
    write_run_record(run, path, {"dp": 1})
    waiting = json_of("check", path)
    planned = json_of("plan", path, "--steps", 200, "--rehearse", 3)

    with LocalPlane(a_spec(path, run_dir=run, num_steps=200)) as plane:
        client = Client(plane.handle(0))
        digests = taken_by([client], 10)
        early = json.loads(json.dumps(client.state_dict()))
        digests += taken_by([client], 190)

    (edit,) = read_history(run, load_mix(path)[0]).edits
    shown = run_mix("show", run).stdout
    assert f"from step {edit.step:,} on: stage 1 of the file begins: ids was gone" in shown
    assert edit.step == pytest.approx(planned["stages"][1]["from_step"], rel=0.1)
    assert waiting["shares"][0]["step"] == 0
    (waits,) = waiting["stages_by_epochs"]
    assert waits.pop("shares") == pytest.approx({"ids": 0.1, "text": 0.9})
    assert waits == {"stage": 1, "from_epochs": {"ids": 2}, "step": None, "ramp_steps": 5}
    waits["shares"] = pytest.approx({"ids": 0.1, "text": 0.9})
    expected = {**waits, "step": planned["stages"][1]["from_step"]}
    assert planned["stages_by_epochs"] == [expected]
    assert json_of("plan", path, "--steps", 3, "--rehearse", 3)["stages_by_epochs"] == [waits]
    assert json_of("show", run)["stages_by_epochs"] == [{**waits, "step": edit.step}]
    differs = {each["key"]: each["other"] for each in json_of("diff", path, run)["keys"]}
    assert differs["mix.stages.from_epochs.0.began"] == f"at step {edit.step}"
    # From the file alone; from the folder; from an early state in another folder, on two ranks.
    assert replayed(a_spec(path, num_steps=200), 200) == digests
    assert replayed(a_spec(path, run_dir=run, num_steps=200), 200) == digests
    other = a_spec(path, dp=2, run_dir=tmp_path / "other", state=early, num_steps=200)
    with LocalPlane(other) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        assert taken_by(clients, 190) == digests[10:]
    assert read_history(tmp_path / "other", load_mix(path)[0]).edits == (edit,)
    # A file with this step is the same run.
    stages[1] = {**stages[1], "from_step": edit.step}
    del stages[1]["from_epochs"]
    plain = a_mix_file(tmp_path, rows=6, micro_rows=1, version=2, mix={"stages": stages})
    assert replayed(a_spec(plain, num_steps=200), 200) == digests


def test_the_beginning_of_a_stage_that_an_earlier_edit_took_back_is_shown_as_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stages = [
        {"weights": {"ids": 3, "text": 1}},
        {"from_epochs": {"ids": 2}, "weights": {"ids": 1, "text": 9}},
    ]
    path = a_mix_file(tmp_path, rows=6, micro_rows=1, version=2, mix={"stages": stages})
    run = tmp_path / "run"
    write_run_record(run, path, {"dp": 1})
    with LocalPlane(a_spec(path, run_dir=run, num_steps=200)) as plane:
        client = Client(plane.handle(0))
        taken_by([client], 2)
        while len(read_history(run, load_mix(path)[0]).edits) < 1:
            taken_by([client], 1)
    # Of a run that starts again from the beginning, and begins the stage at another step.
    with LocalPlane(a_spec(path, run_dir=run, num_steps=200)) as plane:
        client = Client(plane.handle(0))
        taken_by([client], 2)
        json_of("set", run, "ids=9")
        while len(read_history(run, load_mix(path)[0]).edits) < 3:
            taken_by([client], 1)

    before, asked, since = (
        line for line in run_mix("show", run).stdout.splitlines() if line.startswith("edit ")
    )
    assert "stage 1 of the file begins: ids was gone" in before
    assert before.endswith(
        "; holds no more, as a later edit of an earlier step has that found anew"
    )
    assert "holds no more" not in asked + since
    assert 1 not in json_of("show", run)["edits_ahead"]


def test_a_question_in_words_of_another_release_is_refused_at_once(mix_path, run_dir, monkeypatch):
    asked = EditRequest.model_dump_json
    monkeypatch.setattr(
        EditRequest,
        "model_dump_json",
        lambda request: asked(request).replace('"version":1', '"version":2,"urgent":true'),
    )
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)):
        result = run_mix("set", run_dir, "ids=3", "text=1", "--timeout", 300)

    assert isinstance(result.exception, StateError)
    assert "the run's release cannot read this request (version: Input should be 1)" in str(
        result.exception
    )
    assert read_history(run_dir, load_mix(mix_path)[0]).edits == ()


def test_an_answer_in_words_of_another_release_is_told_at_once(mix_path, run_dir, monkeypatch):
    said = EditAnswer.model_dump_json
    monkeypatch.setattr(
        EditAnswer,
        "model_dump_json",
        lambda answer: said(answer).replace('"planned":', '"certain":0.5,"planned":'),
    )
    with LocalPlane(a_spec(mix_path, run_dir=run_dir)):
        result = run_mix("set", run_dir, "ids=3", "text=1", "--timeout", 300)

    assert isinstance(result.exception, StateError)
    assert "words of another release than this one (taken.certain: Extra" in str(result.exception)
    # The edit was accepted, because the message has one look.
    assert len(read_history(run_dir, load_mix(mix_path)[0]).edits) == 1
