import re
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Machine, Table, write_report

BENCHMARKS = Path(report.__file__).parent
BENCHMARK = str(BENCHMARKS / "planner/balance.py")


def a_machine(**changes):
    return Machine(**({"cpu": "Example 9000", "cores": 2, "memory_gib": 24} | changes))


def a_table(**changes):
    return Table(**({"columns": ("method", "ms"), "rows": (("none", "0.1"),)} | changes))


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "REPORTS", tmp_path / "reports")
    return tmp_path / "reports"


def test_a_table_is_written_as_markdown_under_its_caption():
    table = a_table(caption="Times")

    assert table.as_markdown() == "Times\n\n| method | ms |\n| --- | --- |\n| none | 0.1 |"


def test_a_bar_in_a_cell_does_not_open_a_column():
    assert "| a\\|b | 1 |" in a_table(rows=(("a|b", 1),)).as_markdown()


def test_a_row_of_the_wrong_width_is_refused_with_its_number():
    with pytest.raises(ValueError, match=r"rows\[1\] has 1 cells under 2 columns"):
        a_table(rows=(("none", "1"), ("greedy",)))


def test_the_file_is_named_by_date_hardware_and_topic(reports):
    path = write_report(
        BENCHMARK, "balance", "Balance", "cmd", [a_table()], "Good.", machine=a_machine()
    )

    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}-2core-balance\.md", path.name)


@pytest.mark.parametrize("folder", ["", "planner", "fusefs"])
def test_a_report_lies_where_its_benchmark_does(folder, reports):
    benchmark = str(BENCHMARKS / folder / "x.py")

    path = write_report(benchmark, "x", "X", "cmd", [a_table()], "Good.")

    assert path.parent == reports / folder


def test_a_report_of_something_that_is_no_benchmark_is_refused(reports, tmp_path):
    with pytest.raises(ValueError, match=r"x.*benchmarks"):
        write_report(str(tmp_path / "x/y.py"), "y", "Y", "cmd", [a_table()], "Good.")


def test_an_accelerator_is_part_of_the_name_and_of_the_hardware(reports):
    machine = a_machine(accelerator="NVIDIA H100")

    path = write_report(BENCHMARK, "train", "Train", "cmd", [a_table()], "Good.", machine=machine)

    assert path.name.endswith("-2core-nvidia-h100-train.md")
    assert "Example 9000, 2 cores, 24 GiB memory, NVIDIA H100" in path.read_text()


def test_a_report_holds_what_is_needed_to_repeat_it(reports):
    path = write_report(
        BENCHMARK, "x", "Balancing", "python -m benchmarks.x", [a_table()], "So it is."
    )

    text = path.read_text()
    assert text.startswith("# Balancing\n")
    for fact in ("**Date**: ", "**Hardware**: ", "**Command**: `python -m benchmarks.x`"):
        assert fact in text
    assert "**Commit**: " in text
    assert text.endswith("So it is.\n")


def test_a_tree_without_git_is_reported_as_such(monkeypatch):
    def fails(*_arguments):
        raise OSError("no git")

    monkeypatch.setattr(report, "_git", fails)

    assert report.commit() == "unknown (not a git tree)"


def test_local_changes_are_told_beside_the_commit(monkeypatch):
    answers = {"rev-parse": "abc1234", "status": " M omniload/plan/balance_methods.py"}
    monkeypatch.setattr(report, "_git", lambda _root, verb, *_rest: answers[verb])

    assert report.commit() == "abc1234 with local changes"


def test_a_printed_table_shows_every_cell(capsys):
    report.print_table(a_table())

    shown = capsys.readouterr().out
    assert "method" in shown
    assert "none" in shown
