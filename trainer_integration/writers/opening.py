"""The writers of a run: opened by name, fed by a queue, left out where they fail."""

import queue
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Self, get_args

from omniload.base.errors import ConfigError, system_refusals
from omniload.base.extras import missing_extra
from omniload.base.log import get_logger
from trainer_integration.writers.protocol import Kind, MetricWriter

__all__ = ["Writers", "open_writers", "require_writers"]

_LOG = get_logger(__name__)
_CLASSES: dict[Kind, str] = {
    "tensorboard": "TensorBoardWriter",
    "wandb": "WandbWriter",
    "mlflow": "MlflowWriter",
}
_MOST_WAITING = 10_000
"""Steps that wait for a tool that is slow, such as a server far away; those above are not written."""
_CLOSE_S = 30.0


class Writers:
    """Several writers as one: nobody waits for them, and none of them ends a run. Safe to call from several threads."""

    def __init__(self, writers: Mapping[str, MetricWriter], from_step: int = 0) -> None:
        """Write to those of ``writers``, by name; earlier launches may have written ``from_step`` and later ones."""
        self._writers = dict(writers)
        self._next = from_step
        self._goes_back = from_step > 0
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue()
        self._lost = 0
        self._thread = threading.Thread(target=self._follow, name="omniload-writers", daemon=True)
        self._thread.start()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Have a step written; one that is not after the last takes the place of that and of those behind it.

        Args:
            step: The step.
            figures: Names such as ``loss`` or ``share/web``; must not change any more.
        """
        if not self._writers:
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            self._lost += 1
            if self._lost == 1:
                _LOG.warning(
                    "%s: %d steps wait to be written, figures from step %d on are lost until it catches up",
                    *(", ".join(self._writers), _MOST_WAITING, step),
                )
            return
        self._waiting.put((step, figures))

    def close(self) -> None:
        """Write what is outstanding, for 30 s at most; once is enough, more do nothing."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning(
                "%s did not end within %.0f s; the last %d steps may not be written",
                *(", ".join(self._writers), _CLOSE_S, self._waiting.qsize()),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        while (asked := self._waiting.get()) is not None:
            step, figures = asked
            goes_back, self._goes_back = self._goes_back or step < self._next, False
            self._next = step + 1
            for name, writer in list(self._writers.items()):
                try:
                    if goes_back:
                        writer.go_back(step)
                    writer.write(step, figures)
                except Exception:  # noqa: BLE001 -- somebody else's code, whatever ails it
                    _LOG.warning("%s fails at step %d and is left out", name, step, exc_info=True)
                    del self._writers[name]
        for name, writer in self._writers.items():
            try:
                writer.close()
            except Exception:  # noqa: BLE001 -- as above
                _LOG.warning("%s did not end well", name, exc_info=True)


@system_refusals("the run's folder")
def open_writers(kinds: Sequence[Kind], folder: str | Path, *, from_step: int = 0) -> Writers:
    """Open the writers of a run; use it in a ``with``, or close it.

    Args:
        kinds: Any of ``tensorboard``, ``wandb`` and ``mlflow``.
        folder: Of the run; made where it is missing.
        from_step: Step that the run goes on with, of one that is resumed.

    Raises:
        ConfigError: One is not known, not installed, or refuses the folder.
        StateError: What the folder holds of an earlier launch is not of this release.
    """
    require_writers(kinds)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    writers: dict[str, MetricWriter] = {}
    for kind in dict.fromkeys(kinds):
        module = import_module(f"trainer_integration.writers.{kind}")
        writers[kind] = getattr(module, _CLASSES[kind])(place)
    return Writers(writers, from_step)


def require_writers(kinds: Sequence[Kind]) -> None:
    """Refuse writers whose package is not installed, before anything is started.

    Raises:
        ConfigError: With the line that installs it.
    """
    for kind in kinds:
        if kind not in get_args(Kind):
            raise ConfigError(f"writer {kind!r} is not known; choose among {list(get_args(Kind))}")
        # A folder called wandb or mlflow, as these tools make, is found as a package without an origin.
        if (spec := find_spec(kind)) is None or spec.origin is None:
            raise missing_extra(f"the writer {kind}", ModuleNotFoundError(name=kind))
