"""Traces beside their image, from many nodes that know nothing of each other.

Each node adds documents of its own, *parts*; nothing is rewritten, so pushes at the same time
lose nothing. A reader merges the parts of a command, and each counts once.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger
from omniload.base.units import decimal_of
from snapshot.image.trace.keys import most_run, nearest
from snapshot.image.trace.trace import Trace, decode_trace, encode_trace, merge_traces
from snapshot.oci.artifacts import artifact, push_artifact
from snapshot.oci.manifest import Descriptor
from snapshot.oci.store import ImageStore

__all__ = ["ENOUGH_PARTS", "TRACE_TYPE", "pull_trace", "pull_traces", "push_trace"]

_log = get_logger(__name__)

TRACE_TYPE = "application/vnd.omniload.trace.v1+jsonl"
"""Media type of a trace beside an image."""
ENOUGH_PARTS = 8
"""Parts of a command after which another one is not pushed: a start reads them all."""
_COMMAND = "io.omniload.trace.command"
_RUNS = "io.omniload.trace.runs"
_PART = "io.omniload.trace.part"
_MERGED = "io.omniload.trace.parts"
"""Of a document that a former release merged of parts, which are listed beside it."""
_LONGEST_COMMAND = 4096
_MOST_RUNS = 10**9 - 1
_MAX_REFERRERS = 4000
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class _Listed:
    """A document that the store lists for an image; all of this is what its pusher said."""

    words: tuple[str, ...]
    runs: int
    part: str
    """Its name: two documents with one name are one part."""
    found: Descriptor


def push_trace(store: ImageStore, trace: Trace, part: str = "") -> str:
    """Keep a trace beside its image, as a part of what nodes pushed for its command.

    Args:
        store: Where the image is.
        trace: Of starts that were not pushed before.
        part: Its name among the parts, its own digest if not given: two with one name are one.

    Returns:
        Digest of its own artifact.

    Raises:
        FileNotFoundError: The image is not there.
    """
    data = encode_trace(trace)
    words = json.dumps(list(trace.command))
    if len(words) > _LONGEST_COMMAND:
        return push_artifact(store, trace.image, TRACE_TYPE, data, {_RUNS: str(trace.runs)})
    known = _of_command(store, trace.image, trace.command)
    if len(known) >= ENOUGH_PARTS:
        _log.info("the trace beside %s has %d parts; no more is added", trace.image, len(known))
        return known[0].found.digest
    part = part or hashlib.sha256(data).hexdigest()
    annotations = {_COMMAND: words, _RUNS: str(trace.runs), _PART: part}
    digest = ""
    for _ in range(_ATTEMPTS):
        digest = push_artifact(store, trace.image, TRACE_TYPE, data, annotations)
        known = _of_command(store, trace.image, trace.command)
        # Where the list of referrers is a tag, two pushers at once may lose an entry of the two.
        if any(each.found.digest == digest for each in known):
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
    return _gathered(store, image, same)


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
    for place in most_run([sum(each.runs for each in group) for group in groups]):
        try:
            trace = _gathered(store, image, groups[place])
        except IntegrityError:  # said where it was met
            continue
        if trace is not None:
            found.append(trace)
    return found


def _of_command(store: ImageStore, image: str, command: Sequence[str]) -> list[_Listed]:
    return [each for each in _listed(store, image) if each.words == tuple(command)]


def _listed(store: ImageStore, image: str) -> list[_Listed]:
    listed = []
    for found in store.referrers(image, TRACE_TYPE)[:_MAX_REFERRERS]:
        words, runs = _words(found), found.annotations.get(_RUNS, "")
        if words is None or (count := decimal_of(runs)) is None or _MERGED in found.annotations:
            continue
        part = found.annotations.get(_PART, found.digest)
        listed.append(_Listed(words, min(count, _MOST_RUNS), part, found))
    return listed


def _gathered(store: ImageStore, image: str, listed: Sequence[_Listed]) -> Trace | None:
    """Merge the parts of one command, those of the most starts where there are too many.

    Raises:
        IntegrityError: Nothing of it is right.
    """
    by_part = {each.part: each for each in sorted(listed, key=lambda e: e.runs)}
    traces: list[Trace] = []
    problem: Exception | None = None
    for each in sorted(by_part.values(), key=lambda e: (-e.runs, e.found.digest))[:ENOUGH_PARTS]:
        try:
            traces.append(_fetched(store, image, each))
        except (IntegrityError, FileNotFoundError) as error:
            _log.warning("trace %s: %s; it is passed over", each.found.digest, error)
            problem = error
    if not traces and problem is not None:
        raise problem
    return merge_traces(traces) if traces else None


def _fetched(store: ImageStore, image: str, each: _Listed) -> Trace:
    name = f"trace {each.found.digest}"
    data = artifact(store, each.found)
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
