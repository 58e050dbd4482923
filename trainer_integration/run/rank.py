"""One rank's process, started by the launcher: takes batches, trains, saves.

Standard input brings a ``RankSpec``. Rank 0 writes a ``StepLine`` or an ``EventLine`` to standard output for every step
and checkpoint. Everything else, including a library's ``print``, goes to standard error.
"""

import os
import signal
import sys
import threading
from typing import TextIO

from omniload.base.errors import OmniloadError
from omniload.base.linux.exec_with_parent import end_with_parent
from omniload.base.log import get_logger, set_up_logging
from trainer_integration.run.imports import kept_imports
from trainer_integration.run.rank_process import ASK_TO_END
from trainer_integration.run.rank_spec import RankSpec
from trainer_integration.run.run_log import EventLine, StepLine

__all__ = ["main"]

_LOG = get_logger(__name__)


def main() -> int:
    """Run the rank that standard input describes; return its exit code."""
    lines = _own_stdout()
    spec = RankSpec.model_validate_json(sys.stdin.read())
    # Before torch is imported, which takes seconds, so that a launcher that is killed meanwhile leaves no rank.
    if not end_with_parent(signal.SIGKILL, spec.launcher_pid):
        os.kill(os.getpid(), signal.SIGKILL)
    set_up_logging(role=f"rank {spec.rank}")
    with kept_imports():
        from trainer_integration.run.joining import joined  # noqa: PLC0415
        from trainer_integration.run.rank_client import rank_client  # noqa: PLC0415
        from trainer_integration.run.trainer import Trainer  # noqa: PLC0415
        from trainer_integration.training.step import use_one_thread  # noqa: PLC0415
    asked_to_end = threading.Event()
    # After the imports: a rank that is asked to end before has nothing to save, and ends by the signal's default.
    signal.signal(ASK_TO_END, lambda *_: asked_to_end.set())
    use_one_thread()

    def write(line: StepLine | EventLine) -> None:
        lines.write(line.model_dump_json() + "\n")
        # Each line is written immediately, so that a rank that is killed has reported every step that it completed.
        lines.flush()

    try:
        with joined(spec) as groups, rank_client(spec) as client:
            trainer = Trainer(spec, groups, write, asked_to_end)
            if spec.plane is None:
                trainer.tell("plane", "threads of the rank")
            trainer.run(client)
    except OmniloadError as error:
        _LOG.error("%s", error)
        return error.exit_code
    return 0


def _own_stdout() -> TextIO:
    """Return standard output for the launcher's lines only; all other output goes to standard error."""
    sys.stdout.flush()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return lines


if __name__ == "__main__":
    sys.exit(main())
