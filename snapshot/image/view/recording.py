"""What is recorded of a start, from the first read to the end of the window, and where it goes."""

import threading
from collections.abc import Callable, Sequence

from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger
from snapshot.image.trace.trace import Touch, Trace, trace_of
from snapshot.image.tree.tree import Tree

__all__ = ["Recording"]

_log = get_logger(__name__)


class Recording:
    """Remembers what is read, in order, and keeps it once: when the window ends, or at the unmount if that is sooner.

    A job that runs for days and is then killed has left its trace long before. Times of reads count
    from the making of this; ``keep`` is called with the trace of the start.
    """

    def __init__(
        self,
        tree: Tree,
        image: str,
        command: Sequence[str],
        keep: Callable[[Trace], object],
        now_s: Callable[[], float],
        window_s: float,
    ) -> None:
        self._tree, self._image, self._command = tree, image, tuple(command)
        self._keep, self._now_s, self._window_s = keep, now_s, window_s
        self._began_s = now_s()
        self._reads: dict[tuple[int, int, int], int] = {}
        self._lock = threading.Lock()
        self._finishing = threading.Lock()
        self._done = False
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Keep what there is when the window has passed."""
        self._timer = threading.Timer(min(self._window_s, threading.TIMEOUT_MAX), self.finish)
        self._timer.name, self._timer.daemon = "omniload-record", True
        self._timer.start()

    def note(self, number: int, offset: int, size_bytes: int) -> None:
        """Remember a read of a file of the tree, if it is a new one and the window is open."""
        since_s = self._now_s() - self._began_s
        if since_s <= self._window_s:
            with self._lock:
                self._reads.setdefault((number, offset, size_bytes), int(since_s * 1000))

    def touches(self) -> list[Touch]:
        """Return the reads under the first name of each file."""
        names: dict[int, str] = {}
        for path, node in self._tree.walk():
            names.setdefault(node.number, path)
        with self._lock:
            reads = list(self._reads.items())
        return [Touch(at, names[number], offset, size) for (number, offset, size), at in reads]

    def finish(self) -> None:
        """Keep what there is, unless it was kept. What fails is said: it must not end the mount."""
        with self._finishing:  # until it is kept: after an unmount the process ends
            if self._done:
                return
            self._done = True
            if self._timer is not None:
                self._timer.cancel()
            # Nothing was started: as one of the starts it would make the others' touches rare.
            if not (touches := self.touches()):
                return
            try:
                self._keep(trace_of(self._image, self._command, touches))
            except (OmniloadError, OSError) as error:
                _log.warning("what was recorded is lost: %s", error)
