"""Starts from a layer store: hot blocks of an image first, and a trace of what its first start reads.

The engine does not say which command it starts, so all its starts of an image count as
starts of the image's own command. The first read opens the window; what the kernel keeps
of the files is not read again, so that later starts in its life would show nothing.
"""

import threading
from collections.abc import Callable

from typing_extensions import override

from omniload.base.log import get_logger
from snapshot.engines.podman.images import ServedImage
from snapshot.image.block.fetcher import Priority
from snapshot.image.block.loader import BlockLoader
from snapshot.image.block.prefetch import want_blocks
from snapshot.image.layer.index import LayerIndex
from snapshot.image.trace.store import TraceStore, find_any_trace
from snapshot.image.trace.trace import Trace, hot_blocks
from snapshot.image.tree.tree import ROOT, Tree, merge
from snapshot.image.view.recording import Recording
from snapshot.image.view.view import Recorder

__all__ = ["ImageStarts", "trace_for"]

_log = get_logger(__name__)


class ImageStarts:
    """What starts of one image read, mapped from its layers to the files of the merged image.

    Args:
        served: The image.
        loader: Fetches its blocks.
        traces: Where traces are found and kept.
        now_s: The clock.
        window_s: How long a start is recorded; 0 records nothing.
    """

    def __init__(
        self,
        served: ServedImage,
        loader: BlockLoader,
        traces: TraceStore,
        now_s: Callable[[], float],
        window_s: float,
    ) -> None:
        self._served, self._loader, self._traces = served, loader, traces
        self._now_s, self._window_s = now_s, window_s
        self._indexes = [index for index in served.indexes if index is not None]
        self._tree = merge([index.entries if index else () for index in served.indexes])
        self._recording: Recording | None = None
        self._lock = threading.Lock()

    def prefetch(self) -> int:
        """Have the hot blocks fetched, if a trace is known; return how many are not here."""
        trace = trace_for(self._traces, self._served)
        if trace is None:
            return 0
        # A layer that is left to the engine has no files here, so nobody asks for its index.
        filled: list[LayerIndex] = [i or self._indexes[0] for i in self._served.indexes]
        refs = hot_blocks(trace, self._tree, filled)
        absent = want_blocks(self._loader, self._indexes, refs, Priority.HOT)
        _log.info(
            "%s: %d of %d hot blocks are on their way",
            self._served.reference,
            len(absent),
            len(refs),
        )
        return len(absent)

    def recorder_of(self, place: int, tree: Tree) -> Recorder | None:
        """Return the recorder of reads of a layer; None where nothing is recorded.

        Args:
            place: Of the layer, from 0 at the bottom.
            tree: Of the layer, whose numbers the reads name.
        """
        if not self._window_s:
            return None
        return _LayerRecorder(self, _numbers(tree, self._tree, place))

    def note(self, number: int, offset: int, size_bytes: int) -> None:
        """Remember a read of a file of the merged image."""
        recording = self._recording
        if recording is None:
            with self._lock:
                recording = self._recording = self._recording or self._begun()
        recording.recorder.note(number, offset, size_bytes)

    def finish(self) -> None:
        """Keep what was recorded, if that was not done when the window ended."""
        if self._recording is not None:
            self._recording.finish()

    def _begun(self) -> Recording:
        recorder = Recorder(self._now_s, self._window_s)
        image = self._served.image
        command = image.config.command

        def keep(trace: Trace) -> None:
            self._traces.add(trace)

        recording = Recording(recorder, self._tree, image.digest, command, keep)
        recording.start(self._window_s)
        return recording


class _LayerRecorder(Recorder):
    """Passes reads of a layer on under the numbers of the merged image."""

    def __init__(self, starts: ImageStarts, numbers: dict[int, int]) -> None:
        super().__init__(lambda: 0.0, 0.0)
        self._starts, self._numbers = starts, numbers

    @override
    def note(self, number: int, offset: int, size_bytes: int) -> None:
        merged = self._numbers.get(number)
        if merged is not None:
            self._starts.note(merged, offset, size_bytes)


def trace_for(traces: TraceStore, served: ServedImage) -> Trace | None:
    """Return a trace for a start of an unknown command: what most starts of the image touched."""
    image = served.image
    return find_any_trace(traces, served.store, image.digest, image.config.command)


def _numbers(layer: Tree, merged: Tree, place: int) -> dict[int, int]:
    """Return, by number in a layer, the numbers of files that the merged image has from it."""
    found: dict[int, int] = {}
    waiting = [(ROOT, ROOT)]
    while waiting:
        here, there = (tree.node(n) for tree, n in zip((layer, merged), waiting.pop(), strict=True))
        for name, number in here.children.items():
            other = there.children.get(name)
            if other is None:
                continue
            node = merged.node(other)
            if node.kind == "directory":
                waiting.append((number, other))
            elif node.layer == place:
                found[number] = other
    return found
