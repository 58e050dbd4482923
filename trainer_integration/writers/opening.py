"""The writers of a run: opened by name, fed through a queue, left out if they fail."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, Self

from omniload.base.config import StrictModel
from omniload.base.errors import system_refusals
from omniload.base.extras import missing_extra
from omniload.base.log import get_logger
from trainer_integration.writers.protocol import Kind, MetricWriter
from trainer_integration.writers.record import read_record
from trainer_integration.writers.settings import LogConfig, as_log

__all__ = ["Writers", "open_writers", "require_writers"]

_LOG = get_logger(__name__)
_CLASSES: dict[Kind, str] = {
    "tensorboard": "TensorBoardWriter",
    "wandb": "WandbWriter",
    "mlflow": "MlflowWriter",
}
_MOST_WAITING = 10_000
"""Most steps that wait for a slow tool, such as a remote server; further steps are not written."""
_CLOSE_S = 30.0


class Writers:
    """Several writers as one. Callers never wait for them, and a failing writer does not end a run. Thread-safe."""

    def __init__(
        self, openers: Mapping[str, Callable[[], MetricWriter]], from_step: int = 0
    ) -> None:
        """Open writers by name, in a thread; earlier launches may have written ``from_step`` and later steps."""
        self._openers = dict(openers)
        self._names = tuple(openers)
        """Names of the writers that are open or will be."""
        self._next = from_step
        # Immediately after a resume, because the previous launch may have written steps after its last checkpoint.
        self._goes_back = from_step > 0
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue()
        self._lost = 0
        self._thread = threading.Thread(target=self._follow, name="omniload-writers", daemon=True)
        self._thread.start()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue a step for writing; a step that does not follow the last replaces that step and all later ones.

        Args:
            step: The step.
            figures: Names such as ``loss`` or ``share/web``; must not change any more.
        """
        if not self._names:
            return
        # Dropped instead of waited for, because training runs at its own speed, whatever a remote server does.
        if self._waiting.qsize() >= _MOST_WAITING:
            self._lost += 1
            if self._lost == 1:
                _LOG.warning(
                    "%s: %d steps wait to be written, figures from step %d on are lost until it catches up",
                    *(", ".join(self._names), _MOST_WAITING, step),
                )
            return
        self._waiting.put((step, figures))

    def close(self) -> None:
        """Write outstanding steps, for 30 s at most; further calls do nothing."""
        # The end mark comes after the last step, so waiting steps are written before the end.
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning(
                "%s did not end within %.0f s; the last %d steps may not be written",
                *(", ".join(self._names), _CLOSE_S, self._waiting.qsize()),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        writers = self._opened()
        while (asked := self._waiting.get()) is not None:
            step, figures = asked
            goes_back, self._goes_back = self._goes_back or step < self._next, False
            self._next = step + 1
            for name, writer in list(writers.items()):
                try:
                    if goes_back:
                        writer.go_back(step)
                    writer.write(step, figures)
                except Exception:  # noqa: BLE001 -- it is foreign code, whatever its error is
                    _LOG.warning("%s fails at step %d and is left out", name, step, exc_info=True)
                    del writers[name]
                    self._names = tuple(writers)
        for name, writer in writers.items():
            try:
                writer.close()
            except Exception:  # noqa: BLE001 -- as above
                _LOG.warning("%s did not end well", name, exc_info=True)

    def _opened(self) -> dict[str, MetricWriter]:
        """Open the writers; a remote server may answer late or not at all."""
        writers: dict[str, MetricWriter] = {}
        for name, opener in self._openers.items():
            try:
                writers[name] = opener()
            except Exception:  # noqa: BLE001 -- as above
                _LOG.warning("%s cannot be opened and is left out", name, exc_info=True)
        self._names = tuple(writers)
        return writers


@system_refusals("the run's folder")
def open_writers(
    log: LogConfig | Sequence[Kind] | Mapping[str, object],
    folder: str | Path,
    *,
    from_step: int = 0,
) -> Writers:
    """Open the writers of a run in a thread, without a wait. Use them in a ``with`` statement, or close them.

    A tool that cannot be opened, for example because its server does not answer, is left out with a warning.

    Args:
        log: Any of ``tensorboard``, ``wandb`` and ``mlflow``; or the settings of each by name, as under ``log`` of a
            training file: ``{"wandb": {"project": "moe", "tags": ["warm-up"]}}``.
        folder: Folder of the run; it is created if it is missing.
        from_step: Step at which the run continues, if it is resumed.

    Raises:
        ConfigError: A tool is not known or not installed, a setting is refused, or the folder cannot be made.
        StateError: The folder holds data of an earlier launch that is not of this release.
    """
    config = as_log(log)
    require_writers(config.kinds)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if {"wandb", "mlflow"} & set(config.kinds):
        read_record(place)  # a record of another release is refused here; the writers read it again
    return Writers(
        {str(kind): _opener_of(kind, place, getattr(config, kind)) for kind in config.kinds},
        from_step,
    )


def _opener_of(kind: Kind, folder: Path, settings: StrictModel) -> Callable[[], MetricWriter]:
    """Import a tool now, and return a function that opens it; another thread must not import while the caller does."""
    try:
        module = import_module(f"trainer_integration.writers.{kind}")
    except Exception as error:  # noqa: BLE001 -- it is foreign code, whatever its error is
        return partial(_raise, error)
    opener: Callable[[Path, StrictModel], MetricWriter] = getattr(module, _CLASSES[kind])
    return partial(opener, folder, settings)


def _raise(error: Exception) -> NoReturn:
    raise error


def require_writers(kinds: Sequence[Kind]) -> None:
    """Refuse writers whose package is not installed, before anything starts.

    Raises:
        ConfigError: The message has the line that installs it.
    """
    for kind in kinds:
        # A folder called wandb or mlflow, as these tools make, looks like a package without an origin.
        if (spec := find_spec(kind)) is None or spec.origin is None:
            raise missing_extra(f"the writer {kind}", ModuleNotFoundError(name=kind))
