"""``omniload train watch``: a run as it goes on, from the files that it writes."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from omniload.base.errors import StateError
from omniload.base.reading import open_file
from omniload.base.state import JsonObject
from trainer_integration.run.run_log import LOG_NAME, EventLine, StepLine, parse_line

__all__ = ["RunNow", "run_line", "run_now"]

_TAIL_BYTES = 1 << 20
"""Of a log, from its end: thousands of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """The last that a run has said of itself."""

    step: int | None
    """The last step; nothing before the first."""
    loss: float | None
    tokens_per_s: float | None
    """Over the last steps."""
    wait_s: tuple[float, ...]
    """Time each rank waited for its batch of the last step, ``[ranks]``."""
    restarts: int
    checkpoint_step: int | None
    """Step of the last checkpoint; nothing before the first."""
    last_event: str
    silent_s: float
    """Since the run wrote its last line."""

    def to_json(self) -> JsonObject:
        """Return it as plain JSON."""
        return asdict(self)


def run_now(folder: Path) -> RunNow:
    """Return the last that the run of a folder has said.

    Raises:
        StateError: The folder holds no log of a run.
    """
    path = folder / LOG_NAME
    try:
        with open_file(path) as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read(_TAIL_BYTES).decode(errors="replace")
            silent_s = max(0.0, time.time() - os.fstat(log.fileno()).st_mtime)
    except FileNotFoundError:
        raise StateError(f"{path}: no such log; give the folder of a run") from None
    # The first line may be cut off by the window, the last by a kill.
    lines = [line for part in text.splitlines() if (line := _parsed(part)) is not None]
    steps = [line for line in lines if isinstance(line, StepLine)]
    events = [line for line in lines if isinstance(line, EventLine)]
    saved = [event.step for event in events if event.what == "checkpoint"]
    seconds = sum(line.seconds for line in steps[-20:])
    return RunNow(
        step=steps[-1].step if steps else None,
        loss=steps[-1].loss if steps else None,
        tokens_per_s=sum(line.tokens for line in steps[-20:]) / seconds if seconds else None,
        wait_s=steps[-1].wait_s if steps else (),
        restarts=max((*(s.attempt for s in steps), *(e.attempt for e in events)), default=0),
        checkpoint_step=saved[-1] if saved else None,
        last_event=f"{events[-1].what} {events[-1].detail}".strip() if events else "",
        silent_s=silent_s,
    )


def _parsed(text: str) -> StepLine | EventLine | None:
    try:
        line = parse_line(text)
    except ValueError:
        return None
    return line if isinstance(line, StepLine | EventLine) else None


def run_line(run: RunNow) -> str:
    """Return it as one line."""
    if run.step is None:
        said = ["no step yet"]
    else:
        said = [f"step {run.step}", f"loss {run.loss:.4f}"]
        said += [f"waits {max(run.wait_s):.2f} s at most"] if run.wait_s else []
    if run.tokens_per_s is not None:
        said.append(f"{run.tokens_per_s:,.0f} tokens/s")
    said.append(
        "no checkpoint" if run.checkpoint_step is None else f"checkpoint {run.checkpoint_step}"
    )
    return ", ".join([*said, f"{run.restarts} restarts", f"last line {run.silent_s:.0f} s ago"])
