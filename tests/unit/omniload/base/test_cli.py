"""The command: nouns from entry points, errors to standard error, codes to the caller."""

import errno
import gc
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

from omniload import __version__
from omniload.base import cli
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    StateError,
    UnavailableError,
)

ERRORS = {}
ROOMS = ("omniload", "fusefs", "snapshot", "trainer_integration")
VARIABLE = re.compile(r"\bOMNILOAD_[A-Z_]+\b")
INTERNAL = "OMNILOAD_MARKS"
"""Tells a process that ends other processes which of them are its own; no user sets it."""


@click.command()
@click.argument("outcome")
def act(outcome):
    """Perform the requested outcome."""
    if outcome in ERRORS:
        raise ERRORS[outcome]
    errors = {
        "config": ConfigError("a.yaml:3: seed: wrong"),
        "gone": UnavailableError("no answer"),
        "state": StateError("another mix"),
        "bytes": IntegrityError("bad checksum"),
        "interrupt": KeyboardInterrupt(),
    }
    if outcome in errors:
        error = errors[outcome]
        if outcome == "gone":
            error.add_note("gave up after 2 attempts")
        raise error
    click.echo(f"did {outcome}")


@click.command()
def refuse():
    """Report whose fault it is."""
    click.echo("ours")


not_a_command = 3


@pytest.fixture(autouse=True)
def nouns(monkeypatch):
    """Entry points that lead into this module."""
    points = [
        EntryPoint("do", f"{__name__}:act", "omniload.commands"),
        EntryPoint("bad", f"{__name__}:not_a_command", "omniload.commands"),
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.value.split(":")[1]])
    monkeypatch.setattr(
        cli, "_entry_points", lambda *names: [p for p in points if not names or p.name in names]
    )
    monkeypatch.setattr(cli, "set_up_logging", lambda level: None)


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def test_a_noun_is_found_among_the_entry_points(capsys):
    assert run("do", "it") == 0
    assert capsys.readouterr().out == "did it\n"


@pytest.mark.parametrize(
    ("outcome", "code"), [("config", 2), ("gone", 3), ("state", 4), ("bytes", 5)]
)
def test_an_error_ends_the_command_with_its_own_code(outcome, code, capsys):
    assert run("do", outcome) == code

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")


def test_notes_follow_the_error(capsys):
    run("do", "gone")

    assert capsys.readouterr().err == "error: no answer\n  gave up after 2 attempts\n"


def test_an_interrupt_ends_the_command_with_130(capsys):
    assert run("do", "interrupt") == 130
    assert "interrupted" in capsys.readouterr().err


def test_an_unknown_noun_is_a_fault_of_the_input(capsys):
    assert run("brew") == 2
    assert "No such command 'brew'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("doo",), "omniload do"),
        (("top", "run"), "omniload mix top"),
        (("chekc",), "omniload mix check"),
        (("mount",), "omniload fs mount or omniload image mount"),
        (("mix", "stat"), "omniload mix stats"),
        (("train", "top", "run"), "omniload mix top"),
        (("mix", "verify", "run"), "omniload fs verify or omniload train verify"),
    ],
)
def test_a_name_that_no_command_has_is_told_with_what_may_be_meant(typed, meant, capsys):
    assert run(*typed) == 2
    said = capsys.readouterr().err
    program = said.removeprefix("Usage: ").partition(
        f" {typed[0]} [" if typed[0] in ("mix", "train") else " ["
    )[0]
    assert f"Did you mean {meant}?\n" in said.replace(program, "omniload")


def test_a_missing_argument_is_a_fault_of_the_input(capsys):
    assert run("do") == 2
    assert "Missing argument" in capsys.readouterr().err


def test_the_version_is_shown(capsys):
    assert run("--version") == 0
    assert __version__ in capsys.readouterr().out


def test_an_unknown_log_level_is_refused(capsys):
    assert run("--log-level", "LOUD", "do", "it") == 2
    assert "LOUD" in capsys.readouterr().err


def test_a_variable_that_nothing_reads_is_told_where_one_of_ours_may_be_meant(monkeypatch, capsys):
    monkeypatch.setenv("OMNILOAD_STARTUPLOG", "n1.jsonl")
    monkeypatch.setenv("OMNILOAD_JOB", "try")
    for somebodys_own in (
        *("FOO", "VERSION", "MARKS"),
        *("ENV_STORE_PORT", "ENV_STORE_SERVICE_PORT"),
    ):
        monkeypatch.setenv(f"OMNILOAD_{somebodys_own}", "x")

    assert run("do", "it") == 0

    told = "warning: nothing reads OMNILOAD_STARTUPLOG; did you mean OMNILOAD_STARTUP_LOG?\n"
    assert capsys.readouterr().err == told


