"""A batch as a worker sends it: a short message, and plain tensors in shared memory.

Anything else than a plain tensor in the CPU's memory, or a tensor for which there is no room, is sent in torch's own
way.

The worker itself writes the message, without an extra thread. So the message is in the pipe before the next batch
begins, and a worker that stops has stopped at the first batch that did not arrive. This also saves a change of threads
for every batch.
"""

import contextlib
import fcntl
import io
import pickle
import threading
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from typing_extensions import override

from trainer_integration.loader.transport.room import Block, Room, WorkersRoom, block_of

__all__ = [
    "BatchPickler",
    "DirectContext",
    "DirectQueue",
    "LayingPickler",
    "Sealed",
    "SealingCollate",
]

_INLINE_BYTES = 2_048
"""Size below which tensors travel in the message, because a block would cost more."""
_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


class Sealed:
    """A batch that is pickled already, so that the worker may continue while it travels."""

    __slots__ = ("data", "slots")

    def __init__(self, data: bytes, slots: tuple[int, ...]) -> None:
        self.data, self.slots = data, slots

    @override
    def __reduce__(self) -> Any:
        return pickle.loads, (self.data,)


class SealingCollate:
    """A worker's ``collate_fn``: makes the batch, and lays its tensors into the worker's memory."""

    pickler: "type[LayingPickler]"

    def __init__(self, collate: Callable[[Any], Any], room: Room) -> None:
        """Wrap ``collate``, which the user gave or torch chose."""
        self._collate, self._room = collate, room
        self._own: WorkersRoom | None = None
        self._made: dict[int, Block] = {}

    def __call__(self, batch: Any) -> Sealed:
        """Return the message of the batch."""
        if self._own is None:
            self._own = self._begin()
        # Called before the batch is made, so that it finds the room that the trainer has given back.
        self._own.collect()
        data, sent = io.BytesIO(), list[Block]()
        try:
            made = self._collate(batch)
            self.pickler(data, self._own, self._made, sent).dump(made)
        except BaseException:
            self._own.release(sent)
            raise
        finally:
            # Blocks that were laid out but are in no message.
            self._own.release(self._made.values())
            self._made.clear()
        return Sealed(data.getvalue(), tuple(block.slot for block in sent))

    def _begin(self) -> WorkersRoom:
        """Have torch's collate stack into this worker's memory, which is then the only copy.

        Another ``collate_fn`` may keep the result of torch's, so its batches go to memory of their own.
        """
        # If the user has registered a function of their own there, it takes precedence.
        if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
            # Only this worker's copy of torch is changed.
            direct = self._collate is default_collate
            # In a worker, torch's own function would allocate its own shared memory, which would be copied into ours.
            default_collate_fn_map[torch.Tensor] = self._stack if direct else _stack_apart
        return WorkersRoom(self._room, self._region())

    def _region(self) -> int:
        return get_worker_info().id  # type: ignore[union-attr]

    def _stack(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        elem = batch[0]
        if not _is_plain(elem) or elem.requires_grad:
            return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        size_bytes = len(batch) * elem.numel() * elem.element_size()
        block = self._own.take(size_bytes) if size_bytes > _INLINE_BYTES and self._own else None
        if block is None:
            return torch.stack(batch, 0)
        out = block.tensor(elem.dtype)
        self._made[out.data_ptr()] = block
        return torch.stack(batch, 0, out=out.view(len(batch), *elem.shape))


def _stack_apart(batch: Any, *, collate_fn_map: Any = None) -> Any:
    if not _is_plain(batch[0]):
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    return torch.stack(batch, 0)


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype in _DTYPES
        and not tensor.is_nested
    )


