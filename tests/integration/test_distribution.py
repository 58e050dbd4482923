"""The wheel and the source archive, tried in a virtual environment that holds nothing else."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house.modules import ROOT

pytestmark = pytest.mark.slow
NOUNS = ("env", "fs", "image", "mix", "train")
LARGEST_BYTES = 400_000_000


def called(*words, env=None, **more):
    # Without the caller's: from a checkout on it, pip takes the package for installed.
    env = {k: v for k, v in (env or os.environ).items() if k != "PYTHONPATH"}
    words = [str(word) for word in words]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=280, env=env, **more
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    # A copy: building in place would leave folders in the checkout.
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    for name in filter(None, files):
        if name.split("/")[0] not in {"tests", "benchmarks", "docs"} and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    # By the setuptools of this environment, itself made from the package in a build of its own: that what builds
    # it is named in full is proven there.
    given = ["-q", "--no-deps", "--no-build-isolation", "-w", folder, tree]
    code, text = called(sys.executable, "-m", "pip", "wheel", *given)
    assert code == 0, text
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment with the wheel, and what it needs linked from this one: pip finds nothing missing.

    That an index has what it needs is proven where this environment is made, by the same constraints.
    """
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--python", folder]
    code, text = called(*pip, "install", "-q", "--no-compile", "--no-deps", wheel)
    assert code == 0, text
    site = next((folder / "lib").glob("python*")) / "site-packages"
    link_needs_of(next(iter(metadata.distributions(path=[str(site)]))), site)
    code, text = called(*pip, "check")
    assert code == 0, text
    return folder / "bin"


def link_needs_of(package, site):
    """Link the packages that one needs without an extra, those that they need, and so on."""
    asked, done = [(package, "")], set()
    while asked:
        package, extra = asked.pop()
        for need in map(Requirement, package.requires or ()):
            if need.marker is not None and not need.marker.evaluate({"extra": extra}):
                continue
            found = metadata.distribution(need.name)
            extras = {(found.name, each) for each in ("", *need.extras)} - done
            asked += [(found, each) for _, each in extras]
            if (found.name, "") in extras:
                link(found, site)
            done |= extras


def link(package, site):
    here = Path(package.locate_file("")).resolve()
    for file in package.files or ():
        source = Path(package.locate_file(file)).resolve()
        # Scripts lie beside it.
        if source.is_relative_to(here) and source.exists():
            target = site / source.relative_to(here)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def test_the_wheel_holds_the_packages_their_types_and_the_licence_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    tops = {name.split("/")[0] for name in names}
    packages = {"omniload", "fusefs", "snapshot", "trainer_integration"}
    assert {top for top in tops if ".dist-info" not in top} == packages
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_base_install_is_small(bare):
    site = next((bare.parent / "lib").glob("python*/site-packages"))

    size = sum(f.stat().st_blocks * 512 for f in site.rglob("*") if f.is_file())

    assert size <= LARGEST_BYTES


# Each of its words is loaded as the command line loads it, all in one process.
HELP_OF_ALL = """
import sys
import click
from click.testing import CliRunner
from omniload.base.cli import omniload

group = omniload.get_command(click.Context(omniload), sys.argv[1])
verbs = group.list_commands(click.Context(group))
assert verbs
for verb in verbs:
    done = CliRunner().invoke(omniload, [sys.argv[1], verb, "--help"])
    assert done.exit_code == 0 and "Usage:" in done.output, (verb, done.output, done.exception)
    print(verb)
"""


@pytest.mark.parametrize("noun", NOUNS)
def test_a_base_install_helps_with_every_noun_and_verb(bare, noun, tmp_path):
    code, text = called(bare / "omniload", noun, "--help", cwd=tmp_path)
    assert (code, "Traceback" in text) == (0, False), text
    shown = re.findall(r"^  (\w+)", text.split("Commands:")[1], re.MULTILINE)

    code, text = called(bare / "python", "-c", HELP_OF_ALL, noun, cwd=tmp_path)

    assert (code, text.split()) == (0, shown), text


def test_a_base_install_says_what_a_command_needs(bare, tmp_path):
    code, text = called(
        bare / "omniload", "fs", "verify", "hdfs+native://127.0.0.1:9/x", cwd=tmp_path
    )

    assert code == 2, text
    assert "pip install 'omniload-data[hdfs]'" in text
    assert "Traceback" not in text


def test_help_loads_no_noun(bare, tmp_path):
    """Loading all nouns takes over a second; the list of them needs none."""
    code, text = called(bare / "omniload", "--help", cwd=tmp_path)
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    _, imports = called(bare / "omniload", "--help", cwd=tmp_path, env=environment)

    assert code == 0
    assert all(noun in text for noun in NOUNS)
    assert [
        m for m in ("numpy", "pyarrow", "pydantic", "fusefs", "snapshot") if f" {m}\n" in imports
    ] == []


@pytest.mark.parametrize(
    ("set_before", "found"), [({}, "1000"), ({"MIMALLOC_PURGE_DELAY": "10"}, "10")]
)
def test_arrow_keeps_freed_memory_for_a_second_unless_the_user_has_said_otherwise(
    set_before, found
):
    environment = {k: v for k, v in os.environ.items() if k != "MIMALLOC_PURGE_DELAY"} | set_before
    asked = "import omniload, os, sys; print(os.environ['MIMALLOC_PURGE_DELAY'], 'pyarrow' in sys.modules)"

    code, text = called(sys.executable, "-c", asked, env=environment)

    assert (code, text.split()) == (0, [found, "False"]), text
