"""Watching a running plane: the file of its run, the two commands, and every metric that the dashboard names."""

import json
import os
import re
import shutil
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

import omniload
from omniload.actors import status_file
from omniload.actors.heartbeat_board import MemoryBoard
from omniload.actors.roles import loader, sources
from omniload.actors.roles.planner_metrics import FIGURES, serve_metrics
from omniload.actors.status_file import read_status
from omniload.base.clock import SystemClock
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.cli import command as mix_command
from omniload.commands.runs import doctor
from omniload.mix.config import MixConfig
from tests.house.modules import ROOT
from tests.support.ports import free_port
from tests.support.programs import finished
from trainer_integration.cli import command as train_command
from trainer_integration.run.run_log import EventLine, RunLog, StepLine

LIMIT_S = 60
MONITORING = ROOT / "docs" / "monitoring"
MIX = {
    "version": 1,
    "seed": 1,
    "tokenizer": {"type": "bytes"},
    "sources": {"web": {"type": "text", "path": "*.txt"}},
    "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
    "pack": {"length": 16},
    "batch": {"tokens": 32, "micro_tokens": 16},
}


@pytest.fixture
def plane(tmp_path, monkeypatch):
    """A loader that has taken three steps, its folder, and the planner's answer to Prometheus."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status_file, "_EVERY_S", 0.05)
    (tmp_path / "a.txt").write_text("text of a document\n" * 50, encoding="utf-8")
    port = free_port()
    run = tmp_path / "run"
    with omniload.open(
        MIX, arrays="numpy", run_dir=run, metrics_port=port, world_size=1, rank=0
    ) as loader:
        for _ in range(3):
            loader.next_batch()
        loader.state_dict()
        yield run, port


def seen(run, wanted):
    """Wait until the status has the wanted value."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < until_s, read_status(run)
        if (run / "status.json").exists():
            roles = {role.name: role for role in read_status(run).roles}
            if wanted(roles):
                return roles


def has_taken_three(roles):
    return "rank dp=0" in roles and roles["rank dp=0"].state.startswith("has step 2")


def test_the_folder_of_a_run_tells_what_every_role_does(plane):
    run, _ = plane
    roles = seen(run, has_taken_three)

    assert sorted(roles) == ["constructor-0", "loader-0", "planner", "rank dp=0"]
    assert roles["rank dp=0"].figures["wait_seconds_total"] > 0
    assert roles["loader-0"].figures["read_bytes_total"] > 0
    assert roles["planner"].figures["planned_step"] >= 3
    assert roles["planner"].memory_bytes > 1 << 20


def test_top_shows_each_role_in_a_line_and_as_json(plane):
    run, _ = plane
    seen(run, has_taken_three)

    shown = CliRunner().invoke(mix_command, ["top", str(run), "--once"], catch_exceptions=False)
    told = CliRunner().invoke(mix_command, ["top", str(run), "--json"], catch_exceptions=False)

    assert "rank dp=0" in shown.output
    assert "has step 2" in shown.output
    assert {role["name"] for role in json.loads(told.output)["roles"]} >= {"planner", "loader-0"}