def _is_values(tensor: torch.Tensor) -> bool:
    """Whether its storage describes the tensor completely."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return not lazy and not tensor.requires_grad and tensor.numel() > 0


class LayingPickler(pickle.Pickler):
    """A pickler that lays plain tensors into a worker's memory; others are pickled whole, in the message."""

    def __init__(
        self, data: io.BytesIO, room: WorkersRoom, made: dict[int, Block], sent: list[Block]
    ) -> None:
        """Write to ``data``; sent blocks move from ``made``, by their address, to ``sent``."""
        super().__init__(data, pickle.HIGHEST_PROTOCOL)
        self._room, self._made, self._blocks = room, made, sent
        self._first: dict[int, torch.Tensor] = {}

    @override
    def reducer_override(self, thing: Any) -> Any:
        """Return how to pickle a tensor, or that it is pickled in the default way."""
        if type(thing) is torch.Tensor and _is_plain(thing) and _is_values(thing):
            return self._tensor(thing)
        return NotImplemented

    def _tensor(self, thing: torch.Tensor) -> Any:
        storage = thing.untyped_storage()
        size_bytes, own_bytes = storage.nbytes(), thing.numel() * thing.element_size()
        whole = size_bytes == own_bytes and thing.is_contiguous()
        at = storage.data_ptr()
        # Two tensors of one storage share a storage on arrival too, as in torch's own way.
        if at in self._first:
            return _as_view, (self._first[at], *_form(thing))
        # Up to twice its tensor's bytes, a storage is sent whole, and views share it. A larger one costs too much.
        if size_bytes > 2 * own_bytes or size_bytes % thing.element_size():
            return self._part(thing)
        sent = self._sent(thing if whole else _flat(thing), at)
        if sent is NotImplemented:
            return NotImplemented
        # Kept until the batch is pickled, so that no later storage gets the same address.
        self._first[at] = thing
        make, arguments = sent
        if whole:
            return _shaped, (make, arguments, tuple(thing.shape))
        return _strided, (make, arguments, *_form(thing)[1:])

    def _part(self, thing: torch.Tensor) -> Any:
        """Send only a small part of a large storage, if its layout can be kept."""
        if not thing.is_contiguous():
            return NotImplemented
        sent = self._sent(thing, None)
        if sent is NotImplemented:
            return NotImplemented
        return _shaped, (*sent, tuple(thing.shape))

    def _sent(self, thing: torch.Tensor, at: int | None) -> Any:
        block = None if at is None else self._made.pop(at, None)
        if block is not None:
            return self._in(block, thing.dtype)
        size_bytes = thing.numel() * thing.element_size()
        if size_bytes <= _INLINE_BYTES:
            raw = thing.reshape(-1).view(torch.uint8)
            return _inline, (raw.numpy().tobytes(), thing.dtype)
        block = self._room.take(size_bytes)
        if block is None:
            return NotImplemented
        block.tensor(thing.dtype).copy_(thing.reshape(-1))
        return self._in(block, thing.dtype)

    def _in(self, block: Block, dtype: torch.dtype) -> Any:
        self._blocks.append(block)
        return block_of, self._room.message(block, dtype)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, in its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _inline(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    # A writable copy, because torch warns of tensors over bytes.
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _shaped(make: Callable[..., torch.Tensor], arguments: Any, shape: Any) -> torch.Tensor:
    return make(*arguments).view(shape)


def _strided(
    make: Callable[..., torch.Tensor], arguments: Any, shape: Any, stride: Any, offset: int
) -> torch.Tensor:
    return make(*arguments).as_strided(shape, stride, offset)


def _as_view(
    first: torch.Tensor, dtype: torch.dtype, shape: Any, stride: Any, offset: int
) -> torch.Tensor:
    """Return another view of a storage that has arrived already."""
    return torch.empty(0, dtype=dtype).set_(first.untyped_storage(), offset, shape, stride)


class BatchPickler(LayingPickler, ForkingPickler):
    """The same, with torch's way for the other tensors: memory of their own, passed by descriptors."""


SealingCollate.pickler = BatchPickler


_DIRECT_BYTES = 4_096 - 4
"""Largest message that the kernel writes whole or not at all, without the length before it."""
_PIPE_BYTES = 1 << 20


class _Counted:
    """The write function of a queue's thread, which counts the messages that it has not written yet."""

    def __init__(self, send_bytes: Callable[[Any], None]) -> None:
        self._send_bytes = send_bytes
        self._lock = threading.Lock()
        self.left = 0

    def expect(self) -> None:
        """Count one more message."""
        with self._lock:
            self.left += 1

    def __call__(self, data: Any) -> None:
        """Write one message."""
        self._send_bytes(data)
        with self._lock:
            self.left -= 1


class DirectQueue(Queue):  # type: ignore[type-arg]
    """A queue whose short messages are written in the call of ``put``.

    Longer messages go through the queue's own thread, because a worker must not wait for a trainer that does not read.
    Messages after a long one also go through the thread until it is empty. The reason is that a worker's last message
    says that it has ended, and torch expects none of its batches after that.
    """

    _wlock: Any
    _writer: Any
    _sem: Any
    _send_bytes: Any
    _counted: _Counted | None = None

    def widen(self) -> None:
        """Enlarge the pipe so that it fits the messages of many workers; if that is refused, it fits 64 KiB."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._writer.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @override
    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        data = ForkingPickler.dumps(obj)
        if len(data) > _DIRECT_BYTES or (self._counted is not None and self._counted.left):
            self._put_by_thread(obj, block, timeout)
            return
        # As in the queue's own ``put``: the receiver of a message releases the semaphore once.
        self._sem.acquire()
        with self._wlock:
            self._writer.send_bytes(data)

    def _put_by_thread(self, obj: Any, block: bool, timeout: float | None) -> None:
        if self._counted is None:
            # In the worker, before the thread begins, because it writes with the function that it finds here.
            self._send_bytes = self._counted = _Counted(self._send_bytes)
        self._counted.expect()
        super().put(obj, block, timeout)


class DirectContext:
    """A multiprocessing context for torch's iterator, whose first queue is that of the results."""

    def __init__(self, context: Any) -> None:
        """Wrap ``context``, or a module that has its functions."""
        self._context = context
        self._asked = False

    def Queue(self) -> Any:  # noqa: N802 -- the context's own name
        """Return a direct queue at the first call, and then the context's own queues."""
        if self._asked:
            return self._context.Queue()
        self._asked = True
        made = DirectQueue(ctx=self._context.get_context())
        made.widen()
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
