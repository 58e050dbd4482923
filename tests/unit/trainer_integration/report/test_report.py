"""The page of a run, and the lines and tables of the terminal."""

import builtins
import io
import os
import re
import socket
import subprocess
import sys
import threading

import orjson
import pytest
from click.testing import CliRunner
from rich.console import Console

from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import DISTRIBUTION
from omniload.mix.edits.edit import SetWeights
from omniload.mix.edits.edits_file import write_history
from omniload.mix.edits.history import History
from tests.house.modules import ROOT
from tests.support.plane.builders import a_mix
from tests.support.trainer.run_lines import a_killed_run, a_run_folder, a_step, an_event
from trainer_integration.cli import command
from trainer_integration.report import report
from trainer_integration.report.display import (
    HEAD,
    RunDisplay,
    print_summary,
    share_lines,
    step_line,
)
from trainer_integration.report.proof import Proof, StepProof
from trainer_integration.report.report import page_of, read_finished, write_report
from trainer_integration.report.run_summary import SourceShare, source_shares, summary_of
from trainer_integration.run.launch_record import LAUNCH_RECORD_NAME, read_launch_record
from trainer_integration.run.run_lock import RunLock
from trainer_integration.run.run_log import StepLine
from trainer_integration.training.step_figures import StepFigures


@pytest.fixture
def run(tmp_path):
    return a_run_folder(tmp_path, a_mix(weights={"web": 3, "code": 2}), a_killed_run())


def a_page(run, **changes):
    finished = read_finished(run)
    fields = {name: getattr(finished, name) for name in finished.__slots__} | changes
    return page_of(type(finished)(**fields))


def test_a_page_refers_to_nothing_outside_itself(run):
    page = a_page(run)
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)

    assert not re.search(
        r"https?://(?!www.w3.org/2000/svg)|//cdn|@import|<link|src=|url\((?!#)", outside
    )


def test_a_page_has_no_id_twice(run):
    ids = re.findall(r' id="([^"]+)"', a_page(run))

    assert len(ids) == len(set(ids))


