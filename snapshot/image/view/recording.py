"""What is recorded of a start, from the first read to the end of the window, and where it goes."""

import threading
from collections.abc import Callable, Sequence

from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger
from snapshot.image.trace.trace import Trace, trace_of
from snapshot.image.tree.tree import Tree
from snapshot.image.view.view import Recorder

__all__ = ["Recording"]

_log = get_logger(__name__)


class Recording:
    """Keeps what a recorder noted, once: when the window ends, or at the unmount where that is sooner.

    A job that runs for days and is then killed has left its trace long before.
    """

    def __init__(
        self,
        recorder: Recorder,
        tree: Tree,
        image: str,
        command: Sequence[str],
        keep: Callable[[Trace], None],
    ) -> None:
        self.recorder = recorder
        self._tree, self._image, self._command = tree, image, tuple(command)
        self._keep = keep
        self._lock = threading.Lock()
        self._done = False
        self._timer: threading.Timer | None = None

    def start(self, window_s: float) -> None:
        """Keep what there is when the window has passed."""
        self._timer = threading.Timer(min(window_s, threading.TIMEOUT_MAX), self.finish)
        self._timer.name, self._timer.daemon = "omniload-record", True
        self._timer.start()

    def finish(self) -> None:
        """Keep what there is, unless it was kept. What fails is said: it must not end the mount."""
        with self._lock:
            if self._done:
                return
            self._done = True
            if self._timer is not None:
                self._timer.cancel()
            touches = self.recorder.touches(self._tree)
            if (
                not touches
            ):  # nothing was started: as one of the starts it would make the others' rare
                return
            try:
                self._keep(trace_of(self._image, self._command, touches))
            except (OmniloadError, OSError) as error:
                _log.warning("what was recorded is lost: %s", error)
