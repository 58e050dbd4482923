"""The job of ``benchmarks.startup.whole``: the included trainer, a small corpus, and a checkpoint to resume from."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.startup.place import MAIN, environment
from trainer_integration.run.run_log import LOG_NAME, StepLine, read_log

__all__ = ["REQUIREMENTS", "FirstStep", "Job", "first_step_of"]

REQUIREMENTS = ("pandas", "scipy", "scikit-learn", "matplotlib", "transformers")
"""Packages that the job installs at run time, in addition to those of its image."""
PROGRAM = """\
import sys

import pandas  # noqa: F401 -- of the packages that the job installs
import scipy.stats  # noqa: F401

from omniload.base.cli import main

sys.argv = ["omniload", "train", "run", sys.argv[1], "--resume", "latest"]
main()
"""
FETCH = """\
import sys
from pathlib import Path

from pyarrow import fs

from snapshot.startup.events import stage

source, target = sys.argv[1], Path(sys.argv[2])
with stage("checkpoint_load") as tally:
    store, root = fs.FileSystem.from_uri(source)
    for found in store.get_file_info(fs.FileSelector(root, recursive=True)):
        path = target / found.path.removeprefix(root).lstrip("/")
        if found.type == fs.FileType.Directory:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.open_input_stream(found.path) as stream, path.open("wb") as file:
            while data := stream.read(16 << 20):
                file.write(data)
        tally.add("store", found.size)
"""
"""Program that fetches a folder from a store by one stream, as ``hdfs dfs -get`` does."""
_RESUMED = 1
"""Steps of the run that saved the checkpoint."""
_BYTES_OF_PARAMETER = 12
"""Bytes of a parameter: weight and two moments."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Results of the first step after the checkpoint; equal bytes give equal figures."""

    loss: float
    grad_norm: float
    digest: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """A training file, its mix and its corpus in a folder."""

    folder: Path
    checkpoint_mib: int

    def write(self) -> None:
        """Write everything but the training file."""
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, 5000, 200).tolist() for _ in range(400)]
        (self.folder / "web").mkdir(parents=True, exist_ok=True)
        table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
        pq.write_table(table, self.folder / "web" / "0.parquet", row_group_size=100)
        mix = {
            "version": 1,
            "seed": 0,
            "sources": {"web": {"type": "parquet", "path": "web/*.parquet", "tokens": "tokens"}},
            "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
            "pack": {"length": 256},
            "batch": {"tokens": 1024, "micro_tokens": 1024},
        }
        (self.folder / "mix.yaml").write_bytes(orjson.dumps(mix))
        (self.folder / "job.py").write_text(PROGRAM)
        (self.folder / "fetch.py").write_text(FETCH)
        (self.folder / "requirements.txt").write_text("\n".join(REQUIREMENTS) + "\n")

    def training_file(self, name: str, checkpoints: str, *, steps: int = 1000) -> Path:
        """Write a training file whose checkpoints lie at ``checkpoints``; return it."""
        content = {
            "version": 1,
            "mix": "mix.yaml",
            "steps": steps,
            "model": self.model,
            "vocab_size": 5000,
            "optimizer": {"warmup_steps": 1},
            "checkpoint": {"every_steps": steps, "folder": checkpoints},
            "run_dir": f"run-{name}",
        }
        path = self.folder / f"{name}.yaml"
        path.write_bytes(orjson.dumps(content))
        return path

    @property
    def model(self) -> dict[str, int]:
        """A model whose checkpoint has about the requested size, most of it in experts."""
        dim = 256 if self.checkpoint_mib >= 64 else 32
        expert = 3 * dim * 4 * dim * _BYTES_OF_PARAMETER
        others = 2 * 5000 * dim * _BYTES_OF_PARAMETER
        experts = max(2, round((self.checkpoint_mib * (1 << 20) - others) / (2 * expert)))
        return {"dim": dim, "hidden": 4 * dim, "num_layers": 2, "num_experts": experts}

    def save(self, name: str, checkpoints: str, variables: Mapping[str, str]) -> None:
        """Train one step on this machine and leave its checkpoint at ``checkpoints``."""
        path = self.training_file(f"save-{name}", checkpoints, steps=_RESUMED)
        words = [sys.executable, "-c", MAIN, "train", "run", str(path)]
        given = {**environment(), **variables, "OMNILOAD_STARTUP_LOG": ""}
        done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"no checkpoint was saved: {(done.stdout + done.stderr)[-2000:]}")


def first_step_of(run_dir: Path) -> FirstStep | None:
    """Return the first step of a start in this folder, once it is logged."""
    path = run_dir / LOG_NAME
    if not path.exists() or not path.stat().st_size:
        return None
    for line in read_log(run_dir):
        if isinstance(line, StepLine):
            return FirstStep(line.loss, line.grad_norm, line.digest)
    return None
