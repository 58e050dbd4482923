"""Commands started in images that are whole on the node: by the kernel alone once a trace is known."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snapshot.image.trace import decode_trace
from tests.support.erofs_mounts import LazyMount, needs_erofs, pushed
from tests.support.image_builders import a_member

pytestmark = pytest.mark.fuse

SHELL = Path(shutil.which("sh") or "/bin/sh").resolve()
MAIN = "from omniload.base.cli import main; main()"
COMMAND = ("/bin/sh", "-c", "read line < /etc/word && echo $line && echo new > /etc/other")


@pytest.fixture
def image(tmp_path):
    needs_erofs(tmp_path)
    linked = subprocess.run(["ldd", SHELL], check=True, capture_output=True, text=True).stdout
    members = [a_member("bin/sh", SHELL.read_bytes(), mode=0o755), a_member("etc/word", b"found\n")]
    libraries = [Path(path) for path in re.findall(r"(/\S+) \(0x", linked)]
    members += [a_member(str(path)[1:], path.read_bytes(), mode=0o755) for path in libraries]
    return pushed(tmp_path, members)


def start(image, folder, verb="run"):
    """Start the command; return what it printed, and whether FUSE showed the image."""
    log = folder / f"log-{verb}"
    log.unlink(missing_ok=True)
    words = [sys.executable, "-c", MAIN, "image", verb, image, "--log", log]
    words += ["--option", f"cache={folder / 'cache'}", "--scratch", folder, "--", *COMMAND]
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + log.read_text()
    return done.stdout, "shown through FUSE" in log.read_text()


def runs_of(folder):
    return [decode_trace(p.read_bytes(), name=str(p)).runs for p in folder.rglob("*.trace")]


def make_whole(image, folder):
    with LazyMount(image, folder, stream=True, bandwidth=0) as mounted:
        mounted.process.wait(60)


def test_a_start_that_is_known_and_whole_here_needs_no_fuse(image, tmp_path):
    make_whole(image, tmp_path)

    assert start(image, tmp_path) == ("found\n", True), "nothing is known: it is recorded"
    assert runs_of(tmp_path / "cache") == [1]
    assert start(image, tmp_path) == ("found\n", False)
    assert runs_of(tmp_path / "cache") == [1]


def test_a_start_of_an_image_that_is_not_whole_is_recorded_each_time(image, tmp_path):
    assert start(image, tmp_path) == ("found\n", True)
    assert start(image, tmp_path) == ("found\n", True)
    assert runs_of(tmp_path / "cache") == [2]


def test_who_asks_for_a_record_gets_one_whatever_is_here(image, tmp_path):
    make_whole(image, tmp_path)

    start(image, tmp_path)
    assert start(image, tmp_path, "record") == ("found\n", True)
    assert runs_of(tmp_path / "cache") == [2]
