"""Consoles that stand alone on a page are typed as printed, beside a run, a mix and a training that they speak of."""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import orjson
import pytest
import yaml

from tests.docs.snippets import ROOT, blocks_of, documents, page_of
from tests.support.plane.edits.mix_commands import a_run

pytestmark = pytest.mark.slow

LIMIT_S = 600
STEPS = 1240
"""Of the run: pages look at steps up to 1234."""

TUTORIAL = "tutorial.md"
"""Typed from its first line to its last."""

TRAINED = ("omniload train s", "omniload train e", "omniload train w", "omniload mix top ")
"""Beginnings of commands that a training answers."""

ELSEWHERE = {
    r"omniload env ": "starts on hosts with stores: tests/integration/snapshot",
    r"omniload image ": "registries and mounts: tests/integration/snapshot",
    r"crictl |ctr ": "containerd: tests/integration/snapshot",
    r"podman ": "podman: tests/integration/snapshot",
    r"export ": "starts on hosts: tests/integration/snapshot",
    r"torchrun ": "ranks of a page's script, and several hosts: test_docs_torchrun.py, tests/integration",
    r"ip |for |echo |ranks=|omniload train verify ": "two hosts: test_docs_several_hosts.py, in soak",
    r"omniload train run ": "the tutorial here, and tests/integration/trainer_integration",
    r"omniload train crossover ": "all ranks of a job: tests/integration/trainer_integration",
    r"omniload mix tokenise ": "a mix with a cache: tests/integration/omniload",
    r"omniload mix simulate ": "minutes of a core: benchmarks/loaders/simulated.py",
    r"omniload mix import ": "files of other tools: tests/integration/omniload",
    r"mkdir /sys/fs/cgroup|.* > /sys/fs/cgroup": "groups of the kernel: the page's walk, in soak",
    r"python -m benchmarks.faults.chaos ": "half an hour: its reports",
    r"omniload mix sample ": "the fixtures of pages, and `make demo`",
    r"omniload mix set .*=2epochs": "a run that draws amounts: the page's own lines",
    r"omniload mix (watch RUN live|steer RUN steer).yaml$": "while a run goes on: the page's own lines",
    r"omniload mix top RUN$": "while a run goes on: tests/integration/omniload",
    r"omniload mix diff run-1 ": "runs of torchrun: tests/integration/omniload",
    r"omniload mix drawn mix.yaml --state ": "a state without a run: tests/integration/omniload",
}
"""How commands begin that are typed in other tests, and what they need."""


def commands_of(block):
    """Return the commands of a console, without the words beside them."""
    return [text.split("  #")[0].rstrip() for _, text in block.commands()]


def alone():
    """Return the scripts that type each command that no other test types, and the pages that it stands on."""
    found = defaultdict(set)
    for path in documents():
        blocks = blocks_of(path) if page_of(path) != TUTORIAL else ()
        for block in (block for block in blocks if block.info == ("console",)):
            commands = commands_of(block)
            for command in commands:
                if re.match("|".join(ELSEWHERE), command) is None:
                    # There is something to take back.
                    before = [commands[0]] if " undo " in command else []
                    found["\n".join([*before, command])].add(page_of(path))
    return found


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory):
    """Make a mix of which pages speak, and a run of it by four ranks."""
    folder = tmp_path_factory.mktemp("consoles") / "rest"
    folder.mkdir()
    files = {
        name: [f"{name}.jsonl"] for name in ("code", "forums", "books", "modules", "docstrings")
    }
    files["web"] = ["web-00016.jsonl", "web-00017.jsonl"]
    for paths in files.values():
        for path in paths:
            lines = (orjson.dumps({"text": f"{path} {i} " * 4}) for i in range(400))
            (folder / path).write_bytes(b"\n".join(lines))
    declared = {
        name: {"type": "jsonl", "path": paths} for name, paths in files.items() if name != "books"
    }
    mix = {
        "version": 2,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": declared,
        "mix": {"stages": [{"from_step": 0, "weights": dict.fromkeys(declared, 1)}]},
        "pack": {"length": 128},
        "batch": {"tokens": 1024, "micro_tokens": 128},
    }
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    books = {"sources": {"books": {"type": "jsonl", "path": "books.jsonl"}}}
    (folder / "books.yaml").write_text(yaml.safe_dump(books))
    steer = {"version": 1, "every": 500, "policy": {"type": "constant"}}
    (folder / "steer.yaml").write_text(yaml.safe_dump(steer))
    a_run(folder / "RUN", folder / "mix.yaml", dp=4, steps=STEPS)
    shutil.copytree(folder / "RUN", folder / "run")
    return folder


@pytest.fixture(scope="module")
def typed(warm_commands):
    """Type a script into a shell, in a folder; say how it ended, and what it said."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OMNILOAD_")}
    places = [warm_commands.folder, Path(sys.executable).parent, kept["PATH"]]

    def run(script, folder):
        variables = {
            "PATH": ":".join(map(str, places)),
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            ["bash", "-exo", "pipefail", "-c", script],
            cwd=folder,
            env=kept | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, typed):
    """Go through the tutorial; return its folder, with the run, and what the shell said."""
    folder = tmp_path_factory.mktemp("consoles") / "trained"
    folder.mkdir()
    said = []
    for block in blocks_of(ROOT / "docs" / TUTORIAL):
        if block.language == "yaml":
            name = "train.yaml" if "run_dir:" in block.text else "mix.yaml"
            (folder / name).write_text(block.text)
        elif block.language in {"python", "console"}:
            script = "\n".join(commands_of(block))
            if block.language == "python":
                (folder / "typed.py").write_text(block.text)
                script = "python typed.py\n"
            code, told = typed(script, folder)
            assert code == 0, f"{block.where}\n{told}"
            said.append(told)
    return folder, "\n".join(said)


@pytest.mark.ray
@pytest.mark.soak
def test_the_tutorial_is_typed_from_its_first_line_to_its_last(trained):
    folder, said = trained

    assert {"texts", "mix.yaml", "train.yaml", "run"} <= {path.name for path in folder.iterdir()}
    assert "200 steps" in said


@pytest.mark.parametrize(
    ("script", "pages"),
    [
        # The tutorial trains for minutes on two cores.
        pytest.param(script, pages, marks=[pytest.mark.soak] * script.startswith(TRAINED))
        for script, pages in alone().items()
    ],
    ids=lambda value: value.splitlines()[-1] if isinstance(value, str) else "",
)
def test_a_command_of_a_console_is_typed_as_printed(
    script, pages, at_rest, typed, request, tmp_path
):
    folder = tmp_path / "typed"
    if script.startswith(TRAINED):
        shutil.copytree(request.getfixturevalue("trained")[0], folder)
        for other in ("RUN", "demo/run", "demo/run-before"):
            shutil.copytree(folder / "run", folder / other)
    else:
        shutil.copytree(at_rest, folder)

    code, told = typed(script, folder)

    assert code == 0, f"{', '.join(sorted(pages))}\n{told}"


def test_commands_that_are_typed_elsewhere_are_on_pages():
    blocks = [b for path in documents() for b in blocks_of(path) if b.info == ("console",)]
    shown = [command for block in blocks for command in commands_of(block)]

    assert [e for e in ELSEWHERE if not any(re.match(e, command) for command in shown)] == []
