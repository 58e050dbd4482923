"""kill -9 of an export when its copy is whole and not yet in place: the target is as it was."""

import subprocess
import sys

import pytest

from fusefs.stores.local.store import LocalStore
from fusefs.tools.export import export_file
from tests.support.fusefs.builders import some_files

BIG = bytes(range(256)) * 100
EXPORT = """
import signal, sys
from fusefs.cli import command
from fusefs.stores.local.store import LocalStore
def pause(*_):
    print("paused", flush=True)
    signal.sigwait({signal.SIGUSR1})
LocalStore.rename = pause
command(["export", "big", sys.argv[2], "--store", sys.argv[1], "--force"])
"""


@pytest.mark.scripts_start_warm
def test_a_killed_export_leaves_what_was_there_and_the_next_one_works(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "out").write_bytes(b"old")
    with some_files(LocalStore(tmp_path / "store")) as files:
        files.write_file("big", BIG)
    command = [sys.executable, "-c", EXPORT, tmp_path / "store", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"paused\n"
        process.kill()

    (partial,) = tmp_path.glob(".out.*.partial")
    assert partial.read_bytes() == BIG
    assert (tmp_path / "out").read_bytes() == b"old"
    with some_files(LocalStore(tmp_path / "store")) as files:
        export_file(files, "big", LocalStore(tmp_path), "out", lambda _: None)
    assert (tmp_path / "out").read_bytes() == BIG
