"""Where traces are kept and found again: by the digest of an image and the command it ran.

::

    CACHE/traces/v1/IMAGE/COMMAND.trace     both are sha256, the second of the words as JSON

or beside the image in its registry, as referrer artifacts. One that others pushed is a
hint like any other: it may cost requests, never right bytes.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger
from snapshot.image.trace import Trace, decode_trace, encode_trace, merge_traces
from snapshot.oci.artifacts import push_artifact
from snapshot.oci.digest import check_digest
from snapshot.oci.manifest import Descriptor, Manifest, parse_manifest
from snapshot.oci.store import ImageStore, small_blob

__all__ = [
    "TRACE_TYPE",
    "TraceStore",
    "command_key",
    "find_trace",
    "merge_into",
    "nearest",
    "pull_trace",
    "push_trace",
]

_log = get_logger(__name__)

TRACE_TYPE = "application/vnd.omniload.trace.v1+jsonl"
"""Media type of a trace beside an image."""
_COMMAND = "io.omniload.trace.command"
_RUNS = "io.omniload.trace.runs"
_LONGEST_COMMAND = 4096
_MAX_REFERRERS = 1000


def command_key(command: Sequence[str]) -> str:
    """Return the name of a command: sha256 of its words, in hex."""
    return hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()


def nearest(commands: Sequence[Sequence[str]], wanted: Sequence[str]) -> int | None:
    """Return which command starts most like another one.

    A job that goes on from another step is the same start with another argument.

    Returns:
        Place of the one that shares the most leading words, at least the first; of equals the
        shortest, then the first. None where no first word is shared.
    """
    shared = [_num_shared(command, wanted) for command in commands]
    places = [place for place, num in enumerate(shared) if num]
    return min(places, key=lambda p: (-shared[p], len(commands[p]), p), default=None)


class TraceStore:
    """Traces in a folder, merged over starts. Safe between processes."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "v1"

    def path(self, image: str, command: Sequence[str]) -> Path:
        """Return where the trace of an image and a command is, or will be."""
        return self._of(image) / f"{command_key(command)}.trace"

    def get(self, image: str, command: Sequence[str]) -> Trace | None:
        """Return the trace of the command, else of the nearest one, or None. One that is broken is passed over."""
        exact = self.path(image, command)
        if (found := _read(exact)) is not None:
            return found
        traces = [_read(path) for path in sorted(self._of(image).glob("*.trace")) if path != exact]
        known = [trace for trace in traces if trace is not None]
        place = nearest([trace.command for trace in known], command)
        return None if place is None else known[place]

    def add(self, trace: Trace) -> Trace:
        """Merge the trace of a start with what is kept; return what is kept now."""
        path = self.path(trace.image, trace.command)
        path.parent.mkdir(parents=True, exist_ok=True)
        return merge_into(path, trace)

    def _of(self, image: str) -> Path:
        return self._folder / check_digest(image).partition(":")[2]


def merge_into(path: Path, new: Trace) -> Trace:
    """Merge a trace into a file, whole or not at all; one of something else, or broken, is replaced."""
    with _locked(path.parent):
        merged = new
        try:
            old = decode_trace(path.read_bytes(), name=str(path))
        except FileNotFoundError:
            old = None
        except OmniloadError as error:  # a broken trace must not cost the new one
            _log.warning("%s; it is replaced", error)
            old = None
        if old is not None and (old.image, old.command) == (new.image, new.command):
            merged = merge_traces([old, new])
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(encode_trace(merged))
        temporary.replace(path)
    return merged


def push_trace(store: ImageStore, trace: Trace) -> str:
    """Keep a trace beside its image; return the digest of the artifact.

    Raises:
        FileNotFoundError: The image is not there.
    """
    words = json.dumps(list(trace.command))
    annotations = {_RUNS: str(trace.runs)}
    if len(words) <= _LONGEST_COMMAND:
        annotations[_COMMAND] = words
    return push_artifact(store, trace.image, TRACE_TYPE, encode_trace(trace), annotations)


def pull_trace(store: ImageStore, image: str, command: Sequence[str]) -> Trace | None:
    """Return the trace beside an image for a command, else for the nearest one, or None.

    Of several for one command that of the most starts counts: each pusher merged what was there.

    Raises:
        IntegrityError: It is not what its manifest says, or not about this image.
        UnavailableError: The store does not answer.
    """
    listed = [
        (words, runs, found)
        for found in store.referrers(image, TRACE_TYPE)[:_MAX_REFERRERS]
        if (words := _words(found)) is not None
        and (runs := found.annotations.get(_RUNS, "")).isdecimal()
    ]
    place = nearest([words for words, _, _ in listed], command)
    if place is None:
        return None
    same = [(int(runs[:9]), found) for words, runs, found in listed if words == listed[place][0]]
    _, best = max(same, key=lambda pair: pair[0])
    stored = store.manifest(best.digest)
    manifest = parse_manifest(stored.data, stored.media_type, name=f"trace {best.digest}")
    if not isinstance(manifest, Manifest) or len(manifest.layers) != 1:
        raise IntegrityError(f"trace {best.digest}: is no document of one layer")
    trace = decode_trace(small_blob(store, manifest.layers[0]), name=f"trace {best.digest}")
    if trace.image != image:
        raise IntegrityError(f"trace {best.digest}: is listed for {image}, about {trace.image}")
    return trace


def find_trace(
    kept: TraceStore, store: ImageStore, image: str, command: Sequence[str]
) -> Trace | None:
    """Return the trace of a command: of this node, else beside the image; else the nearest one.

    It is a hint, so a registry that does not answer, or answers nonsense, costs a warning.
    """
    here = kept.get(image, command)
    if here is not None and here.command == tuple(command):
        return here
    try:
        there = pull_trace(store, image, command)
    except (OmniloadError, OSError, ValueError) as error:
        _log.warning("no trace from %s: %s", store.location, error)
        there = None
    known = [trace for trace in (here, there) if trace is not None]
    place = nearest([trace.command for trace in known], command)
    return None if place is None else known[place]


def _num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _words(found: Descriptor) -> tuple[str, ...] | None:
    """Return the command an artifact is for, as its annotations tell; anybody may have written them."""
    text = found.annotations.get(_COMMAND, "")
    try:
        words = json.loads(text) if len(text) <= _LONGEST_COMMAND else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return tuple(words)


def _read(path: Path) -> Trace | None:
    try:
        return decode_trace(path.read_bytes(), name=str(path))
    except FileNotFoundError:
        return None
    except (OmniloadError, OSError) as error:
        _log.warning("%s; it is passed over", error)
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep out others that merge in a folder; the folder itself is locked, so no file is left."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
