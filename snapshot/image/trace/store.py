"""Files of traces, found by the digest of an image and the command it ran.

::

    FOLDER/v1/IMAGE/COMMAND.trace     both are sha256, the second of the words as JSON

The folder belongs to one node, or nodes share it. A trace is only a hint, whoever wrote it: a wrong one
costs requests, but never changes the bytes that are read.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.linux.file_lock import locked
from omniload.base.log import get_logger
from omniload.base.reading import open_file, read_kept_file
from omniload.base.writing import require_replaceable, write_whole
from snapshot.image.trace.trace import (
    MAX_TRACE_BYTES,
    Touch,
    Trace,
    begins_trace,
    command_key,
    decode_trace,
    encode_trace,
    merge_traces,
    most_run,
    nearest,
    trace_of,
)
from snapshot.image.tree.tree import Tree
from snapshot.oci.digest import check_digest
from snapshot.private_folder import private_folder

__all__ = ["Recording", "TraceStore", "check_record", "merge_into"]

_log = get_logger(__name__)
# The first line holds the words of a command, which may be long.
_HEAD_BYTES = 1 << 20


class TraceStore:
    """Traces in a folder, merged over starts. Safe between processes."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "v1"

    def path(self, image: str, command: Sequence[str]) -> Path:
        """Return the path of the trace of an image and a command, whether or not it exists."""
        return self._of(image) / f"{command_key(command)}.trace"

    def get(self, image: str, command: Sequence[str]) -> Trace | None:
        """Return the trace of the command, else of the nearest one, or None. Broken traces are skipped."""
        exact = self.path(image, command)
        if (found := _read(exact)) is not None:
            return found
        known = self.all_of(image)
        place = nearest([trace.command for trace in known], command)
        return None if place is None else known[place]

    def all_of(self, image: str) -> list[Trace]:
        """Return the traces of an image for all commands. Broken traces are skipped."""
        traces = [_read(path) for path in sorted(self._of(image).glob("*.trace"))]
        return [trace for trace in traces if trace is not None]

    def any_of(self, image: str, own: Sequence[str]) -> Trace | None:
        """Return a trace for a start whose command is unknown, as containerd and Podman do not name it.

        It unites the traces of the most started commands, under the image's ``own`` command. As in any trace, blocks
        that few of all those starts touched are not hot.
        """
        known = [trace for trace in self.all_of(image) if trace.touches]
        chosen = [known[place] for place in most_run([trace.runs for trace in known])]
        of_own = [replace(trace, command=tuple(own)) for trace in chosen]
        return merge_traces(of_own) if of_own else None

    def add(self, trace: Trace) -> Trace:
        """Merge the trace of a start with the kept trace; return the result, which is kept now."""
        path = self.path(trace.image, trace.command)
        private_folder(self._folder)
        path.parent.mkdir(exist_ok=True)
        return merge_into(path, trace)

    def _of(self, image: str) -> Path:
        return self._folder / check_digest(image).partition(":")[2]


def merge_into(path: Path, new: Trace) -> Trace:
    """Merge a trace into a file atomically; a broken file, or a file of something else, is replaced."""
    with locked(path.parent):  # lock the folder, not the file, which another process may replace
        merged = new
        try:
            old = decode_trace(_bytes_of(path), name=str(path))
        except FileNotFoundError:
            old = None
        except OmniloadError as error:  # a broken trace must not cost the new one
            _log.warning("%s; it is replaced", error)
            old = None
        if old is not None and (old.image, old.command) == (new.image, new.command):
            merged = merge_traces([old, new])
        write_whole(path, encode_trace(merged))
    return merged


def check_record(path: Path) -> None:
    """Check that the trace of a start may be written to a file that the user named. At its end nobody reads errors.

    Raises:
        ConfigError: The folder is missing or not writable, or the file holds something other than a trace.
    """
    try:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"record {path}: its folder is not there, or not yours to write")
        require_replaceable(path)
        with open_file(path) as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"record {path}: {error.strerror}; name another file") from error
    if head and not begins_trace(head):
        raise ConfigError(f"record {path}: holds {head[:40]!r}..., no trace; name another file")


def _read(path: Path) -> Trace | None:
    try:
        return decode_trace(_bytes_of(path), name=str(path))
    except FileNotFoundError:
        return None
    except (OmniloadError, OSError) as error:
        _log.warning("%s; it is passed over", error)
        return None


def _bytes_of(path: Path) -> bytes:
    return read_kept_file(path, most_bytes=MAX_TRACE_BYTES, what="a trace")


class Recording:
    """Remembers reads in order, and keeps them once: at the end of the window, or at the unmount if that is sooner.

    Times of reads count from the creation of this object; ``keep`` is called with the trace of the start.
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
        """Schedule a write of the touches at the end of the window."""
        # The unmount alone would not suffice, because a job that runs for days may be killed. A longer wait would raise
        # in the thread of the timer, where nobody would see it.
        self._timer = threading.Timer(min(self._window_s, threading.TIMEOUT_MAX), self.finish)
        self._timer.name, self._timer.daemon = "omniload-record", True
        self._timer.start()

    def note(self, number: int, offset: int, size_bytes: int) -> None:
        """Remember a read of a file of the tree, if it is new and the window is open."""
        since_s = self._now_s() - self._began_s
        if since_s <= self._window_s:
            with self._lock:
                self._reads.setdefault((number, offset, size_bytes), int(since_s * 1000))

    def touches(self) -> list[Touch]:
        """Return the reads under the first name of each file."""
        names: dict[int, str] = {}
        for path, node in self._tree.walk():
            # Take the first name of hard links, because every name leads to the same blocks.
            names.setdefault(node.number, path)
        with self._lock:
            reads = list(self._reads.items())
        return [Touch(at, names[number], offset, size) for (number, offset, size), at in reads]

    def finish(self) -> None:
        """Keep the recording, unless it was kept. An error is logged, because it must not end the mount."""
        with self._finishing:  # until it is kept, because the process ends after an unmount
            if self._done:
                return
            self._done = True
            if self._timer is not None:
                self._timer.cancel()
            # Nothing was started. Counted as a start, it would make the touches of other starts seem rare.
            if not (touches := self.touches()):
                return
            try:
                self._keep(trace_of(self._image, self._command, touches))
            except (OmniloadError, OSError) as error:
                _log.warning("what was recorded is lost: %s", error)
