"""Consoles marked ``run`` are typed into a shell, one after the other, as a newcomer would."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.config import FilesConfig
from omniload.base.config import parse_yaml
from tests.docs.snippets import ROOT, blocks_of, documents, page_of

WALKED_FOR_REAL = "how-to/start-faster.md"
"""The page whose every command loads all that it needs; those of others are forked."""
LONG = {"how-to/running/break-it.md"}
"""Pages whose walk takes a minute: they start a job, and wait for its end."""
WALKS = [path for path in documents() if any("run" in block.info for block in blocks_of(path))]


def script_of(path):
    """Return the commands of a page's consoles to run, and how many they are."""
    walked = [block for block in blocks_of(path) if block.info == ("console", "run")]
    commands = [text for block in walked for _, text in block.commands()]
    return "\n".join(commands) + "\n", len(commands)


def mounts_below(folder):
    """Return the mount points below a folder, innermost first."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    points = (line.split()[1] for line in lines)
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


@pytest.fixture
def shell(work, monkeypatch):
    """Run a script as the user of a new machine would, and leave no mount behind."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    for name in list(os.environ):
        if name.startswith("OMNILOAD_"):
            monkeypatch.delenv(name)
    shutil.rmtree("corpus")

    def run(script):
        # Into a file: a daemon that is left behind would hold a pipe open.
        with Path("walk.log").open("w", encoding="utf-8") as log:
            done = subprocess.Popen(
                ["bash", "-exo", "pipefail", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                code = done.wait(timeout=240)
            except subprocess.TimeoutExpired:
                done.kill()
                code = done.wait()
        return code, Path("walk.log").read_text(encoding="utf-8")

    yield run
    left = mounts_below(work)
    for point in left:
        subprocess.run(["umount", "-l", point], check=False)
    assert left == []


@pytest.mark.fuse
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.soak, pytest.mark.ray] * (page_of(path) in LONG))
        for path in WALKS
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_consoles_of_a_page_run_one_after_the_other(path, shell, warm_commands, monkeypatch):
    if page_of(path) != WALKED_FOR_REAL:
        monkeypatch.setenv("PATH", f"{warm_commands.folder}:{os.environ['PATH']}")
    script, count = script_of(path)
    if " mount " in script and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("MOUNT NOT TESTED: no /dev/fuse")
    if "image run" in script and os.geteuid() != 0:
        pytest.skip("STARTS IN AN IMAGE NOT TESTED: needs root")
    for program in ("fusermount3", "umoci"):
        if shutil.which(program) is None:
            pytest.skip(f"NOT TESTED: {program} is not installed; run scripts/system_packages.sh")
    assert count

    code, told = shell(script)

    assert code == 0, told


def test_the_pages_of_files_and_of_starts_are_walked_through():
    assert {page_of(path) for path in WALKS} >= {"how-to/files.md", "how-to/start-faster.md"}


def test_the_settings_shown_for_a_mount_are_settings_of_a_mount():
    blocks = blocks_of(ROOT / "docs/how-to/files.md")
    (shown,) = (b.text for b in blocks if b.language == "yaml" and "striping:" in b.text)

    assert parse_yaml(shown, FilesConfig, name="files.yaml").striping_of("ckpt/a").count == 16


def test_a_command_that_fails_ends_the_walk(shell):
    code, told = shell("echo one\nfalse\necho two\n")

    assert code == 1
    assert "echo one" in told
    assert "two" not in told
