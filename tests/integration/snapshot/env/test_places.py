"""``omniload env`` as people run it: on HDFS, through omnifs, as nobody, under torchrun."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from typing_extensions import override

from snapshot.commands.env import command
from snapshot.env.node.cache import CACHE_VARIABLE
from tests.support.fusefs.model import fast_directory
from tests.support.programs import finished
from tests.support.snapshot.env_builders import discard
from tests.support.snapshot.env_wheels import a_quick_pip, a_venv, a_wheel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
MAIN = "from omniload.base.cli import main; main()"
NOBODY = 65534
SYSTEM_PYTHON = Path("/usr/bin/python3")


class Place:
    """An environment, a wheel to install into it, and the command in processes of its own."""

    def __init__(self, folder, url, variables=None):
        self.folder, self.url = folder, str(url)
        self.variables = {
            **os.environ,
            **(variables or {}),
            "PYTHONPATH": str(ROOT),
            CACHE_VARIABLE: str(folder / "cache"),
        }
        a_wheel(folder / "wheels", "tiny", modules={"data.txt": "some data" * 1000})
        self.python = a_venv(folder / "venv")

    def env(self, *words, code=0, store=True):
        """Run the command; return what it wrote to its standard output."""
        given = ["-o", self.url] if store else []
        line = [sys.executable, "-c", MAIN, "env", words[0], *given, *words[1:]]
        done = finished(list(map(str, line)), limit_s=250, cwd=self.folder, env=self.variables)
        assert done.returncode == code, done.stderr[-3000:]
        return done.stdout

    def installing(self):
        return ["--python", "venv", "--", *a_quick_pip(self.folder, self.python), "tiny"]

    def anew(self):
        a_venv(self.folder / "venv")
        if (self.folder / "cache").exists():
            (self.folder / "cache").rename(self.folder / f"cache-{os.urandom(4).hex()}")

    def version(self):
        words = [self.python, "-c", "import tiny; print(tiny.VERSION)"]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def saved_restored_and_pruned(place):
    """Go through the life of a snapshot; every step is a process that knows only the store."""
    key = place.env("save", *place.installing()).split()[0]
    place.anew()
    assert place.version() == ""

    told = json.loads(
        place.env("restore", "--auto", "--form", "link", "--json", *place.installing())
    )

    assert (told["key"], told["form"]) == (key, "link")
    assert told["stored_bytes"] > 0
    assert place.version() == "1.0"
    assert "there already" in place.env("restore", key, "--python", "venv", "--form", "link")
    assert key[:16] in place.env("show")
    assert "1 condemned" in place.env("prune", key, "--grace", "0s")
    assert "1 removed" in place.env("prune", "--grace", "0s")
    assert place.env("show") == ""
    place.env("umount", "--python", "venv", store=False)
    assert place.version() == ""


def test_a_snapshot_lives_and_ends_on_a_real_hdfs(tmp_path, hdfs):
    place = Place(tmp_path, f"{hdfs.url}/envs", hdfs.client_environment())

    saved_restored_and_pruned(place)


class HerePlace(Place):
    """The same with the command in this process, which has loaded what the store needs."""

    @override
    def env(self, *words, code=0, store=True):
        given = ["-o", self.url] if store else []
        done = CliRunner().invoke(command, list(map(str, [words[0], *given, *words[1:]])))
        assert done.exception is None, (done.output, done.exception)
        return done.stdout


def test_a_snapshot_lives_and_ends_in_a_striped_namespace(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()

    place = HerePlace(tmp_path, f"omnifs://envs::file://{tmp_path}/store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))

    saved_restored_and_pruned(place)

    assert (tmp_path / "store" / ".omnifs").exists()


WORKER = """
import os, sys, tiny
line = f"{os.environ['RANK']} {tiny.VERSION} {sys.prefix}\\n"
os.write(1, line.encode())
"""


def test_ranks_of_torchrun_import_what_was_restored_for_them(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "store").mkdir()
    place = Place(tmp_path, tmp_path / "store")
    key = place.env("save", *place.installing()).split()[0]
    place.anew()
    # As pip writes it: the launcher runs under the interpreter of the environment.
    launcher = tmp_path / "venv" / "bin" / "torchrun"
    launcher.write_text(f"#!{place.python}\nfrom torch.distributed.run import main\nmain()\n")
    launcher.chmod(0o755)
    (tmp_path / "train.py").write_text(WORKER)

    words = ["run", key, "--python", "venv", "--form", "link", "--", "torchrun", "--standalone"]
    shown = place.env(*words, "--nproc-per-node", "2", "train.py")

    prefix = tmp_path / "venv"
    assert sorted(shown.splitlines()) == [f"{rank} 1.0 {prefix}" for rank in (0, 1)]


AS_NOBODY = """
import importlib, os, pkgutil, sys
root, home, *words = sys.argv[1:]
sys.path.insert(0, root)
import difflib, encodings.ascii, encodings.utf_8_sig, encodings.latin_1
import fusefs.stores, snapshot.commands, snapshot.env
import fusefs.stores.url, fusefs.stores.retry, concurrent.futures.thread, subprocess
from omniload.base import cli, units
for package in (snapshot.env, snapshot.commands):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".env" in module.name:
            importlib.import_module(module.name)
