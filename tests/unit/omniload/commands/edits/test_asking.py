"""A run at rest is changed in its folder: the files that are read for it, and refusals."""

import os
import socket
import time

import pytest
import yaml

from omniload.actors.claim import LOCK_NAME
from omniload.actors.status_file import STATUS_NAME
from omniload.base.errors import ConfigError, UnavailableError
from omniload.commands.edits import asking
from omniload.commands.edits.asking import change_mix
from omniload.machine.status import PlaneStatus
from omniload.mix.edits.answers import REQUEST_NAME
from omniload.mix.edits.edit import AddSource, SetWeights, SkipShard
from omniload.mix.edits.edits_file import EDITS_NAME
from omniload.mix.journal.lines import JournalLine
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.run_record import write_run_record
from omniload.mix.sources import ParquetSource
from tests.support.plane.builders import a_mix
from tests.support.plane.journals import a_journal, states

CHANGE = SetWeights(weights={"web": 3})
WITH_A_SECRET = "s3://" + "AKIAEXAMPLE:wJalrXUtnFEMI@" + "bucket/x/*.parquet"


@pytest.fixture
def run(tmp_path):
    """The folder of a run that planned 39 steps."""
    mix_path = tmp_path / "mix.yaml"
    mix_path.write_text(yaml.safe_dump(a_mix().model_dump(mode="json")), encoding="utf-8")
    folder = tmp_path / "run"
    write_run_record(folder, mix_path, {"dp": 1})
    (folder / LOCK_NAME).touch()
    a_journal(folder / JOURNAL_NAME, states(40), every=12)
    return folder


def test_the_first_step_that_was_never_planned_is_found_without_reading_all_steps(run, monkeypatch):
    parsed, one = [], JournalLine.parsed
    monkeypatch.setattr(
        JournalLine, "parsed", lambda line: parsed.append(line.text[:16]) or one(line)
    )

    assert change_mix(run, CHANGE, None, 1.0).edit.step == 39
    # Of 39 steps and 4 bases, only the last stretch is read, for the step and for its edits.
    assert len(parsed) < 12


def a_status(run, *, host, age_s):
    status = PlaneStatus(written_at=time.time() - age_s, host=host, pid=7, roles=())
    (run / STATUS_NAME).write_text(status.model_dump_json())


def test_a_run_that_another_host_reports_of_is_not_at_rest_though_no_lock_is_seen(run):
    a_status(run, host="elsewhere", age_s=0.5)

    with pytest.raises(UnavailableError, match="by process 7 on elsewhere"):
        change_mix(run, CHANGE, None, 1.0)
    assert not (run / EDITS_NAME).exists()


def test_a_run_of_this_host_that_has_ended_is_changed_at_once(run):
    """The lock shows that it has ended."""
    a_status(run, host=socket.gethostname(), age_s=0.0)

    assert change_mix(run, CHANGE, None, 1.0).edit.revision == 1


def test_a_source_with_a_secret_is_refused_and_written_nowhere(run):
    source = ParquetSource(type="parquet", path=WITH_A_SECRET, tokens="tokens")
    before = sorted(run.iterdir())

    with pytest.raises(ConfigError, match=r"'s3://\*\*\*@bucket/x/\*\.parquet' holds credentials"):
        change_mix(run, AddSource(name="books", source=source, weight=1), None, 1.0)

    assert sorted(run.iterdir()) == before


def test_the_question_is_for_the_user_of_the_plane_alone(run, monkeypatch):
    modes = []

    def look(_place, _asked):
        modes.append((run / REQUEST_NAME).stat().st_mode & 0o777)

    monkeypatch.setattr(asking, "_answer_in", look)
    for user in (1000, 0):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(UnavailableError, match="did not answer"):
            asking._ask_plane(run, CHANGE, None, -1.0, "process 7")

    assert modes == [0o600, 0o644]


def test_a_group_of_texts_is_left_out_by_the_name_of_the_group_and_of_its_source(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("text")
    mix = {
        **a_mix().model_dump(mode="json"),
        "sources": {"notes": {"type": "text", "path": "*.txt", "files_per_unit": 2}},
        "mix": {"stages": [{"weights": {"notes": 1}}]},
        "tokenizer": {"type": "bytes"},
    }
    mix_path, run = tmp_path / "mix.yaml", tmp_path / "run"
    mix_path.write_text(yaml.safe_dump(mix), encoding="utf-8")
    write_run_record(run, mix_path, {"dp": 1})
    (run / LOCK_NAME).touch()
    a_journal(run / JOURNAL_NAME, states(4))
    asked = {"source": "notes"}

    with pytest.raises(ConfigError, match=r"most like it: .*and 1 more"):
        change_mix(run, SkipShard(file="2.txt", **asked), None, 1.0)
    taken = change_mix(run, SkipShard(file="2.txt and 1 more", **asked), None, 1.0)

    assert taken.edit.change.number == 1


def test_a_source_that_json_cannot_hold_is_refused_before_it_is_asked_for(run):
    source = ParquetSource(type="parquet", path="/a\udcff/x", text="t")

    with pytest.raises(ConfigError, match=r"source 'a': .*'/a\\udcff/x' is not UTF-8.*rename"):
        change_mix(run, AddSource(name="a", source=source, weight=1), None, 1.0)

    assert not (run / REQUEST_NAME).exists()
    assert not (run / EDITS_NAME).exists()
