"""Scripts of pages that several ranks run: saved as the page says, and started by the commands it prints."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, blocks_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LIMIT_S = 240


def test_the_script_of_the_fsdp_page_trains_on_two_ranks_and_goes_on_where_it_stopped(
    warm_python, work
):
    blocks = blocks_of(ROOT / "docs/how-to/trainers/fsdp.md")
    by_language = {b.language: b.text for b in blocks}
    Path("mix.yaml").write_text(by_language["yaml"], encoding="utf-8")
    Path("train.py").write_text(by_language["python"], encoding="utf-8")
    (console,) = [b for b in blocks if b.language == "console"]
    steps, losses = [], []

    for _, command in console.commands():
        words = shlex.split(command)
        assert words[0] == "torchrun"
        done = subprocess.run(
            [warm_python.path, "-m", "torch.distributed.run", *words[1:]],
            env=os.environ | warm_python.for_launchers,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = re.findall(r"^step (\d+) loss ([\d.]+)$", done.stdout, re.MULTILINE)
        steps.append([int(step) for step, _ in found])
        losses += [float(loss) for _, loss in found]

    assert steps == [[0, 1, 2], [3, 4, 5]]
    assert losses[-1] < losses[0]
    # A model that is not the one that was saved begins where the first one did.
    assert losses[3] < losses[0] - 0.1
