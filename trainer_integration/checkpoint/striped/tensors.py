"""Tensors as bytes, bytes as stripe units, and types of elements by their names in safetensors."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from omniload.base.errors import ConfigError

__all__ = ["DTYPES", "bytes_of", "dtype_name", "units_of"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, *, tensor: str) -> str:
    """Return the name of an element type.

    Raises:
        ConfigError: safetensors has none for it.
    """
    if dtype not in _NAME_OF:
        raise ConfigError(
            f"tensor {tensor!r} has dtype {dtype}, which safetensors does not know; "
            f"convert it to one of {sorted(DTYPES)}"
        )
    return _NAME_OF[dtype]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the CPU; writing to it writes to the tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def units_of(
    parts: Iterable[bytes | memoryview], unit_bytes: int
) -> Iterator[memoryview | bytearray]:
    """Yield the units of ``parts`` laid one after another.

    Args:
        parts: Buffers of bytes; each must stay unchanged until the units made of it are used up.
        unit_bytes: Bytes of a unit.

    Yields:
        Views of ``unit_bytes`` bytes into a part; copies only of units that extend over several parts, and of the last
        unit, which may be short.
    """
    joined = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        if joined:
            room = unit_bytes - len(joined)
            joined += view[:room]
            view = view[room:]
            if len(joined) < unit_bytes:
                continue
            yield joined
            # A new buffer, because the receiver of the last one may not have written it yet.
            joined = bytearray()
        whole = len(view) // unit_bytes * unit_bytes
        for at in range(0, whole, unit_bytes):
            yield view[at : at + unit_bytes]
        # Less than a unit, which waits for the bytes after it.
        joined += view[whole:]
    if joined:
        yield joined
