"""The runner of foreign suites: where a suite does not run, and what processes of its cases have."""

import sys

import pytest
from click.testing import CliRunner

from benchmarks.loaders import suites
from benchmarks.loaders.suites import main


@pytest.fixture(autouse=True)
def suites_start_warm(warm_python, monkeypatch):
    """Fork a suite from a process that has torch loaded; what its cases start loads it anew."""
    monkeypatch.setattr(sys, "executable", warm_python.path)


def test_a_suite_that_cannot_be_collected_is_told(tmp_path):
    (tmp_path / "test_suite.py").write_text("import nothing_of_this_name\n")

    done = CliRunner().invoke(main, ["--torch", str(tmp_path / "test_suite.py")])

    assert done.exit_code == 1
    assert "did not run with theirs" in done.output


def test_a_process_that_a_case_starts_has_the_loader_under_test_too(tmp_path):
    """Cases of PyTorch's that look for hangs and crashes start one by ``spawn``: it imports everything anew."""
    (tmp_path / "test_suite.py").write_text(
        "import multiprocessing\n"
        "import torch.utils.data\n"
        "def told(answer):\n"
        "    answer.put(torch.utils.data.DataLoader.__module__)\n"
        "class TestCase:\n"
        "    def test_child(self):\n"
        "        spawn = multiprocessing.get_context('spawn')\n"
        "        answer = spawn.Queue()\n"
        "        child = spawn.Process(target=told, args=(answer,))\n"
        "        child.start()\n"
        "        found = answer.get(timeout=60)\n"
        "        child.join(60)\n"
        "        assert found.startswith('trainer_integration'), found\n"
    )

    outcomes = suites._run(tmp_path / "test_suite.py", "ours", 120, "")

    assert outcomes == {"TestCase.test_child": "passed"}
