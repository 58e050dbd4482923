"""Traces beside their image: one document with a layer for each command, under a tag made of the image's digest.

::

    team/torch:sha256-4f53....traces    layers: traces; annotations: the command and its starts

What a registry holds of a command is the trace of one node, that of the most starts. Of two nodes
that push at the same moment one may lose its traces; they are hints, and pushed again by the next
record.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger
from omniload.base.units import decimal_of
from snapshot.image.trace.trace import Trace, decode_trace, encode_trace, most_run, nearest
from snapshot.oci.digest import digest_of
from snapshot.oci.manifest import (
    EMPTY_CONFIG,
    MANIFEST_TYPE,
    Descriptor,
    Manifest,
    encode,
    parse_manifest,
)
from snapshot.oci.store import ImageStore, small_blob

__all__ = ["TRACE_TYPE", "pull_trace", "pull_traces", "push_trace", "traces_tag"]

_log = get_logger(__name__)

TRACE_TYPE = "application/vnd.omniload.trace.v1+jsonl"
"""Media type of a trace beside an image."""
_COMMAND = "io.omniload.trace.command"
_RUNS = "io.omniload.trace.runs"
_LONGEST_COMMAND = 4096
_MOST_RUNS = 10**9 - 1
_MOST_COMMANDS = 256


@dataclass(frozen=True, slots=True)
class _Listed:
    """A trace of the document; all of this is what its pusher said."""

    words: tuple[str, ...]
    runs: int
    layer: Descriptor


def traces_tag(image: str) -> str:
    """Return the tag of the traces of an image, by its digest."""
    algorithm, _, value = image.partition(":")
    # A tag has 128 characters at most, which a whole sha512 alone would fill.
    return f"{algorithm}-{value[:64]}.traces"


def push_trace(store: ImageStore, trace: Trace) -> bool:
    """Keep a trace beside its image, unless one of its command is there that is of as many starts.

    Returns:
        Whether it was pushed.

    Raises:
        FileNotFoundError: The image is not there.
    """
    store.manifest(trace.image)  # beside an image that is not there nobody would find it
    words = json.dumps(list(trace.command))
    if len(words) > _LONGEST_COMMAND:
        _log.warning("a trace of a command of %d characters stays on this node", len(words))
        return False
    listed = {each.words: each for each in _listed(store, trace.image)}
    known = listed.get(trace.command)
    if known is not None and known.runs >= trace.runs:
        return False
    annotations = {_COMMAND: words, _RUNS: str(trace.runs)}
    layer = _pushed(store, TRACE_TYPE, encode_trace(trace), annotations)
    listed[trace.command] = _Listed(trace.command, trace.runs, layer)
    # Bounded: each push writes all of them.
    kept = sorted(listed.values(), key=lambda each: -each.runs)[:_MOST_COMMANDS]
    manifest = Manifest(
        schema_version=2,
        media_type=MANIFEST_TYPE,
        artifact_type=TRACE_TYPE,
        # An artifact must have one; this is the same blob beside every image.
        config=_pushed(store, EMPTY_CONFIG, b"{}"),
        layers=tuple(each.layer for each in kept),
    )
    store.push_manifest(encode(manifest), MANIFEST_TYPE, traces_tag(trace.image))
    return True


def pull_trace(store: ImageStore, image: str, command: Sequence[str]) -> Trace | None:
    """Return the trace beside an image for a command, else for the nearest one, or None.

    Raises:
        IntegrityError: It is not what its manifest says, and about this image.
        UnavailableError: The store does not answer.
    """
    listed = _listed(store, image)
    place = nearest([each.words for each in listed], command)
    return None if place is None else _fetched(store, image, listed[place])


def pull_traces(store: ImageStore, image: str) -> list[Trace]:
    """Return the traces beside an image of the commands that make up most of its starts; what is broken is passed over.

    Raises:
        UnavailableError: The store does not answer.
    """
    listed, found = _listed(store, image), []
    for place in most_run([each.runs for each in listed]):
        try:
            found.append(_fetched(store, image, listed[place]))
        except (IntegrityError, FileNotFoundError) as error:
            _log.warning("%s; it is passed over", error)
    return found


def _listed(store: ImageStore, image: str) -> list[_Listed]:
    try:
        stored = store.manifest(traces_tag(image))
    except FileNotFoundError:
        return []
    parsed = parse_manifest(stored.data, stored.media_type, name=f"traces of {image}")
    listed = []
    for layer in parsed.layers if isinstance(parsed, Manifest) else ():
        words, runs = _words(layer), decimal_of(layer.annotations.get(_RUNS, ""))
        if layer.media_type == TRACE_TYPE and words is not None and runs is not None:
            # Anybody may say so: a number without end would make all other starts rare.
            listed.append(_Listed(words, min(runs, _MOST_RUNS), layer))
    return listed


def _fetched(store: ImageStore, image: str, each: _Listed) -> Trace:
    name = f"trace {each.layer.digest}"
    try:
        trace = decode_trace(small_blob(store, each.layer), name=name)
    except OmniloadError as error:
        raise IntegrityError(str(error)) from error
    if (trace.image, trace.command) != (image, each.words):
        raise IntegrityError(
            f"{name}: is listed for {image} and {each.words}, about {trace.image} and {trace.command}"
        )
    return trace


def _words(layer: Descriptor) -> tuple[str, ...] | None:
    """Return the command that a trace is for, as its annotations say; anybody may have written them."""
    text = layer.annotations.get(_COMMAND, "")
    try:
        words = json.loads(text) if len(text) <= _LONGEST_COMMAND else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return tuple(words)


def _pushed(
    store: ImageStore, media_type: str, data: bytes, annotations: dict[str, str] | None = None
) -> Descriptor:
    blob = Descriptor(
        media_type=media_type,
        digest=digest_of(data),
        size=len(data),
        annotations=annotations or {},
    )
    store.push_blob(blob, lambda: io.BytesIO(data))
    return blob
