"""Log lines of roles in the folder of a run: their role, their number, and what they never contain."""

import io
import logging
import os
import stat
import sys

import pytest

from omniload.base import log
from omniload.base.log import (
    RoleLogs,
    get_logger,
    last_line_of,
    log_name,
    logs_folder,
    place_of_lines,
    set_up_logging,
    speak_for,
)
from omniload.base.secrets import note_secret


@pytest.fixture(autouse=True)
def _no_earlier_plane(monkeypatch):
    monkeypatch.setattr(RoleLogs, "latest", None)
    yield
    speak_for(None)


@pytest.fixture
def logs(tmp_path):
    found = RoleLogs(logs_folder(tmp_path))
    yield found
    found.close()


def test_a_line_goes_to_the_role_that_the_thread_speaks_for_and_to_no_other(logs):
    planner, loader = logs.of("planner"), logs.of("loader-0")

    with planner.speaking():
        with loader.speaking():
            get_logger("omniload.test").warning("read again")
        get_logger("omniload.test").warning("plans")
    get_logger("omniload.test").warning("of nobody")

    assert loader.path.read_text().count("\n") == 2
    assert "loader-0 begins in process" in loader.path.read_text()
    assert last_line_of(loader.path).endswith("WARNING read again")
    assert last_line_of(planner.path).endswith("WARNING plans")


def test_a_process_that_is_one_role_says_everything_for_it(logs):
    speak_for(logs.of("loader-0"))

    get_logger("omniload.test").info("a small thing")

    assert last_line_of(logs.of("loader-0").path).endswith("INFO a small thing")


def test_the_files_are_their_users_alone(logs, tmp_path):
    path = logs.of("rank dp=0").path

    assert path == tmp_path / "logs" / "rank-dp=0.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("lies", ["link", "pipe", "folder"])
def test_what_is_no_file_of_this_user_is_not_written_to_and_the_run_goes_on(tmp_path, caplog, lies):
    folder = logs_folder(tmp_path)
    folder.mkdir()
    place, elsewhere = folder / log_name("planner"), tmp_path / "elsewhere"
    elsewhere.touch()
    if lies == "link":
        place.symlink_to(elsewhere)
    elif lies == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()

    assert RoleLogs(folder).of("planner") is None

    assert "planner writes no log" in caplog.text
    assert elsewhere.read_bytes() == b""


def test_secrets_are_taken_out_of_messages_and_tracebacks(logs):
    note_secret("hunter2hunter2")
    role = logs.of("loader-0")

    role.note(logging.WARNING, "s3://KEY:SECRETSECRET@bucket/a", ValueError("hunter2hunter2"))

    text = role.path.read_text()
    assert "ValueError: ***" in text
    assert "SECRETSECRET" not in text


def test_a_file_and_the_one_before_it_stay_and_a_line_is_cut(logs, monkeypatch):
    role = logs.of("loader-0")
    role.maxBytes = 40_000

    for number in range(20):
        role.note(logging.WARNING, f"{number} " + "x" * 20_000)

    assert sorted(path.name for path in role.path.parent.iterdir()) == [
        "loader-0.log",
        "loader-0.log.1",
    ]
    assert sum(path.stat().st_size for path in role.path.parent.iterdir()) <= 80_000
    assert "19 xxx" in role.path.read_text()
    assert role.path.read_text().endswith("characters more]\n")


def test_a_full_disk_loses_lines_and_says_so_once(logs, monkeypatch, caplog):
    role = logs.of("loader-0")

    class Full(io.StringIO):
        def flush(self):
            raise OSError("No space left on device")

    role.stream.close()
    role.stream = Full()
    for _ in range(3):
        role.note(logging.WARNING, "lost")

    assert caplog.text.count("lines are lost: No space left on device") == 1


def test_standard_error_gets_what_it_got_before(logs, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a program that has set up no logging
    role = logs.of("loader-0")

    with role.speaking():
        get_logger("omniload.test").warning("seen")
        set_up_logging()
        get_logger("omniload.test").info("seen too")

    assert out.getvalue().splitlines()[0] == "seen"
    assert out.getvalue().count("seen") == 2
    assert role.path.read_text().count("seen") == 2


def test_without_the_folder_of_a_run_nothing_is_written(tmp_path):
    assert RoleLogs(None).of("planner") is None
    assert RoleLogs(logs_folder(tmp_path / "on another host")).of("planner") is None
    assert place_of_lines("planner") == ""


def test_an_error_that_names_a_role_names_its_file(logs):
    path = logs.of("planner").path

    assert place_of_lines("the planner") == f"; its lines: {path}"
    assert place_of_lines("loader-9") == ""


def test_the_last_line_is_fit_for_a_terminal(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"first\n\x1b[31mred\x07 " + b"x" * 900 + b"\n\n")

    assert last_line_of(path).startswith(" [31mred  xxx")
    assert len(last_line_of(path)) == log._LONGEST_SHOWN
    assert last_line_of(tmp_path / "none") == ""
