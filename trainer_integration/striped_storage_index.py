"""What a striped checkpoint holds: the index, committed last, and the safetensors header of a shard.

The index is sealed JSON (``trainer_integration.seals``)::

    {"version": 1,
     "files": {"shard-00001-of-00002.safetensors": {"size_bytes": 1052672}, ...},
     "tensors": {"layers.0.w": {"dtype": "F32", "sizes": [1024, 512], "chunks": [
         {"offsets": [0, 0], "sizes": [512, 512], "file": "shard-00001-...", "at": 4096}, ...]}},
     "blake2b": ...}

Each shard is a safetensors file as torch's own DCP writes them, so that whatever reads
those reads these through a mount.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson
import torch
from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.state import require_version
from trainer_integration.seals import sealed_json, unsealed_json

__all__ = [
    "DTYPES",
    "INDEX",
    "VERSION",
    "Chunk",
    "ChunkToSave",
    "Index",
    "SavedTensor",
    "ShardFile",
    "dtype_name",
    "lay_out",
    "shard_name",
]

VERSION = 1
INDEX = "index.json"
"""File that makes a checkpoint: without it the shards beside it are nothing."""
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
"""Types of elements by their names in safetensors."""
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_PAGE_BYTES = 4096


class Chunk(StrictModel):
    """A box of a tensor, and where its bytes lie: row-major, side by side."""

    offsets: tuple[int, ...]
    """First element along each dimension of the tensor."""
    sizes: tuple[int, ...]
    """Elements along each dimension."""
    file: str = Field(pattern=r"^shard-\d{5,}-of-\d{5,}\.safetensors$")
    at: int = Field(ge=0)
    """First byte within the file."""


class SavedTensor(StrictModel):
    """A tensor of the checkpoint."""

    dtype: str
    """Name of ``DTYPES``."""
    sizes: tuple[int, ...]
    """Elements along each dimension."""
    chunks: tuple[Chunk, ...]
    """Disjoint boxes that together are the tensor."""


class ShardFile(StrictModel):
    """A file of the checkpoint."""

    size_bytes: int = Field(ge=0)


class Index(StrictModel):
    """Everything a reader must know to find the bytes of any tensor."""

    version: int = VERSION
    files: dict[str, ShardFile]
    tensors: dict[str, SavedTensor]

    def encoded(self) -> bytes:
        """Return the bytes of the index."""
        return sealed_json(self.model_dump(mode="json"))

    @classmethod
    def decoded(cls, data: bytes, *, name: str) -> "Index":
        """Read the bytes of an index.

        Args:
            data: The bytes.
            name: Path for messages.

        Raises:
            IntegrityError: It is not what was written, or contradicts itself.
            StateError: Another version wrote it.
        """
        value = unsealed_json(data, name=name)
        require_version(value, VERSION, of=name)
        try:
            index = cls.model_validate_json(orjson.dumps(value))
        except ValidationError as error:
            raise IntegrityError(f"{name} breaks the format: {error}") from error
        for key, tensor in index.tensors.items():
            index._check(key, tensor, name)
        return index

    def _check(self, key: str, tensor: SavedTensor, name: str) -> None:
        if tensor.dtype not in DTYPES:
            raise IntegrityError(
                f"{name}: tensor {key!r} has dtype {tensor.dtype!r}, none of {sorted(DTYPES)}"
            )
        for chunk in tensor.chunks:
            size = math.prod(chunk.sizes) * DTYPES[tensor.dtype].itemsize
            file = self.files.get(chunk.file)
            if file is None or chunk.at + size > file.size_bytes:
                found = "is not listed" if file is None else f"has {file.size_bytes} bytes"
                raise IntegrityError(
                    f"{name}: tensor {key!r} lies at {chunk.at}+{size} of {chunk.file}, which {found}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkToSave:
    """A chunk that goes into a shard."""

    tensor: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunk."""
        return math.prod(self.sizes) * self.dtype.itemsize


def shard_name(number: int, count: int) -> str:
    """Return the file of a rank: ``number`` of ``count``, from 1."""
    return f"shard-{number:05d}-of-{count:05d}.safetensors"


def dtype_name(dtype: torch.dtype, *, tensor: str) -> str:
    """Return the name of an element type.

    Raises:
        ConfigError: safetensors has none for it.
    """
    if dtype not in _NAME_OF:
        raise ConfigError(
            f"tensor {tensor!r} has dtype {dtype}, which safetensors does not know; "
            f"convert it to one of {sorted(_NAME_OF, key=str)}"
        )
    return _NAME_OF[dtype]


def lay_out(chunks: Sequence[ChunkToSave]) -> tuple[bytes, tuple[int, ...]]:
    """Lay chunks side by side in a safetensors file, in the order given.

    The header fills whole pages, so that tensors which fill pages lie on pages when the
    file is mapped.

    Returns:
        The bytes ahead of the chunks, and the first byte of each chunk within the file.

    Raises:
        ConfigError: A chunk has a type that safetensors does not know.
    """
    entries: dict[str, object] = {}
    offsets: dict[str, Mapping[str, Sequence[int]]] = {}
    at, starts = 0, []
    for chunk, key in zip(chunks, _keys_of(chunks), strict=True):
        starts.append(at)
        entries[key] = {
            "dtype": dtype_name(chunk.dtype, tensor=chunk.tensor),
            "shape": chunk.sizes,
            "data_offsets": (at, at + chunk.size_bytes),
        }
        offsets[key] = {"saved_offsets": chunk.offsets}
        at += chunk.size_bytes
    # The names under which torch's own reader of safetensors looks for what DCP adds.
    custom = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": orjson.dumps(offsets).decode(),
    }
    text = orjson.dumps({"__metadata__": custom, **entries})
    text = text.ljust(-(-(8 + len(text)) // _PAGE_BYTES) * _PAGE_BYTES - 8)
    head = len(text).to_bytes(8, "little") + text
    return head, tuple(len(head) + start for start in starts)


def _keys_of(chunks: Iterable[ChunkToSave]) -> list[str]:
    """Return a name for each chunk: its tensor's, with the offsets where a rank holds several."""
    keys: list[str] = []
    seen: set[str] = set()
    for chunk in chunks:
        place = ",".join(map(str, chunk.offsets))
        keys.append(f"{chunk.tensor}@{place}" if chunk.tensor in seen else chunk.tensor)
        seen.add(chunk.tensor)
    return keys