# Loaded before, since nobody may not read an interpreter below /root; then nobody it is.
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.environ.clear()
os.environ.update(HOME=home, PATH="/usr/bin:/bin", LC_ALL="C.UTF-8")
cli.main(words)
"""


@pytest.fixture
def home():
    """A home of nobody; those that pytest makes are closed to others."""
    above = Path(ROOT).resolve().parents
    if closed := [str(folder) for folder in above if not folder.stat().st_mode & stat.S_IXOTH]:
        pytest.skip(f"this checkout lies in {min(closed)}, where other users may not look")
    folder = fast_directory("omniload-env-home-")
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    discard(folder)


def as_nobody(folder, *words, code=0):
    """Run the command as nobody does, with nothing but a home; return what it wrote."""
    done = finished(
        [sys.executable, "-c", AS_NOBODY, ROOT, folder, "env", *words], limit_s=120, cwd=folder
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEM_PYTHON.exists(),
    reason="OTHER USER NOT TESTED: needs root and an interpreter that everybody may run",
)
def test_nobody_saves_restores_verifies_and_prunes_with_the_command(home):
    make = [SYSTEM_PYTHON, "-I", "-m", "venv", "--without-pip", "--clear", home / "venv"]
    subprocess.run(make, check=True, user=NOBODY, group=NOBODY, extra_groups=[])
    site = next((home / "venv" / "lib").glob("python*/site-packages"))
    (home / "store").mkdir()
    os.chown(home / "store", NOBODY, NOBODY)
    there = ["-o", "store", "--python", "venv"]
    install = ["--", "sh", "-c", f"echo VERSION = 3 > {site}/tiny.py; rm -f {site}/old.py"]

    key = as_nobody(home, "save", *there, *install).split()[0]
    subprocess.run(make, check=True, user=NOBODY, group=NOBODY, extra_groups=[])
    told = as_nobody(home, "restore", "--auto", *there, *install)

    assert f"{key[:16]}: restored (link)" in told
    assert (site / "tiny.py").stat().st_uid == NOBODY
    assert "there already" in as_nobody(home, "restore", key, *there)
    assert key[:16] in as_nobody(home, "show", "-o", "store")
    refused = as_nobody(home, "restore", key, *there, "--form", "mount", code=3)
    assert "no overlay can be mounted here" in refused or "cannot be marked" in refused
    as_nobody(home, "umount", "--python", "venv")
    assert not (site / "tiny.py").exists()
    assert "freed in" in as_nobody(home, "prune", "--unused", "0s")
    assert list((home / ".cache" / "omniload" / "env" / "trees").iterdir()) == []


@pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEM_PYTHON.exists(),
    reason="OTHER USER NOT TESTED: needs root and an interpreter that everybody may run",
)
def test_nobody_is_told_what_an_environment_of_roots_needs(home):
    subprocess.run([SYSTEM_PYTHON, "-I", "-m", "venv", "--without-pip", home / "roots"], check=True)
    (home / "store").mkdir()
    os.chown(home / "store", NOBODY, NOBODY)

    told = as_nobody(home, "save", "-o", "store", "--python", "roots", "--", "true", code=4)

    assert f"user {NOBODY} may not" in told
    assert "use an environment and a node cache" in told
