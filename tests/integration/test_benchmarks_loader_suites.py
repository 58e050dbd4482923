"""The runner of foreign suites, where a suite does not run."""

from click.testing import CliRunner

from benchmarks.loaders.suites import main


def test_a_suite_that_cannot_be_collected_is_told(tmp_path):
    (tmp_path / "test_suite.py").write_text("import nothing_of_this_name\n")

    done = CliRunner().invoke(main, ["--torch", str(tmp_path / "test_suite.py")])

    assert done.exit_code == 1
    assert "did not run with theirs" in done.output
