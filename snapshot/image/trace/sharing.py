"""Traces beside their image, from many nodes that know nothing of each other: pushed in parts, merged by all.

Each pusher adds its own document, a *part*, and then a *merged* one that names all parts it
holds. A reader takes the merged document of the most starts, and adds the parts that it does
not name; other merged documents are superseded. Parts are never taken away, so two that merge
at once lose nothing and count nothing twice, whichever of them comes last.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger
from snapshot.image.trace.keys import most_run, nearest
from snapshot.image.trace.trace import Trace, decode_trace, encode_trace, merge_traces
from snapshot.oci.artifacts import push_artifact
from snapshot.oci.manifest import Descriptor, Manifest, parse_manifest
from snapshot.oci.store import ImageStore, small_blob

__all__ = ["ENOUGH_RUNS", "TRACE_TYPE", "pull_trace", "pull_traces", "push_trace"]

_log = get_logger(__name__)

TRACE_TYPE = "application/vnd.omniload.trace.v1+jsonl"
"""Media type of a trace beside an image."""
ENOUGH_RUNS = 256
"""Starts after which another one teaches nothing, and is not pushed: parts are kept for ever."""
_COMMAND = "io.omniload.trace.command"
_RUNS = "io.omniload.trace.runs"
_PART = "io.omniload.trace.part"
_PARTS = "io.omniload.trace.parts"
_LONGEST_COMMAND = 4096
_MAX_REFERRERS = 4000
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class _Listed:
    """A document that the store lists for an image; all of this is what its pusher said."""

    words: tuple[str, ...]
    runs: int
    part: str
    """Name of a part; empty for a merged document."""
    found: Descriptor


def push_trace(store: ImageStore, trace: Trace, part: str = "") -> str:
    """Keep a trace beside its image, merged with what others pushed for its command.

    Args:
        store: Where the image is.
        trace: Of starts that were not pushed before.
        part: Its name among the parts, its own digest if not given: two with one name are one.

    Returns:
        Digest of its own artifact.

    Raises:
        FileNotFoundError: The image is not there.
    """
    data = encode_trace(replace(trace, parts=()))
    words = json.dumps(list(trace.command))
    if len(words) > _LONGEST_COMMAND:
        return push_artifact(store, trace.image, TRACE_TYPE, data, {_RUNS: str(trace.runs)})
    part = part or hashlib.sha256(data).hexdigest()
    annotations = {_COMMAND: words, _RUNS: str(trace.runs), _PART: part}
    known = _of_command(store, trace.image, trace.command)
    best = max((each.runs for each in known), default=0)
    if best >= ENOUGH_RUNS:
        _log.info("the trace beside %s is of %d starts; no more is added", trace.image, best)
        return known[0].found.digest
    digest = ""
    for _ in range(_ATTEMPTS):
        digest = push_artifact(store, trace.image, TRACE_TYPE, data, annotations)
        wanted = {digest}
        known = _of_command(store, trace.image, trace.command)
        if (merged := _gathered(store, trace.image, known)) is not None and len(merged.parts) > 1:
            told = {_COMMAND: words, _RUNS: str(merged.runs), _PARTS: str(len(merged.parts))}
            whole = encode_trace(merged)
            wanted.add(push_artifact(store, trace.image, TRACE_TYPE, whole, told))
        # Where the list of referrers is a tag, two pushers at once may lose an entry of the two.
        if wanted <= {each.found.digest for each in _of_command(store, trace.image, trace.command)}:
            return digest
    _log.warning("the trace beside %s may be overwritten by others that push now", trace.image)
    return digest


def pull_trace(store: ImageStore, image: str, command: Sequence[str]) -> Trace | None:
    """Return the trace beside an image for a command, else for the nearest one, or None.

    Raises:
        IntegrityError: None of its documents is what its manifest says, and about this image.
        UnavailableError: The store does not answer.
    """
    listed = _listed(store, image)
    place = nearest([each.words for each in listed], command)
    if place is None:
        return None
    same = [each for each in listed if each.words == listed[place].words]
    merged = _gathered(store, image, same)
    return None if merged is None else replace(merged, parts=())


def pull_traces(store: ImageStore, image: str) -> list[Trace]:
    """Return the traces beside an image of the commands that make up most of its starts; what is broken is passed over.

    Raises:
        UnavailableError: The store does not answer.
    """
    by_words: dict[tuple[str, ...], list[_Listed]] = {}
    for each in _listed(store, image):
        by_words.setdefault(each.words, []).append(each)
    groups = list(by_words.values())
    found = []
    for place in most_run([max(each.runs for each in group) for group in groups]):
        try:
            trace = _gathered(store, image, groups[place])
        except IntegrityError:  # said where it was met
            continue
        if trace is not None:
            found.append(replace(trace, parts=()))
    return found


def _of_command(store: ImageStore, image: str, command: Sequence[str]) -> list[_Listed]:
    return [each for each in _listed(store, image) if each.words == tuple(command)]


def _listed(store: ImageStore, image: str) -> list[_Listed]:
    listed = []
    for found in store.referrers(image, TRACE_TYPE)[:_MAX_REFERRERS]:
        words, runs = _words(found), found.annotations.get(_RUNS, "")
        if words is None or not runs.isdecimal():
            continue
        merged = found.annotations.get(_PARTS, "").isdecimal()
        part = "" if merged else found.annotations.get(_PART, found.digest)
        listed.append(_Listed(words, int(runs[:9]), part, found))
    return listed


def _gathered(store: ImageStore, image: str, listed: Sequence[_Listed]) -> Trace | None:
    """Merge what was pushed for one command; the parts it names are those it holds.

    Raises:
        IntegrityError: Nothing of it is right.
    """
    traces: list[Trace] = []
    parts: set[str] = set()
    problem: Exception | None = None
    # Merged ones first, the best before the others: what it holds is not looked at again.
    for each in sorted(listed, key=lambda e: (bool(e.part), -e.runs, e.found.digest)):
        if each.part in parts or (not each.part and traces):
            continue
        try:
            trace = _fetched(store, image, each)
        except (IntegrityError, FileNotFoundError) as error:
            _log.warning("trace %s: %s; it is passed over", each.found.digest, error)
            problem = error
            continue
        traces.append(trace)
        parts |= {each.part} if each.part else set(trace.parts)
    if traces:
        return replace(merge_traces(traces), parts=tuple(sorted(parts)))
    if problem is not None:
        raise problem
    return None


def _fetched(store: ImageStore, image: str, each: _Listed) -> Trace:
    name = f"trace {each.found.digest}"
    stored = store.manifest(each.found.digest)
    manifest = parse_manifest(stored.data, stored.media_type, name=name)
    if not isinstance(manifest, Manifest) or len(manifest.layers) != 1:
        raise IntegrityError(f"{name}: is no document of one layer")
    data = small_blob(store, manifest.layers[0])
    try:
        trace = decode_trace(data, name=name)
    except OmniloadError as error:
        raise IntegrityError(str(error)) from error
    if (trace.image, trace.command) != (image, each.words):
        raise IntegrityError(
            f"{name}: is listed for {image} and {each.words}, about {trace.image} and {trace.command}"
        )
    return trace


def _words(found: Descriptor) -> tuple[str, ...] | None:
    """Return the command an artifact is for, as its annotations say; anybody may have written them."""
    text = found.annotations.get(_COMMAND, "")
    try:
        words = json.loads(text) if len(text) <= _LONGEST_COMMAND else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return tuple(words)
