"""Which interpreter is meant, what it says of itself, and under which variables commands run."""

import sys
from pathlib import Path

import pytest

from omniload.base.errors import ConfigError
from snapshot.env.key.interpreter import environment_of, find_python, probe
from tests.support.snapshot.env_builders import an_interpreter


def a_prefix(folder, name):
    python = Path(folder) / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    return python


def test_the_interpreter_that_is_named_is_meant(tmp_path):
    python = a_prefix(tmp_path, "env")
    other = a_prefix(tmp_path, "active")
    known = {"VIRTUAL_ENV": str(other.parents[1])}

    assert find_python(str(python), known) == str(python)
    assert find_python(str(tmp_path / "env"), known) == str(python)


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_else_the_active_environment_is_meant(tmp_path, variable):
    python = a_prefix(tmp_path, "active")

    assert find_python(None, {variable: str(tmp_path / "active")}) == str(python)


def test_else_the_interpreter_that_runs_is_meant():
    assert find_python(None, {}) == sys.executable


def test_a_link_to_an_interpreter_is_not_followed_out_of_its_environment(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)

    assert find_python(str(tmp_path), {}) == str(tmp_path / "bin" / "python")


def test_an_interpreter_that_is_not_there_is_a_clear_fault(tmp_path):
    with pytest.raises(ConfigError, match="no interpreter there; give --python"):
        find_python(str(tmp_path), {})


def test_an_interpreter_names_everything_a_wheel_is_chosen_by():
    interpreter = probe(sys.executable)

    identity = interpreter.identity
    assert identity["version"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert identity["cache_tag"] == sys.implementation.cache_tag
    assert interpreter.prefix == sys.prefix
    assert set(identity) == {
        "implementation", "version", "cache_tag", "soabi", "abiflags", "platform", "machine", "libc",
    }  # fmt: skip


def test_programs_of_the_environment_come_first(tmp_path):
    interpreter = an_interpreter(tmp_path)

    found = environment_of(interpreter, {"PATH": "/usr/bin", "HOME": "/root"})

    assert found["PATH"] == f"{interpreter.scripts}:/usr/bin"
    assert found["HOME"] == "/root"
    assert "VIRTUAL_ENV" not in found


def test_a_virtual_environment_is_named_to_its_commands(tmp_path):
    (tmp_path / "pyvenv.cfg").write_text("")

    assert environment_of(an_interpreter(tmp_path), {})["VIRTUAL_ENV"] == str(tmp_path)