def test_the_variables_that_are_known_are_those_that_modules_read():
    root = Path(cli.__file__).parents[2]
    modules = [path for room in ROOMS for path in (root / room).rglob("*.py")]
    read = {name for path in modules for name in VARIABLE.findall(path.read_text())}

    assert read - {INTERNAL} == set(cli.VARIABLES)
    reference = (root / "docs/reference/README.md").read_text()
    assert set(VARIABLE.findall(reference)) == set(cli.VARIABLES)


def test_our_nouns_lie_where_the_entry_points_of_this_distribution_say():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]

    places = {noun: place for noun, (place, _) in cli._OURS.items()}

    assert project["entry-points"]["omniload.commands"] == places


def test_what_the_list_says_of_a_noun_is_what_the_noun_says():
    for noun, (_, line) in cli._OURS.items():
        command = cli.omniload.get_command(None, noun)
        assert (noun, line) == (noun, command.get_short_help_str(limit=200))


def test_our_own_noun_is_not_taken_by_another_distribution(monkeypatch, capsys):
    monkeypatch.setitem(cli._OURS, "do", (f"{__name__}:refuse", "Refuse."))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[refuse.callback.__module__])

    assert run("do") == 0
    assert capsys.readouterr().out == "ours\n"


def test_the_nouns_of_all_distributions_are_listed():
    assert cli.omniload.list_commands(None) == sorted([*cli._OURS, "do", "bad"])


def test_the_list_of_verbs_loads_none(capsys):
    group = cli.Verbs(name="noun", verbs={"do": ("no_such_module:do", "Do it.")})

    assert group.main(["--help"], standalone_mode=False) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=1) == ["do", "Do it."]


@pytest.mark.parametrize("is_on", [True, False])
def test_a_command_is_loaded_without_looking_for_garbage(tmp_path, monkeypatch, is_on):
    (tmp_path / "a_verb.py").write_text(
        "import gc, click\ncollects = gc.isenabled()\n@click.command\ndef verb(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_verb", raising=False)
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        found = cli.Verbs(verbs={"verb": ("a_verb:verb", "")}).get_command(None, "verb")
        after = gc.isenabled()
    finally:
        (gc.enable if was_on else gc.disable)()

    assert found is sys.modules["a_verb"].verb
    assert (sys.modules["a_verb"].collects, after) == (False, is_on)


def test_a_fault_of_our_own_is_told_as_one_with_its_traceback(capsys):
    assert run("bad") == 1

    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "a fault of omniload itself" in shown.splitlines()[-1]
    assert "please report" in shown
    assert "try again" not in shown


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/x/y"), 2, "/x/y: No such file; correct"),
        (
            PermissionError(errno.EACCES, "Permission denied", b"/x"),
            2,
            "/x: Permission denied; get",
        ),
        (OSError(errno.EXDEV, "No space left", "/a"), 1, "a fault of omniload itself"),
        (
            OSError(errno.ENOSPC, "No space left", "/a", None, "/b"),
            3,
            "/a and /b: No space left; free",
        ),
        (OSError(errno.EBADF, "Bad file descriptor"), 1, "a fault of omniload itself"),
        (OSError("a decoder without a number"), 1, "a fault of omniload itself"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 3, "refused; see whether it can"),
        (MemoryError(), 3, "no memory is left"),
        (RecursionError("too deep"), 1, "a fault of omniload itself"),
        (ModuleNotFoundError("No module named 'ray'", name="ray"), 2, "needs the package ray"),
        (ModuleNotFoundError("No module named 'own'", name="own"), 1, "a fault of omniload itself"),
    ],
)
def test_what_the_system_refuses_is_told_with_its_remedy_and_what_is_ours_is_not_hidden(
    error, code, said, monkeypatch, capsys
):
    monkeypatch.setitem(ERRORS, "given", error)

    assert run("do", "given") == code

    shown = capsys.readouterr().err
    assert said in shown
    assert ("Traceback" in shown) == (code == 1)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_in_no_range(text):
    with pytest.raises(click.BadParameter, match=rf"'{text}' is no number to go by; give one"):
        cli.FiniteRange().convert(text, None, None)


def test_a_number_in_the_range_is_taken_and_another_refused():
    assert cli.FiniteRange(min=0).convert("2.5", None, None) == 2.5
    with pytest.raises(click.BadParameter, match="not in the range"):
        cli.FiniteRange(min=0).convert("-1", None, None)
