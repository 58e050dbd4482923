"""What an interpreter said is believed exactly as long as nothing moved that it said it from."""

import json
import os
import sys
from pathlib import Path

import pytest

from snapshot.env import describe
from snapshot.env.interpreter import probe
from snapshot.env.interpreter_memory import Memory

SAID = {"executable": "/e/bin/python", "version": "3.11.7"}


@pytest.fixture
def place(tmp_path):
    """An interpreter with a configuration beside it, a witness, a program that asks, and a memory."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").write_text("an interpreter")
    (tmp_path / "env" / "pyvenv.cfg").write_text("home = /usr/bin")
    for name in ("library.py", "ask.py"):
        (tmp_path / name).write_text("1")
    return tmp_path


def memory_in(place, program="ask.py"):
    return Memory(place / "cache", str(place / program))


def python_in(place):
    return str(place / "env" / "bin" / "python")


def kept(place):
    memory = memory_in(place)
    memory.keep(python_in(place), SAID, [str(place / "library.py"), python_in(place)])
    return memory


def test_what_was_kept_is_recalled(place):
    assert memory_in(place).recall(python_in(place)) is None

    assert kept(place).recall(python_in(place)) == SAID


@pytest.mark.parametrize(
    "change",
    [
        lambda place: (place / "library.py").write_text("other"),
        lambda place: os.utime(place / "library.py", ns=(1, 1)),
        lambda place: (place / "library.py").unlink(),
        lambda place: (place / "env" / "pyvenv.cfg").write_text("home = /opt/bin"),
        lambda place: (place / "env" / "pyvenv.cfg").unlink(),
        lambda place: (place / "env" / "bin" / "python").write_text("another interpreter"),
        lambda place: (place / "ask.py").write_text("asks for more"),
    ],
    ids=["bytes", "time", "gone", "configuration", "none", "interpreter", "program"],
)
def test_nothing_is_recalled_once_a_witness_has_changed(place, change):
    memory = kept(place)
    change(place)

    assert memory.recall(python_in(place)) is None


def test_an_environment_made_anew_with_the_same_configuration_is_known(place):
    memory = kept(place)
    configuration = place / "env" / "pyvenv.cfg"
    text = configuration.read_text()
    configuration.unlink()
    configuration.write_text(text)

    assert memory.recall(python_in(place)) == SAID


def test_a_link_that_leads_elsewhere_is_another_interpreter(place):
    other = place / "other-python"
    other.write_text("an interpreter")
    link = place / "env" / "bin" / "python3"
    link.symlink_to("python")
    memory = memory_in(place)
    memory.keep(str(link), SAID, [str(place / "library.py")])
    assert memory.recall(str(link)) == SAID
    link.unlink()
    link.symlink_to(other)

    assert memory.recall(str(link)) is None


def test_a_variable_that_is_heeded_asks_again(place, monkeypatch):
    memory = kept(place)
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")

    assert memory.recall(python_in(place)) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', '{"version": 9, "description": {}, "witnesses": []}']
)
def test_a_damaged_answer_is_no_answer(place, text):
    memory = kept(place)
    (path,) = (place / "cache" / "interpreters").iterdir()
    path.write_text(text)

    assert memory.recall(python_in(place)) is None


@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_may_write_is_not_believed(place, which):
    memory = kept(place)
    folder = place / "cache" / "interpreters"
    (folder if which == "folder" else next(folder.iterdir())).chmod(0o777)

    assert memory.recall(python_in(place)) is None
    memory.keep(python_in(place), {"executable": "/new"}, [])
    assert (memory.recall(python_in(place)) is None) == (which == "folder")


def test_a_cache_that_cannot_be_written_is_no_fault(place):
    (place / "cache").write_text("a file")
    memory = kept(place)

    assert memory.recall(python_in(place)) is None


def test_an_answer_is_kept_whatever_the_umask(place):
    before = os.umask(0o002)
    try:
        memory = kept(place)
    finally:
        os.umask(before)

    assert memory.recall(python_in(place)) == SAID


def test_the_interpreter_that_runs_is_remembered_with_its_own_files(tmp_path):
    memory = Memory(tmp_path, describe.__file__)

    asked = probe(sys.executable, memory)

    assert memory.recall(sys.executable) == describe.describe()
    assert probe(sys.executable, memory) == asked
    (path,) = (tmp_path / "interpreters").iterdir()
    named = [witness for witness, *_ in json.loads(path.read_bytes())["witnesses"]]
    assert named[0] == describe.__file__
    assert {os.path.realpath(sys.executable), os.__file__} <= set(named)
    assert all(map(os.path.isfile, named))
    assert Path(named[0]).name == "describe.py"
