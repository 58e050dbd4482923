"""``omniload env`` on a real environment: pip installs tiny wheels, everything else is ours."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError, OmniloadError, StateError
from snapshot.commands.env import command
from snapshot.env.node.cache import CACHE_VARIABLE
from snapshot.env.store.access import StoreMissingError
from snapshot.startup.events import LOG_VARIABLE
from snapshot.startup.reading import parse_event
from tests.support.programs import finished
from tests.support.snapshot.env_wheels import a_quick_pip, a_venv, a_wheel, pip_words

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an environment, wheels, a store and a requirement file."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("OMNILOAD_BASE_IMAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    a_venv(tmp_path / "venv")
    a_wheel(tmp_path / "wheels", "tiny", modules={"data.txt": "some data"})
    a_wheel(tmp_path / "wheels", "other", "2.0", requires=["tiny"])
    (tmp_path / "requirements.txt").write_text("tiny==1.0\n")
    (tmp_path / "store").mkdir()
    yield tmp_path
    run("umount", "--python", "venv", "--lazy", fails=None)


def run(*words, fails=False):
    """Run the command; return what it printed, or the error it ends with."""
    result = CliRunner().invoke(command, list(map(str, words)), prog_name="omniload env")
    if fails is None:
        return result
    if fails:
        assert isinstance(result.exception, OmniloadError), result.output
        return result.exception
    assert result.exception is None, (result.output, result.exception)
    return result.stdout


def installing(folder, *words):
    given = words or ("-r", "requirements.txt")
    return ["--", *a_quick_pip(folder, folder / "venv" / "bin" / "python"), *given]


def save(folder, *options, words=()):
    shown = run("save", "-o", "store", "--python", "venv", *options, *installing(folder, *words))
    return shown.splitlines()[0]


def version_in(folder, name="tiny"):
    python = folder / "venv" / "bin" / "python"
    words = [python, "-c", f"import {name}; print({name}.VERSION, {name}.__file__)"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None


@pytest.mark.parametrize("key", [(), ("0" * 64,), ("0123abcd",)], ids=["auto", "key", "short key"])
def test_a_store_that_is_not_there_keeps_no_command_from_running(place, caplog, key):
    (place / "store").rmdir()
    asked = ["restore", *(key or ["--auto"]), "-o", "store", "--python", "venv"]

    shown = run(*asked, *installing(place))

    assert "no snapshot, installed and not saved" in shown
    assert "store 'store' is not there; make the folder, or mount what it lies on" in caplog.text
    assert version_in(place)[0] == "1.0"
    assert not (place / "store").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("save", "-o", "store", "--python", "venv", "--", "true"),
        ("show", "-o", "store"),
        ("restore", "0" * 64, "-o", "store", "--python", "venv"),
        ("prune", "-o", "store"),
    ],
    ids=lambda words: words[0],
)
def test_where_nothing_can_be_done_without_the_store_it_is_said_what_is_missing(place, words):
    (place / "store").rmdir()

    error = run(*words, fails=True)

    assert isinstance(error, ConfigError)
    assert "store 'store' is not there; make the folder" in str(error)


def test_what_pip_installed_is_restored_with_its_script_and_its_byte_code(place):
    pip = pip_words(place / "venv" / "bin" / "python", place / "wheels", "-r", "requirements.txt")
    key = run("save", "-o", "store", "--python", "venv", "--", *pip).splitlines()[0]
    a_venv(place / "venv")
    assert version_in(place) is None

    run("restore", key[:12], "-o", "store", "--python", "venv")

    version, file = version_in(place)
    assert version == "1.0"
    assert Path(file).is_relative_to(place / "venv")
    assert list(Path(file).parent.glob("__pycache__/__init__*.pyc"))
    script = subprocess.run(["venv/bin/tiny-version"], capture_output=True, text=True, check=True)
    assert script.stdout == "1.0\n"
    assert "there already" in run("restore", key, "-o", "store", "--python", "venv")
    run("umount", "--python", "venv")
    assert version_in(place) is None


def test_auto_finds_the_key_from_the_request_and_records_where_there_is_none(place):
    words = [
        "--auto",
        "-o",
        "store",
        "--python",
        "venv",
        "--form",
        "copy",
        "--json",
        *installing(place),
    ]

    first = json.loads(run("restore", *words))
    again = json.loads(run("restore", *words))
    a_venv(place / "venv")
    anew = json.loads(run("restore", *words))
    (place / "requirements.txt").write_text(
        "# the same, with a comment\n\n  tiny==1.0  # here too\n"
    )
    same = json.loads(run("restore", *words))
    (place / "requirements.txt").write_text("other==2.0\n")
    other = json.loads(run("restore", *words))

    assert (first["form"], first["saved"]) == ("command", True)
    assert (again["form"], again["already"]) == ("command", True)
    assert (anew["form"], anew["already"]) == ("copy", False)
    assert (same["key"], same["already"]) == (first["key"], True)
    assert (other["form"], other["saved"]) == ("command", True)
    assert other["key"] != first["key"]
    assert version_in(place, "other")[0] == "2.0"


def test_show_lists_and_tells(place):
    one = save(place)
    a_venv(place / "venv")
    (place / "requirements.txt").write_text("other\n")
    two = save(place, "--base-image", "sha256:abc")

    listed = run("show", "-o", "store").splitlines()
    told = run("show", one, "-o", "store")
    as_json = json.loads(run("show", two, "-o", "store", "--json"))
    every = json.loads(run("show", "-o", "store", "--json"))

    assert {line[:16] for line in listed} == {one[:16], two[:16]}
    assert "tiny==1.0" in told
    assert as_json["distributions"] == ["other==2.0", "tiny==1.0"]
    assert {each["key"] for each in every} == {one, two}
    assert as_json["document"]["base"]["image"] == "sha256:abc"
    assert as_json["document"]["requests"]["requirements"] == ["other"]


def test_extra_inputs_and_targets_are_part_of_the_key_and_the_snapshot(place, monkeypatch):
    (place / "extra").mkdir()
    monkeypatch.setenv("FLAVOUR", "one")
    (place / "x.cfg").write_text("1")
    script = ["--", sys.executable, "-c", "open('extra/made', 'w').write('made')"]
    options = ["-o", "store", "--python", "venv", "--target", "extra"]
    inputs = ["--input", "x.cfg", "--input-env", "FLAVOUR"]
    key = run("save", *options, *inputs, *script).splitlines()[0]
    (place / "extra" / "made").unlink()

    told = json.loads(
        run("restore", "--auto", *options, *inputs, "--json", "--form", "copy", *script)
    )
    assert told["key"] == key
    assert (place / "extra" / "made").read_text() == "made"
    monkeypatch.setenv("FLAVOUR", "two")
    run("umount", "--python", "venv", "--target", "extra")
    other = json.loads(run("restore", "--auto", *options, *inputs, "--json", *script))
    assert other["key"] != key
    assert str(place / "x.cfg") not in run("show", key, "-o", "store", "--json")


def test_run_becomes_the_command_in_the_restored_environment(place):
    save(place)
    a_venv(place / "venv")
    install = " ".join(installing(place)[1:])
    words = [sys.executable, "-m", "omniload_main", "env", "run", "--auto", "--install", install]
    words += ["-o", "store", "--python", "venv", "--form", "copy", "--"]
    words[1:3] = ["-c", "from omniload.base.cli import main; main()"]
    words += ["python", "-c", "import tiny, sys; print(tiny.VERSION, sys.prefix); sys.exit(7)"]

    done = finished(
        words, limit_s=240, env={**os.environ, "PYTHONPATH": str(ROOT), LOG_VARIABLE: "log"}
    )

    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == ["1.0", str(place / "venv")]
    assert "restored (copy)" in done.stderr
    assert "environment: " in done.stderr
    begin, end = map(parse_event, (place / "log").read_text().splitlines())
    assert (begin.event, end.event, end.stage) == ("begin", "end", "environment")
    assert end.bytes["store"] > 0


def as_program(folder, *words):
    """Run the command in a process of its own."""
    main = [sys.executable, "-c", "from omniload.base.cli import main; main()", "env"]
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    return finished([*main, *words], limit_s=240, env=known, cwd=folder)


def test_what_a_command_prints_does_not_mix_with_the_key(place):
    script = ["--", "sh", "-c", "echo much ado; touch venv/bin/made"]

    done = as_program(place, "save", "-o", "store", "--python", "venv", *script)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 65
    assert "much ado" in done.stderr


def test_run_leaves_signals_as_a_shell_would(place):
    key = save(place)
    words = ["run", key, "-o", "store", "--python", "venv", "--form", "link", "--"]
    script = "grep SigIgn /proc/self/status; kill -TERM $$"

    done = as_program(place, *words, "sh", "-c", script)

    assert done.returncode == -15
    ignored = int(done.stdout.split()[1], 16)  # whoever started the tests may ignore others
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_a_system_call_that_fails_is_told_with_a_remedy(place, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", str(place / "cache"))

    key = save(place)
    monkeypatch.setattr("snapshot.env.node.extraction.provide", full)
    told = str(run("restore", key, "-o", "store", "--python", "venv", fails=True))
    monkeypatch.setattr("snapshot.env.target.environment.Environment.locked", closed)
    denied = str(run("umount", "--python", "venv", fails=True))

    assert "no space is left; free some, or name a node cache" in told
    assert "may not: Permission denied; use an environment" in denied


def closed(_):
    raise PermissionError(13, "Permission denied", "/venv/.omniload-env")


def test_saving_is_a_stage_of_its_own_in_the_log(place, monkeypatch):
    monkeypatch.setenv(LOG_VARIABLE, str(place / "log"))

    save(place)

    events = [parse_event(line) for line in (place / "log").read_text().splitlines()]
    assert [event.stage for event in events] == ["environment_save"] * 2


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["restore", "0" * 64, "-o", "store"], StateError, "no snapshot 0000"),
        (["restore", "12ab", "-o", "store"], StateError, "begins 0 keys"),
        (["restore", "0" * 64, "-o", "nowhere"], StoreMissingError, "is not there"),
        (
            ["restore", "--auto", "-o", "store", "--python", "no"],
            ConfigError,
            "no interpreter there",
        ),
        (["show", "0" * 64, "-o", "store"], StateError, "no snapshot"),
        (["umount"], StateError, "holds no snapshot"),
        (["run", "0" * 64, "-o", "store"], ConfigError, "no command to run"),
        (["run", "--auto", "-o", "store", "--", "true"], StateError, "installs in --install"),
        (
            ["run", "--auto", "--install", "pip 'x", "-o", "store", "--", "true"],
            ConfigError,
            "No closing quotation",
        ),
        (
            ["run", "--auto", "--install", "true", "-o", "store", "--", ""],
            ConfigError,
            "'' cannot be run",
        ),
        (
            ["save", "-o", "store", "--target", "/", "--", "true"],
            ConfigError,
            "holds the whole prefix",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_told_with_a_remedy(place, words, error, message):
    if words[0] != "show" and "--python" not in words:
        words[1:1] = ["--python", "venv"]
    if words[0] == "restore" and "--auto" in words:
        words += ["--", "true"]

    found = run(*words, fails=True)

    assert type(found) is error
    assert message in str(found)
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN, (
        "of this process, not of what it was to become"
    )


def test_a_key_that_is_not_there_falls_back_to_the_command_and_says_that_keys_differ(place):
    result = run(
        "restore", "0" * 64, "-o", "store", "--python", "venv", *installing(place), fails=None
    )

    assert result.exception is None
    assert "installed and saved" in result.stdout
    assert "has key" in result.stderr
    assert version_in(place)[0] == "1.0"


def test_the_command_loads_nothing_that_a_warm_restore_does_without():
    heavy = ("pydantic", "rich", "zstandard", "orjson", "pyarrow", "fusefs", "importlib.metadata")
    told = f"import sys, snapshot.commands.env; print(*(set({heavy}) & sys.modules.keys()))"

    done = subprocess.run(
        [sys.executable, "-c", told],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.split() == []