def data_of(page):
    """Return what the page's script draws."""
    (held,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return orjson.loads(held)


def test_every_chart_is_told_in_words_and_has_its_figures(run):
    page = a_page(run)
    data = data_of(page)

    assert len(re.findall(r'<figure role="img" aria-label="[^"]{20,}"', page)) == 6
    assert {chart["id"] for chart in data["charts"]} == set(
        re.findall(r'<div class="plot" id="([^"]+)"', page)
    )
    for chart in data["charts"]:
        held = data["runs"][0][chart["of"]]
        assert [line["key"] for line in chart["lines"] if line["key"] not in held] == []
    assert {"plot-lr", "plot-grad_norm"} <= {chart["id"] for chart in data["charts"]}


def test_changes_of_the_mix_are_listed_and_drawn(run):
    assert "Changes of the mix" not in a_page(run)
    mix = read_finished(run).mix
    write_history(run, History(mix).edited(SetWeights(weights={"web": 0.5}), 4))

    page = a_page(run)

    assert "Changes of the mix" in page
    assert "set web=0.5" in page
    assert data_of(page)["runs"][0]["edits"] == [{"number": 1, "step": 4, "text": "set web=0.5"}]


def test_another_run_stands_beside_it(run, tmp_path):
    (tmp_path / "other").mkdir()
    other = a_run_folder(tmp_path / "other", a_mix(), [an_event("start"), a_step(0, loss=7.0)])

    write_report(run, beside=other)

    page = (run / "report.html").read_text()
    assert [len(each["x"]["step"]) for each in data_of(page)["runs"]] == [6, 1]
    assert "other/run: 7.00" in page


def test_a_run_that_goes_on_has_a_page_that_is_read_again(run):
    write_report(run, reload_s=30.0)

    page = (run / "report.html").read_text()
    assert data_of(page)["reload_s"] == 30
    assert "Running; this page reads itself again" in page
    assert data_of(a_page(run))["reload_s"] is None


def test_the_report_is_written_while_a_run_goes_on_and_when_it_has_new_lines(run, monkeypatch):
    written, wrote = [], threading.Event()

    def write(folder, *, reload_s):
        written.append((folder, reload_s))
        wrote.set()

    monkeypatch.setattr(report, "write_report", write)
    monkeypatch.setattr(report, "_LEAST_S", 0.001)
    with report.kept_report(run):
        assert wrote.wait(30)
        wrote.clear()
        before = len(written)
        os.utime(run / "log.jsonl", ns=(1, 1))
        assert wrote.wait(30)

    assert before == 1
    assert {folder for folder, _ in written} == {run}


@pytest.mark.parametrize("refusal", [StateError("no step yet"), ConfigError("no jinja2")])
def test_a_report_that_cannot_be_written_does_not_end_the_run(run, monkeypatch, refusal):
    asked = threading.Event()

    def refuse(*_arguments, **_words):
        asked.set()
        raise refusal

    monkeypatch.setattr(report, "write_report", refuse)
    monkeypatch.setattr(report, "_LEAST_S", 0.001)
    with report.kept_report(run):
        assert asked.wait(30)


def test_a_page_names_the_kill_and_the_resume(run):
    page = a_page(run)

    assert "rank 1: signal SIGKILL" in page
    assert "resumed from step 2" in page
    assert "1 failure survived" in page
    assert "2 steps run again" in page


def test_a_page_without_a_proof_says_how_to_get_one(run):
    assert "omniload train verify" in a_page(run)


@pytest.mark.parametrize(
    ("logged", "verdict"),
    [("aa", "Proved: same samples as an unbroken run"), ("bb", "Samples differ")],
)
def test_a_page_gives_the_verdict_of_the_proof(run, logged, verdict):
    step = StepProof(step=0, replayed="aa", logged=(logged,))

    assert verdict in a_page(run, proof=Proof(seconds=1.0, steps=(step,)))


def test_text_of_a_run_cannot_become_markup(tmp_path):
    cause = "rank 0: code 1: <script>alert(1)</script>"
    lines = [*a_killed_run(), an_event("exit", cause), an_event("restart", attempt=2)]
    run = a_run_folder(tmp_path, a_mix(), lines)

    page = a_page(run)

    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("</script>") == 2


def test_a_mix_by_samples_shows_shares_without_targets(tmp_path):
    stages = [{"from_step": 0, "weights": {"web": 1, "code": 1}}]
    mix = a_mix(mix={"level": "sample", "stages": stages})

    page = a_page(a_run_folder(tmp_path, mix, a_killed_run()))

    assert "count samples" in page
    assert "target at the step" not in page


def test_a_single_step_makes_a_page(tmp_path):
    run = a_run_folder(tmp_path, a_mix(), [an_event("start"), a_step(0)])

    assert "running or cut off" in a_page(run)


def test_a_run_that_somebody_holds_runs_and_has_not_ended(tmp_path):
    run = a_run_folder(tmp_path, a_mix(), [an_event("start"), a_step(0)])

    with RunLock(run):
        page = a_page(run)
        assert (
            read_finished(run).summary.outcome
            == f"running, in process {os.getpid()} on {socket.gethostname()}"
        )
    assert "When this was written: running, in process" in page
    assert "Ended: " not in page
    assert read_finished(run).summary.outcome.startswith("cut off: process")


def test_a_run_without_steps_has_no_page(tmp_path):
    run = a_run_folder(tmp_path, a_mix(), [an_event("start")])

    with pytest.raises(StateError, match="no step yet"):
        write_report(run)


def test_the_report_lies_whole_in_the_runs_folder(run):
    path = write_report(run)

    assert path == run / "report.html"
    assert path.read_text().rstrip().endswith("</html>")
    assert not [left for left in run.iterdir() if left.name.startswith(".")]


def test_a_missing_package_names_the_extra(run, monkeypatch):
    real = builtins.__import__

    def without_jinja(name, *rest, **named):
        if name == "jinja2":
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_jinja)

    with pytest.raises(ConfigError, match=r"jinja2, .*; pip install 'omniload-data\[report\]'"):
        write_report(run)


