"""Carries held reads to a ``Filler`` and bytes of blocks into blobs. Decides nothing.

The kernel asks (a thread reads its questions), the machine answers, threads fetch and write.
A guard process shares the group, so that the death of this one is never an answer.
"""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger
from snapshot.image import precontent_guard
from snapshot.image.erofs_blobs import BlobLayout
from snapshot.image.erofs_cache import BlobCache, Filling
from snapshot.image.fetcher import Priority
from snapshot.image.layer_index import LayerIndex
from snapshot.image.layers import read_stream
from snapshot.image.loader import BlockLoader
from snapshot.image.precontent import (
    AccessAsked,
    AllowAccess,
    Command,
    CompleteFile,
    DenyAccess,
    Event,
    Filler,
    FillRange,
    RangeFailed,
    RangeFilled,
    RangesAtHand,
    Stopped,
)
from snapshot.image.precontent_kernel import PreContent, answer, is_unused
from snapshot.image.trace import block_refs

__all__ = ["BlobFilling"]

_log = get_logger(__name__)

_EXIT_DEFECT = 70
_PAUSE_S = 0.5
"""Between two starts of a guard, should it not live."""


class BlobFilling:
    """Blobs of one mount that are filled as they are read.

    Args:
        layers: Those that are not complete: index and layout of each.
        loader: Where blocks come from.
        cache: Where blobs are kept once they are whole.
        slots: Reads filled at a time.

    Raises:
        OSError: The kernel does not let itself be asked.
    """

    def __init__(
        self,
        layers: Sequence[tuple[LayerIndex, BlobLayout]],
        loader: BlockLoader,
        cache: BlobCache,
        *,
        slots: int,
    ) -> None:
        self._layers, self._loader, self._cache = layers, loader, cache
        self._machine = Filler(sizes=[layout.size_bytes for _, layout in layers])
        self._lock = threading.Lock()
        self._fillings: list[Filling] = [cache.begin(*layer) for layer in layers]
        self._numbers = {_key(filling): n for n, filling in enumerate(self._fillings)}
        self._complete: set[int] = set()
        self._blocks: dict[str, list[tuple[int, int]]] = {}
        self._expected: list[set[str]] = [set() for _ in layers]
        for number, (index, layout) in enumerate(layers):
            self._note_blocks(number, index, layout)
        self._group = PreContent()
        for filling in self._fillings:
            self._group.mark(str(filling.path))
        self._urgent = ThreadPoolExecutor(slots, "omniload-fill")
        self._behind = ThreadPoolExecutor(1, "omniload-fill-behind")
        self._wake, self._stop = os.eventfd(0), os.eventfd(0)
        self._closing = threading.Event()
        self._life, self._telling = os.pipe()
        self._guard = self._start_guard()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._listen, "omniload-ask"), (self._watch, "omniload-guard"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def paths(self) -> list[str]:
        """Where the blobs are, in the order of the layers."""
        return [str(filling.path) for filling in self._fillings]

    @property
    def is_complete(self) -> bool:
        """All blobs are whole and kept: nobody is needed any more."""
        return len(self._complete) == len(self._fillings)

    @property
    def is_unused(self) -> bool:
        """No mount has a blob open, in no namespace."""
        return all(is_unused(filling.descriptor) for filling in self._fillings)

    @property
    def is_asked(self) -> bool:
        """Some reader waits."""
        with self._lock:
            return self._machine.is_asked

    @property
    def wake(self) -> int:
        """A descriptor that is readable once all blobs are complete."""
        return self._wake

    def settled(self, digest: str, came: bool) -> None:
        """Note that a block came; may be called from any thread, under any lock."""
        if came and digest in self._blocks:
            with suppress(RuntimeError):  # it is being closed
                self._behind.submit(self._block_here, digest)

    def at_hand(self, digests: Iterable[str]) -> None:
        """Note that blocks need not be fetched."""
        for digest in digests:
            self.settled(digest, True)

    def stop(self) -> None:
        """Deny whoever waits, and whoever comes for what is not there; the first step of ``close``."""
        self._apply(Stopped())

    def close(self, *, is_safe: bool) -> None:
        """End the threads; whoever waits gets an error.

        Args:
            is_safe: No reader is left, or all is there. Otherwise the guard stays and denies.
        """
        self.stop()
        self._closing.set()
        if is_safe:
            os.write(self._telling, b".")
            self._guard.wait()
        for pool in (self._urgent, self._behind):
            pool.shutdown(wait=is_safe, cancel_futures=True)
        os.eventfd_write(self._stop, 1)
        self._threads[0].join()
        if not is_safe:
            return  # the group and the pipe go with the process, in this order or the other
        self._threads[1].join()
        self._group.close()
        for filling in self._fillings:
            filling.close()
        for descriptor in (self._life, self._telling, self._wake, self._stop):
            os.close(descriptor)

    def _note_blocks(self, number: int, index: LayerIndex, layout: BlobLayout) -> None:
        for block, record in enumerate(index.blocks_B):
            start, size = int(record["stream_offset"]), int(record["size"])
            if layout.uses(start, size):
                digest = index.digest(block)
                self._blocks.setdefault(digest, []).append((number, block))
                self._expected[number].add(digest)

    def _start_guard(self) -> "subprocess.Popen[bytes]":
        line = [sys.executable, "-I", "-S", precontent_guard.__file__]
        # The blobs as descriptors, not as paths: it is to guard one that was removed, too.
        blobs = [filling.descriptor for filling in self._fillings]
        passed = [self._group.descriptor, self._life, *blobs]
        return subprocess.Popen(  # noqa: S603 -- our own interpreter and file
            [*line, *map(str, passed)],
            pass_fds=passed,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )

    def _watch(self) -> None:
        """Keep a guard: without one the death of this process would let holes be read."""
        while True:
            code = self._guard.wait()
            if self._closing.is_set():
                return
            _log.warning("the guard ended with %d; another one is started", code)
            try:
                self._guard = self._start_guard()
            except OSError:  # no memory, no process to spare: tried until there is
                _log.exception("no guard could be started; if this process dies, holes are read")
            self._closing.wait(_PAUSE_S)

    def _listen(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._group.descriptor, select.POLLIN)
            poll.register(self._stop, select.POLLIN)
            while self._stop not in {descriptor for descriptor, _ in poll.poll()}:
                for access in self._group.accesses():
                    number = self._numbers[access.file]
                    self._apply(
                        AccessAsked(access.descriptor, number, access.offset, access.size_bytes)
                    )
        except BaseException:
            _log.exception("defect while reads are answered; the guard denies them from now on")
            _leave_it_to_the_guard()
            raise

    def _apply(self, event: Event) -> None:
        with self._lock:
            for command in self._machine.handle(event):
                self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case FillRange(is_urgent=is_urgent):
                with suppress(RuntimeError):  # it is being closed, and whoever waits was told
                    (self._urgent if is_urgent else self._behind).submit(self._fill, command)
            case AllowAccess(token=token) | DenyAccess(token=token):
                answer(self._group.descriptor, token, allow=isinstance(command, AllowAccess))
                os.close(token)
            case CompleteFile(file=file):
                with suppress(RuntimeError):
                    self._behind.submit(self._finish, file)

    def _fill(self, command: FillRange) -> None:
        failed = RangeFailed(command.file, command.offset, command.size_bytes)
        try:
            blocks = self._write(command)
        except (OmniloadError, OSError) as error:
            _log.warning("%s: %s", self._fillings[command.file].path, error)
            self._apply(failed)
        except BaseException:
            _log.exception("defect while a blob is filled")
            self._apply(failed)
            raise
        else:
            self._apply(RangeFilled(command.file, command.offset, command.size_bytes))
            if command.is_urgent:  # the rest of what was fetched for it is at hand now
                self.at_hand(blocks)

    def _write(self, command: FillRange) -> list[str]:
        """Write a range of a blob; return the digests of the blocks that were needed."""
        index, layout = self._layers[command.file]
        pieces = list(layout.pieces(command.offset, command.size_bytes))
        blocks = dict.fromkeys(
            part.block for p in pieces for part in index.ranges(p.stream_offset, p.size_bytes)
        )
        if command.is_urgent:  # all in one wish, so that neighbours travel together
            self._loader.prefetch(index, tuple(block_refs(index, blocks)), Priority.DEMAND)
        data = bytearray(command.size_bytes)
        for piece in pieces:
            at = piece.offset - command.offset
            data[at : at + piece.size_bytes] = read_stream(
                index, self._loader, piece.stream_offset, piece.size_bytes
            )
        view, at = memoryview(data), command.offset
        while view:
            written = os.pwrite(self._fillings[command.file].descriptor, view, at)
            view, at = view[written:], at + written
        return [index.digest(block) for block in blocks]

    def _block_here(self, digest: str) -> None:
        for file, block in self._blocks[digest]:
            if digest in self._expected[file]:
                index, layout = self._layers[file]
                record = index.blocks_B[block]
                ranges = layout.ranges_of(int(record["stream_offset"]), int(record["size"]))
                self._apply(RangesAtHand(file, tuple(ranges)))
        for file, expected in enumerate(self._expected):
            if digest in expected:
                expected.discard(digest)
                if not expected:  # pages for which two blocks were needed are left
                    whole = (0, self._layers[file][1].size_bytes)
                    self._apply(RangesAtHand(file, (whole,)))

    def _finish(self, file: int) -> None:
        """Give a whole blob its name, and let the kernel ask no more about it."""
        filling = self._fillings[file]
        try:
            # Synced first: a page that the disk did not take would later be read as a hole.
            kept = self._cache.keep(filling)
            self._group.unmark(str(kept))
        except OSError:
            _log.exception("%s is lost; the guard denies its reads from now on", filling.path)
            _leave_it_to_the_guard()
            raise
        self._complete.add(file)
        _log.info("layer %s is whole", self._layers[file][0].blob_digest)
        if self.is_complete:
            os.eventfd_write(self._wake, 1)


def _leave_it_to_the_guard() -> None:
    """End this process now: nothing it could still do is as safe."""
    os._exit(_EXIT_DEFECT)


def _key(filling: Filling) -> tuple[int, int]:
    found = os.fstat(filling.descriptor)
    return found.st_dev, found.st_ino
