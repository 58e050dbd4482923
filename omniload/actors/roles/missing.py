"""What a data constructor does where a source loader does not hold what it asked for: it waits to hear why."""

import threading
import time
from collections.abc import Callable, Sequence

from omniload.machine.data_constructor import (
    BatchesBuilt,
    DataConstructor,
    FetchSlices,
    SlicesMissing,
)

__all__ = ["MissingSlices"]

_TOLD_WITHIN_S = 20.0
"""Longest wait: another loader takes over in less, on a busy machine too."""
_TURN_S = 0.2
"""Whether other loaders serve is looked for so often."""


class MissingSlices:
    """Samples that a loader has let go of, or never had.

    Either all ranks have, meanwhile, a step that a constructor, new in its place, builds again for them. Or the loader
    is believed dead and lives, and another serves its sources. The call that says so may come after the samples miss.
    """

    def __init__(
        self,
        machine: DataConstructor,
        changed: threading.Condition,
        loaders: Callable[[], Sequence[str]],
    ) -> None:
        """Wait for ``changed``, which also guards the machine, and for other names among ``loaders``."""
        self._machine, self._changed, self._loaders = machine, changed, loaders

    def of(
        self, asked: FetchSlices, loaders: tuple[str, ...]
    ) -> tuple[FetchSlices | BatchesBuilt, ...]:
        """Return what is to be done now; nothing where no reason was heard in time.

        Args:
            asked: What was asked for.
            loaders: Who served then.
        """
        missing = SlicesMissing(steps=asked.steps, generation=asked.generation)
        until_s = time.monotonic() + _TOLD_WITHIN_S
        while True:
            with self._changed:
                if commands := self._machine.handle(missing):
                    return commands
                if tuple(self._loaders()) != loaders:
                    return (asked,)
                if time.monotonic() >= until_s:
                    return ()
                self._changed.wait(_TURN_S)