def test_show_prints_figures_and_shares(run):
    result = CliRunner().invoke(command, ["show", str(run)])

    assert result.exit_code == 0
    assert re.search(r"restarts +1 +2 steps run again", result.output)
    assert re.search(r"web +│ +3.6k │ 60.00% │ 60.00% │ +\+0.00", result.output)


def test_show_as_json_holds_the_same_figures(run):
    result = CliRunner().invoke(command, ["show", str(run), "--json"])
    shown = orjson.loads(result.output)

    assert (shown["steps"], shown["repeated_steps"], shown["proved"]) == (6, 2, None)
    (web,) = (source for source in shown["sources"] if source["name"] == "web")
    assert (web["name"], web["tokens"], web["share"]) == ("web", 3600, 0.6)
    assert web["target"] == pytest.approx(0.6)


def test_show_writes_the_report_when_asked(run):
    result = CliRunner().invoke(command, ["show", str(run), "--html", "--json"])

    assert result.exit_code == 0
    assert (run / "report.html").exists()


def test_a_launch_record_is_read_as_it_was_written(run):
    record = read_launch_record(run)

    assert record.train.steps == 100
    assert record.versions.keys() >= {"python", DISTRIBUTION, "torch"}


@pytest.mark.parametrize("content", ["", '{"version": 2}', "[]"])
def test_a_damaged_launch_record_is_refused(run, content):
    (run / LAUNCH_RECORD_NAME).write_text(content)

    with pytest.raises(StateError, match="not a record of this release"):
        read_launch_record(run)


def test_a_folder_without_a_launch_record_is_no_run(tmp_path):
    with pytest.raises(StateError, match="no record of a launch"):
        read_launch_record(tmp_path)


def test_a_step_fits_under_its_heading_and_in_80_columns():
    line = step_line(a_step(123_456, tokens=12_345_678, seconds=0.1, imbalance=12.3456))

    assert len(line) <= 80
    assert len(HEAD) == len(step_line(a_step(1)))


def test_a_step_shows_how_evenly_its_experts_are_busy_and_an_older_line_that_it_was_not_logged():
    assert step_line(a_step(1, expert_imbalance=1.375)).endswith("1.375")
    assert step_line(a_step(1, expert_imbalance=None)).endswith("        -")
    assert " 1.5G " in step_line(a_step(1, model_flops=3e9, seconds=2.0))


def test_rounding_never_puts_a_step_below_what_is_least_possible():
    line = a_step(1, imbalance=1.25 - 1e-9, bound=1.25)

    assert "-0.0" not in step_line(line)
    assert "   0.00000%" in step_line(line)


def test_an_event_tells_how_long_it_took():
    out = io.StringIO()
    display = RunDisplay(Console(file=out))

    display.observe(None, an_event("checkpoint", "step-00000002", took_s=0.254))

    assert "step-00000002 in 0.25 s" in out.getvalue()


_UNREAD = """
import sys
from tests.support.trainer.run_lines import an_event
from trainer_integration.report.display import JobConsole, RunDisplay
with RunDisplay(JobConsole()) as display:
    print("up", flush=True)
    sys.stdin.read()
    for _ in range(3):
        display.observe(None, an_event("start", "2 ranks"))
print("run folder", flush=True)
print("to its end", file=sys.stderr)
"""


