"""What the runner of foreign suites reads, and the rows of the loader benchmark."""

from pathlib import Path

from benchmarks.loaders.dataloader import rows_of
from benchmarks.loaders.suites import deviations_in, needless, outcomes_in, unlisted
from benchmarks.loaders.work import Turn

REPORT = """<testsuites><testsuite>
<testcase classname="test_dataloader.TestLoader" name="test_a" />
<testcase classname="test_dataloader.TestLoader" name="test_b"><failure message="no" /></testcase>
<testcase classname="test_dataloader.TestLoader" name="test_c"><skipped /></testcase>
<testcase classname="test_dataloader.TestLoader" name="test_d"><error /></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_by_class_and_case():
    assert outcomes_in(REPORT) == {
        "TestLoader.test_a": "passed",
        "TestLoader.test_b": "failed",
        "TestLoader.test_c": "skipped",
        "TestLoader.test_d": "failed",
    }


def test_only_what_theirs_passes_and_nobody_explained_is_missing():
    theirs = {"a": "passed", "b": "failed", "c": "passed", "d": "passed", "e": "skipped"}
    ours = {"a": "passed", "b": "failed", "c": "failed", "e": "failed"}

    assert unlisted(theirs, ours, {"c": "why"}) == ["d"]


def test_a_row_of_what_both_pass_is_needless():
    theirs = {"a": "passed", "b": "passed", "c": "skipped"}
    ours = {"a": "passed", "b": "failed", "c": "skipped"}
    listed = dict.fromkeys("abcd", "why")

    assert needless(theirs, ours, listed) == ["a"]


def test_the_published_page_lists_cases_with_reasons():
    page = "| case | reason |\n| --- | --- |\n| `T.test_x` | it asks for a name |\n"

    assert deviations_in(page) == {"T.test_x": "it asks for a name"}
    published = Path(__file__).parents[4] / "docs/how-to/trainers/dataloader-deviations.md"
    assert all(deviations_in(published.read_text(encoding="utf-8")).values())


def test_ratios_are_of_turns_beside_each_other():
    turns = {
        "torch": [Turn(rate=rate, cpu_ms=2) for rate in (10, 20, 100)],
        "ours": [Turn(rate=rate, cpu_ms=1) for rate in (20, 60, 100)],
    }
    torchs, ours = rows_of(("tokens", 2, True), turns)

    assert torchs == ("tokens, read", "2", "torch", "20", "10", "2.00", "2.00")
    assert ours[-1] == "1.00"
