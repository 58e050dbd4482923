"""Hand-made lines of a run's log, and folders of runs."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omniload.mix.config import MixConfig
from omniload.mix.run_record import write_run_record
from trainer_integration.config import TrainConfig
from trainer_integration.run.launch_record import write_launch_record
from trainer_integration.run.run_log import EventLine, MemoryLine, RunLog, StepLine

__all__ = ["a_killed_run", "a_memory", "a_run_folder", "a_step", "an_event", "write_mix"]


def a_step(step: int, **changes: Any) -> StepLine:
    """Return a step of two ranks and two sources that took one second."""
    defaults = {
        "attempt": 0,
        "step": step,
        "loss": 9.0 - 0.1 * step,
        "balance_loss": 1.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 1000,
        "seconds": 1.0,
        "wait_s": (0.01, 0.02),
        "compute_s": (0.6, 0.4),
        "imbalance": 1.01,
        "bound": 1.0,
        "expert_imbalance": 1.25,
        "tokens_by_source": {"web": 600, "code": 400},
        "digest": f"{step:016x}",
    }
    return StepLine(**(defaults | changes))


def an_event(what: str, detail: str = "", **changes: Any) -> EventLine:
    """Return an event at the launch."""
    return EventLine(**({"attempt": 0, "seconds": 0.0, "what": what, "detail": detail} | changes))


def a_memory(seconds: float, **bytes_by_role: int) -> MemoryLine:
    """Return a memory sample; ``rank_0`` names the role ``rank 0``."""
    roles = {role.replace("_", " "): size for role, size in bytes_by_role.items()}
    return MemoryLine(attempt=0, seconds=seconds, pss_bytes=roles)


def a_killed_run() -> list[StepLine | EventLine | MemoryLine]:
    """Return a run of six steps, killed after step 3 and resumed from the checkpoint before step 2."""
    return [
        an_event("start", "2 ranks"),
        *(a_step(step) for step in range(2)),
        an_event("checkpoint", "step-00000002", seconds=4.0, step=2, took_s=0.25),
        a_memory(5.0, rank_0=100, rank_1=120, planner=30),
        *(a_step(step) for step in range(2, 4)),
        an_event("exit", "rank 1: signal SIGKILL", seconds=6.0),
        an_event("restart", "2 ranks", seconds=7.0, attempt=1),
        an_event("resume", "step-00000002", seconds=7.0, attempt=1, step=2),
        *(a_step(step, attempt=1) for step in range(2, 6)),
        a_memory(10.0, rank_0=110, rank_1=90, planner=40),
        an_event("exit", "rank 0: code 0", seconds=12.0, attempt=1),
        an_event("end", "done", seconds=12.0, attempt=1),
    ]


def write_mix(path: Path, mix: MixConfig) -> Path:
    """Write a mix as its file; JSON is YAML."""
    content = mix.model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def a_run_folder(
    folder: Path, mix: MixConfig, lines: Iterable[StepLine | EventLine | MemoryLine] | Sequence[Any]
) -> Path:
    """Write a mix file and the folder of a run of it, and return that folder."""
    run = folder / "run"
    mix_file = write_mix(folder / "mix.yaml", mix)
    write_run_record(run, mix_file, {"dp": 2})
    train = TrainConfig(version=1, mix="mix.yaml", steps=100, vocab_size=5000)
    write_launch_record(run, folder / "train.yaml", train)
    with RunLog(run) as log:
        for line in lines:
            log.write(line)
    return run