def test_a_job_whose_output_nobody_reads_any_more_goes_on():
    """``srun omniload train run FILE | head``."""
    command = [sys.executable, "-c", _UNREAD]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT) as job:
        assert job.stdout.readline() == "up\n"
        job.stdout.close()
        job.stdin.close()
        said = job.stderr.read()

    assert (job.returncode, said) == (0, "to its end\n")


def test_a_page_shows_experts_saves_and_an_end_of_the_data_as_a_good_end(tmp_path):
    lines = a_killed_run()
    lines[-1] = an_event("end", "done: the data ended at step 6", seconds=12.0, attempt=1)
    imbalanced = [
        line.model_copy(update={"imbalance": 1 - 1e-9}) if isinstance(line, StepLine) else line
        for line in lines
    ]

    page = page_of(read_finished(a_run_folder(tmp_path, a_mix(), imbalanced)))

    assert "Completed: the data ended at step 6" in page
    assert "step-00000002 in 0.25 s" in page
    assert "Evenness of the experts" in page
    assert re.search(r"Experts</dt><dd class=.value.>1\.250", page)
    assert re.search(r"Saves</dt><dd class=.value.>0\.25 s", page)
    assert "-0.0" not in page


def test_a_page_of_a_run_without_those_figures_says_that_they_were_not_logged(tmp_path):
    lines = [a_step(0, expert_imbalance=None), an_event("checkpoint", "step-00000001", step=1)]

    page = page_of(read_finished(a_run_folder(tmp_path, a_mix(), lines)))

    assert page.count("not logged") >= 2
    assert "Evenness of the experts" not in page


def test_a_step_that_took_no_time_has_no_speed():
    assert " - " in step_line(a_step(1, seconds=0.0))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9, 40])
@pytest.mark.parametrize("length", [3, 12, 60])
def test_shares_fit_in_80_columns_whatever_the_names(count, length):
    shares = [
        SourceShare(name=f"{i:0{length}d}", tokens=1, share=1.0, target=1.0) for i in range(count)
    ]

    lines = share_lines(shares, "to step 1000000")

    assert max(map(len, lines)) <= 80
    assert sum(line.count("(100.0)") for line in lines) == min(count, 9)


def test_of_many_sources_those_farthest_from_their_targets_are_shown():
    shares = [
        SourceShare(name=f"s{i}", tokens=1, share=0.02, target=0.02 + 0.001 * i) for i in range(20)
    ]

    shown = " ".join(share_lines(shares, "so far"))

    assert "s19" in shown
    assert "s3 " not in shown


def displayed(lines, *, steps=6, width=80, run_dir=None):
    written = io.StringIO()
    with RunDisplay(Console(file=written, width=width)) as display:
        display.expect(steps, a_mix(), run_dir)
        for line in lines:
            display.observe(None, line)
    return written.getvalue().splitlines()


def test_shares_of_a_run_whose_mix_was_changed_are_shown_against_what_held(tmp_path):
    edited = History(a_mix()).edited(SetWeights(weights={"web": 0.0}), 0)
    write_history(tmp_path, edited)

    shown = "\n".join(displayed([a_step(3), a_step(4), a_step(5)], run_dir=tmp_path))

    assert "share of tokens of steps 3 to 5, and target (%)" in shown
    assert re.search(r"code +[\d.]+ \(100.0\) +web +[\d.]+ \(0.0\)", shown)


def test_a_pipe_gets_a_line_for_every_step_of_a_short_run_and_a_heading_for_each_attempt():
    shown = displayed(a_killed_run()[:4] + a_killed_run()[5:14])

    assert sum(line == HEAD for line in shown) == 2
    assert [int(line.split()[0]) for line in shown if re.match(r"\s+\d+\s+\d\.\d{3}\s", line)] == [
        0,
        1,
        2,
        3,
        2,
        3,
        4,
        5,
    ]


def test_a_long_run_shows_every_nth_step_and_the_last():
    shown = displayed([a_step(step) for step in range(203)], steps=203)
    steps = [int(line.split()[0]) for line in shown if re.match(r"\s+\d+\s+-?\d+\.\d{3}\s", line)]

    assert steps == [*range(0, 203, 10), 202]