def test_show_tells_the_rate_and_what_was_skipped_of_each_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status_file, "_EVERY_S", 0.05)
    lines = [json.dumps({"text": f"line {i}"}) for i in range(60)]
    (tmp_path / "good.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text("\n".join(["{", *lines, "{"]), encoding="utf-8")
    sources = {
        "good": {"type": "jsonl", "path": "good.jsonl"},
        "bad": {"type": "jsonl", "path": "bad.jsonl", "on_error": {"policy": "skip"}},
    }
    weights = {"mix": {"stages": [{"from_step": 0, "weights": {"good": 1, "bad": 1}}]}}
    run = tmp_path / "run"

    def shown(*options):
        return CliRunner().invoke(mix_command, ["show", str(run), *options], catch_exceptions=False)

    with omniload.open(
        MIX | weights | {"sources": sources}, arrays="numpy", run_dir=run, world_size=1, rank=0
    ) as loader:
        for _ in range(3):
            loader.next_batch()
        seen(run, has_taken_three)
    told = json.loads(shown("--json").stdout)
    (source,) = [each for each in told["sources"] if each["name"] == "bad"]
    # Two lines of the source are counted in each epoch; read-ahead is not counted.
    times = int(source["epochs"])
    assert 2 * times <= told["skipped"].get("bad", 0) <= 2 * times + 2
    assert told["tokens_per_s"] == pytest.approx(told["steps_per_s"] * 32)
    assert 0 < told["steps_per_s"] < 3 / 0.05
    table = shown().stdout
    assert "skipped" in table
    assert "steps/s" in table
    # Without the last file of its processes, the journal contains the rest.
    (run / "status.json").unlink()
    left = json.loads(shown("--json").stdout)
    assert (left["skipped"], left["steps_per_s"]) == (told["skipped"], 0.0)
    assert "steps/s" not in shown().stdout


def test_the_run_folder_holds_lines_of_every_role_and_top_shows_the_last_of_one_in_trouble(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status_file, "_EVERY_S", 0.05)
    (tmp_path / "a.txt").write_text("text of a document\n" * 50, encoding="utf-8")
    run = tmp_path / "run"
    answers, real = threading.Event(), sources.open_source

    def open_source(*arguments, **words):
        source = real(*arguments, **words)
        read = source.read

        def refused(start, stop, without=()):
            if not answers.is_set():
                raise UnavailableError("s3://KEY:SECRETSECRET@bucket does not answer")
            return read(start, stop)

        monkeypatch.setattr(source, "read", refused)
        return source

    monkeypatch.setattr(sources, "open_source", open_source)
    monkeypatch.setattr(loader, "PATIENT_S", (LIMIT_S,))
    monkeypatch.setattr(SystemClock, "sleep", lambda _clock, limit_s: answers.wait(limit_s))
    with omniload.open(MIX, arrays="numpy", run_dir=run, world_size=1, rank=0) as opened:
        roles = seen(run, lambda roles: "loader-0" in roles and roles["loader-0"].in_trouble)
        shown = CliRunner().invoke(mix_command, ["top", str(run), "--once"], catch_exceptions=False)
        told = CliRunner().invoke(mix_command, ["top", str(run), "--json"], catch_exceptions=False)
        answers.set()
        opened.next_batch()

    assert sorted(path.name for path in (run / "logs").iterdir()) == [
        *("constructor-0.log", "loader-0.log", "planner.log", "rank-dp=0.log")
    ]
    assert roles["loader-0"].log == str(run / "logs" / "loader-0.log")
    assert "source web: read again in" in (run / "logs" / "loader-0.log").read_text()
    assert "SECRETSECRET" not in (run / "logs" / "loader-0.log").read_text()
    assert "does not answer" in json.loads(told.output)["last_lines"]["loader-0"]
    assert "loader-0: 2" in shown.output  # the table, and below it the line of its time
    assert "logs/loader-0.log" in shown.output.replace("\n", "")


def test_every_metric_of_the_dashboard_and_the_alerts_is_there(plane):
    _, port = plane
    named = {
        name
        for file in ("grafana.json", "alerts.yaml")
        for name in re.findall(r"\bomniload_[a-z_]+", (MONITORING / file).read_text())
    }
    assert len(named) >= 14
    # A metric without any count has only a line for its type; all others have a value here.
    uncounted = {"omniload_retries_total", "omniload_samples_skipped_total"}
    # Roles record the figures of a step after the step was handed out.
    until_s = time.monotonic() + LIMIT_S
    there: set[str] = set()
    while not named - there <= uncounted:
        assert time.monotonic() < until_s, named - there
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        there = {sample.name for family in families for sample in family.samples}
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert named - there - declared == set()
    page = (ROOT / "docs/how-to/running/watch.md").read_text()
    assert {f"omniload_{name}" for name in FIGURES} - set(
        re.findall(r"omniload_[a-z_]+", page)
    ) == set()


def test_a_planner_that_takes_over_goes_on_without_metrics_where_another_has_its_port(caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        mix = MixConfig.model_validate({**MIX, "runtime": {"metrics_port": port}})
        held = rf"metrics_port {port} cannot be used .*in use, by process {os.getpid()} \(.*another.*or 0"
        with pytest.raises(ConfigError, match=held):
            serve_metrics(mix, MemoryBoard())

        serve_metrics(mix, MemoryBoard(), goes_on=True)()

    assert (
        f"metrics are not served to Prometheus; the run continues: runtime.metrics_port {port}"
        in caplog.text
    )


def test_runs_that_one_scrape_job_finds_are_told_apart():
    board = json.loads((MONITORING / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]

    # If a hanging run were added to a running one, the alert would not fire.
    groups = re.findall(r"by \(([^)]*)\)", "\n".join([*asked, *(rule["expr"] for rule in rules)]))
    assert len(groups) >= 5
    assert [each for each in groups if "instance" not in each] == []
    assert [each for each in asked if each.count("$job") != each.count("$instance")] == []
    assert [
        r["alert"] for r in rules if "$labels.instance" not in r["annotations"]["summary"]
    ] == []


def test_prometheus_itself_accepts_the_alerts():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (Debian package prometheus)")

    done = finished([promtool, "check", "rules", str(MONITORING / "alerts.yaml")], limit_s=240)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 rules found" in done.stdout


def test_a_folder_that_is_no_runs_is_refused_with_how_to_have_one(tmp_path):
    with pytest.raises(
        StateError, match=r"it has no status\.json; give the folder of a run: run_dir="
    ):
        read_status(tmp_path)


def a_step(step, attempt=0):
    return StepLine(
        attempt=attempt,
        step=step,
        loss=2.5,
        balance_loss=0.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=100,
        seconds=0.5,
        wait_s=(0.1, 0.3),
        compute_s=(0.2, 0.2),
        imbalance=1.0,
        bound=1.0,
        tokens_by_source={},
        digest=None,
    )


def test_watch_tells_the_last_step_and_checkpoint_of_a_run_whose_plane_is_not_up(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(a_step(0))
        log.write(EventLine(attempt=0, seconds=1, what="checkpoint", detail="step-1", step=1))
        log.write(a_step(1, attempt=1))
    with Path(tmp_path / "log.jsonl").open("a") as torn:
        torn.write('{"kind": "step", "att')

    shown = CliRunner().invoke(train_command, ["watch", str(tmp_path), "--once"])
    told = CliRunner().invoke(train_command, ["watch", str(tmp_path), "--json"])

    assert shown.exit_code == 0, shown.output
    assert "step 1, loss 2.5000, waits 0.30 s at most, 200 tokens/s, checkpoint 1, 1 restart" in (
        shown.output.replace("\n", " ")
    )
    assert "no data plane is up" in shown.output
    found = json.loads(told.output)
    assert (found["run"]["step"], found["run"]["checkpoint_step"], found["plane"]) == (1, 1, None)


def test_the_doctor_finds_the_loader_whose_source_is_slow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status_file, "_EVERY_S", 0.05)
    monkeypatch.setattr(doctor, "_EVERY_S", 0.05)
    a_step = "text of a document, of one step\n"  # so that each step waits for a read
    (tmp_path / "a.txt").write_text(a_step, encoding="utf-8")
    run, real = tmp_path / "run", sources.open_source
    ended = threading.Event()

    def open_source(*arguments, **words):
        source = real(*arguments, **words)
        read = source.read

        def late(start, stop, without=()):
            ended.wait(0.3)
            return read(start, stop)

        monkeypatch.setattr(source, "read", late)
        return source

    def told(seconds, *options):
        result = CliRunner().invoke(
            mix_command, ["doctor", str(run), "--seconds", str(seconds), *options]
        )
        assert result.exit_code == 0, result.output
        return result.output

    def found(seconds):
        return json.loads(told(seconds, "--json"))

    monkeypatch.setattr(sources, "open_source", open_source)
    with omniload.open(
        MIX, arrays="numpy", run_dir=run, world_size=1, rank=0, prefetch_steps=1
    ) as opened:
        opened.next_batch()
        taking = threading.Thread(
            target=lambda: [opened.next_batch() for _ in iter(ended.is_set, True)]
        )
        taking.start()
        try:
            until_s = time.monotonic() + LIMIT_S
            # A busy machine may keep the planner off its core for longer than a read takes.
            while (found_first := next(iter(found(2)["findings"]), {})).get("role") != "loader-0":
                assert time.monotonic() < until_s
            while "runtime.loaders" not in (shown := told(2)):
                assert time.monotonic() < until_s, shown
        finally:
            ended.set()
            taking.join(LIMIT_S)

    assert "rank dp=0 -> constructor-0 -> planner -> loader-0" in found_first["seen"]
    assert "reads records" in found_first["seen"]
