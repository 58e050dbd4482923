"""Scripts of pages that several ranks run: saved as the page says, and started by the commands it prints."""

import os
import re
import shlex
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, blocks_of
from tests.support.programs import finished

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LIMIT_S = 240


def losses_of(page, python):
    """Return steps and losses that each command of a page prints, its mix and script saved as it says."""
    blocks = blocks_of(ROOT / "docs/how-to/trainers" / page)
    by_language = {b.language: b.text for b in blocks}
    Path("mix.yaml").write_text(by_language["yaml"], encoding="utf-8")
    Path("train.py").write_text(by_language["python"], encoding="utf-8")
    (console,) = [b for b in blocks if b.language == "console"]

    for _, command in console.commands():
        words = shlex.split(command)
        assert words[0] == "torchrun"
        done = finished(
            [python.path, "-m", "torch.distributed.run", *words[1:]],
            limit_s=LIMIT_S,
            env=os.environ | python.for_launchers,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = re.findall(r"^step (\d+) loss ([\d.]+)$", done.stdout, re.MULTILINE)
        yield {int(step): float(loss) for step, loss in found}


def test_the_script_of_the_fsdp_page_trains_on_two_ranks_and_goes_on_where_it_stopped(
    warm_python, work
):
    first, second = losses_of("fsdp.md", warm_python)

    assert [*first] == [0, 1, 2]
    assert [*second] == [3, 4, 5]
    assert second[5] < first[0]
    # A model that is not the one that was saved begins where the first one did.
    assert second[3] < first[0] - 0.1


def test_the_script_of_the_torchrun_page_goes_on_from_its_checkpoint_on_one_rank(warm_python, work):
    first, second = losses_of("torchrun.md", warm_python)

    assert [*first] == [0, 1, 2]
    assert [*second] == [2, 3, 4, 5]
    # Step 2 came behind the last checkpoint: it is trained again, on the samples that it had.
    assert second[2] == pytest.approx(first[2], abs=2e-4)


def test_the_script_of_the_torchrun_page_goes_on_where_torchrun_starts_its_ranks_again(
    warm_python, work
):
    blocks = {b.language: b.text for b in blocks_of(ROOT / "docs/how-to/trainers/torchrun.md")}
    Path("mix.yaml").write_text(blocks["yaml"], encoding="utf-8")
    told = "print(os.getpid(), file=open(f'rank-{os.environ[\"RANK\"]}', 'a'))"
    Path("train.py").write_text(f"import os\n{told}\n{blocks['python']}", encoding="utf-8")
    export, command = blocks["sh"].splitlines()
    name, value = export.removeprefix("export ").split("=")
    launcher, *words, _ = shlex.split(command)
    assert (launcher, words[-1]) == ("torchrun", "train.py")

    seen = []
    with subprocess.Popen(
        [warm_python.path, "-m", "torch.distributed.run", *words, "200"],
        env=os.environ | warm_python.for_launchers | {name: value},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        # What gloo waits for otherwise is a rank that is gone: half an hour.
        limit = threading.Timer(LIMIT_S, job.terminate)
        limit.start()
        try:
            for line in job.stdout:
                found = re.findall(r"^step (\d+) loss", line)
                seen += map(int, found)
                if found and len(seen) == 5:
                    os.kill(int(Path("rank-1").read_text()), signal.SIGKILL)
        finally:
            limit.cancel()
            job.terminate()

    assert len(Path("rank-1").read_text().split()) == 2  # starts
    assert sorted({*seen}) == [*range(200)]


def test_the_script_of_the_pipeline_page_trains_over_two_stages(warm_python, work):
    (losses,) = losses_of("pipeline.md", warm_python)

    assert [*losses] == [0, 1, 2]
    assert losses[2] < losses[0] - 0.05


def test_the_script_of_the_context_parallel_page_has_the_losses_of_whole_rows(warm_python, work):
    whole, shared = losses_of("context-parallel.md", warm_python)

    assert [*whole] == [0, 1, 2]
    assert whole[2] < whole[0] - 0.05
    assert shared == pytest.approx(whole, abs=2e-4)


def test_the_loop_of_the_page_on_reinforcement_learning_runs_on_two_ranks(warm_python, work):
    page = ROOT / "docs/how-to/data/rl.md"
    data, loop, *_ = [b.text for b in blocks_of(page) if b.language == "python"]
    line = re.search(
        r"only one more line before it, `(torch\..*?\))`", page.read_text(encoding="utf-8")
    )[1]
    Path("data.py").write_text(data, encoding="utf-8")
    Path("loop.py").write_text(f"import torch\n{line}\n{loop}\nprint(len(batch), counts)\n")

    finished([warm_python.path, "data.py"], limit_s=LIMIT_S, env=os.environ.copy())
    done = finished(
        [warm_python.path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py"],
        limit_s=LIMIT_S,
        env=os.environ | warm_python.for_launchers,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("8 {")
    assert len(Path("run/groups.jsonl").read_text().splitlines()) == 7
