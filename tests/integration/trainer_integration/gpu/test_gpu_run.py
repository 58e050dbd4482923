"""``omniload train run`` on a GPU: it ends, goes on from its checkpoint, and sees the samples of a run on a CPU."""

import json
import subprocess
import sys

import pytest

from tests.support.plane.corpora import a_corpus
from tests.support.trainer.gpus import needs_gpu
from tests.support.trainer.run_lines import write_mix
from trainer_integration.run.run_log import last_of_each_step, read_log

pytestmark = [needs_gpu, pytest.mark.slow]

_COMMAND = (sys.executable, "-c", "from omniload.base.cli import main; main()", "train", "run")
_MODEL = {
    "dim": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden": 128,
    "num_experts": 4,
    "top_k": 2,
}


def steps_after(folder, *, steps, **changes):
    """Run up to a step; return the last line of each, in order."""
    content = {
        "version": 1,
        "mix": "mix.yaml",
        "steps": steps,
        "model": _MODEL,
        "vocab_size": 5000,
        "optimizer": {"warmup_steps": 1},
        "checkpoint": {"every_steps": 2},
    }
    file, out = folder / "train.yaml", folder / "-".join(["run", *map(str, changes.values())])
    file.write_text(json.dumps(content | changes | {"run_dir": out.name}), encoding="utf-8")
    command = [*_COMMAND, str(file), *(["--resume", "latest"] if out.exists() else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:] + ended.stdout[-2000:]
    return last_of_each_step(read_log(out))


@pytest.fixture
def folder(tmp_path):
    write_mix(tmp_path / "mix.yaml", a_corpus(tmp_path, records=80, shards=1))
    return tmp_path


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_goes_on_and_sees_what_a_cpu_sees(folder, dtype):
    expected = steps_after(folder, steps=6, device="cpu", dtype="fp32")
    begun = steps_after(folder, steps=4, device="cuda", dtype=dtype)

    ended = steps_after(folder, steps=6, device="cuda", dtype=dtype)

    assert [line.digest for line in ended] == [line.digest for line in expected]
    assert [line.loss for line in ended[:4]] == [line.loss for line in begun]
    near = 1e-3 if dtype == "fp32" else 2e-2
    assert [line.loss for line in ended] == pytest.approx([x.loss for x in expected], rel=near)