def test_an_evaluation_is_shown_after_its_step_whatever_steps_are_shown():
    held_out = {f"s{n}": n / 10 for n in range(12)}
    lines = [a_step(step, evaluation=held_out if step == 7 else None) for step in range(203)]

    (shown,) = [line for line in displayed(lines, steps=203) if "evaluation" in line]

    assert "evaluation after step 7: s3 0.300, s4 0.400" in shown
    assert shown.endswith("s11 1.100 and 3 more")


def test_the_summary_and_the_page_tell_the_first_and_the_last_evaluation(run):
    lines = [a_step(0, evaluation={"web": 6.0}), a_step(1), a_step(2, evaluation={"web": 4.0})]
    summary = summary_of(lines, a_mix())
    written = io.StringIO()

    print_summary(Console(file=written, width=80), summary)
    page = a_page(run, lines=tuple(lines), summary=summary)

    assert re.search(
        r"evaluation +4\.000 +after step 2, from 6\.000 after step 0", written.getvalue()
    )
    assert "6.000 nats a label after step 0, 4.000 after step 2" in page
    assert data_of(page)["runs"][0]["figures"]["evaluation/web"] == [6.0, None, 4.0]


def test_what_routers_did_is_in_the_summary_and_drawn(run):
    lines = [
        a_step(
            n,
            router_entropy=1.2,
            drop_rate=0.25 * n,
            z_loss=0.1,
            expert_slots=tuple(range(20, 8, -1)),
        )
        for n in range(3)
    ]
    summary = summary_of(lines, a_mix())
    written = io.StringIO()

    print_summary(Console(file=written, width=80), summary)
    page = a_page(run, lines=tuple(lines), summary=summary)

    assert re.search(r"routers +1\.200 +.*choices dropped: 25\.00%", written.getvalue())
    assert "found no room at their expert: 25.00%" in page
    drawn = {line["key"] for chart in data_of(page)["charts"] for line in chart["lines"]}
    assert {"expert_imbalance", "router_entropy", "drop_rate"} <= drawn
    loads = {f"expert_load/{expert}" for expert in (0, 1, 2, 3, 8, 9, 10, 11)}
    assert {key for key in drawn if key.startswith("expert_load")} == loads
    assert loads <= set(data_of(page)["runs"][0]["figures"])
    assert "the 4 busiest and the 4 idlest of 12" in page


def test_each_number_that_a_step_tells_of_the_model_is_drawn(run):
    fields = StepFigures.model_fields
    told = {n: 0.5 for n in fields if n != "expert_slots" and not fields[n].is_required()}
    lines = tuple(a_step(step, **told) for step in range(2))

    page = a_page(run, lines=lines, summary=summary_of(lines, a_mix()))

    drawn = {line["key"] for chart in data_of(page)["charts"] for line in chart["lines"]}
    # Tokens are an axis, and slots have a line for each expert.
    assert fields.keys() - {"tokens", "expert_slots"} <= drawn


def test_a_long_error_stays_one_line_in_a_pipe():
    cause = "rank 0: code 4: [bracketed] " + "x" * 300

    shown = displayed([an_event("exit", cause)])

    assert [line for line in shown if cause in line] == shown


def test_lines_of_figures_stay_within_80_columns():
    shown = displayed([a_step(step) for step in range(6)])

    assert max(map(len, shown)) <= 80
    assert any("web" in line and "(50.0)" in line for line in shown)


def test_the_summary_stays_within_80_columns():
    written = io.StringIO()

    print_summary(Console(file=written, width=80), summary_of(a_killed_run(), a_mix()))

    assert max(map(len, written.getvalue().splitlines())) <= 80


def test_shares_of_nothing_are_none():
    assert source_shares([], a_mix()) == ()
