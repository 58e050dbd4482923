"""Format of a striped checkpoint: the index, committed last, and the safetensors header of a shard.

The index is sealed JSON (``trainer_integration.checkpoint.file_digests``)::

    {"version": 1,
     "files": {"shard-00001-of-00002.safetensors": {"size_bytes": 1052672}, ...},
     "tensors": {"layers.0.w": {"dtype": "F32", "sizes": [1024, 512], "chunks": [
         {"offsets": [0, 0], "sizes": [512, 512], "file": "shard-00001-...", "at": 4096}, ...]}},
     "about": {...}, "blake2b": ...}

Each shard is a safetensors file as written by torch's own DCP, so that readers of those files can read these through a
mount. This module is free of torch, because a launcher reads the index, too.

A chunk is a box of a tensor, stored row-major. A box of the chunk is a slice along every dimension. Its elements lie in
runs, and there is only one run if only the outermost dimension is cut. For example, a chunk has 3 rows of 4 elements,
of which rows 1 and 2 are wanted from column 2 on::

    . . . .
    . . X X      two runs of 2 elements, enclosed by 6 elements from element 6 on
    . . X X

Shape suffixes in this module:
    D  dimensions of the tensor
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import IntegrityError
from omniload.base.state import require_version
from trainer_integration.checkpoint.file_digests import sealed_json, unsealed_json

__all__ = [
    "INDEX",
    "ITEM_BYTES",
    "MAX_INDEX_BYTES",
    "VERSION",
    "Box",
    "Chunk",
    "ChunkToSave",
    "Index",
    "SavedTensor",
    "ShardFile",
    "Slab",
    "lay_out",
    "shard_name",
]

VERSION = 1
INDEX = "index.json"
"""File that makes a checkpoint: without it, the shards in the folder mean nothing."""
MAX_INDEX_BYTES = 256 << 20
"""Longest index that is read, which allows over a million chunks."""
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "F32"), 4),
    **dict.fromkeys(("I64", "F64"), 8),
}
"""Bytes of an element by the name of its type in safetensors."""
_PAGE_BYTES = 4096


_Elements = tuple[Annotated[int, Field(ge=0, le=2**63 - 1)], ...]


class Chunk(StrictModel):
    """A box of a tensor, and the position of its bytes: row-major and contiguous."""

    offsets: _Elements
    """First element along each dimension of the tensor."""
    sizes: _Elements
    """Elements along each dimension."""
    file: str = Field(pattern=r"^shard-\d{5,}-of-\d{5,}\.safetensors$")
    at: int = Field(ge=0)
    """First byte within the file."""


class SavedTensor(StrictModel):
    """A tensor of the checkpoint."""

    dtype: str
    """Name of ``ITEM_BYTES``."""
    sizes: _Elements
    """Elements along each dimension."""
    chunks: tuple[Chunk, ...]
    """Disjoint boxes that together make up the tensor."""


class ShardFile(StrictModel):
    """A file of the checkpoint."""

    size_bytes: int = Field(ge=0)


class Index(StrictModel):
    """Everything that a reader needs to find the bytes of any tensor."""

    version: int = VERSION
    files: dict[str, ShardFile]
    tensors: dict[str, SavedTensor]
    about: dict[str, Any] = Field(default_factory=dict)
    """Plain JSON from the saving code, committed with the tensors."""

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
            IntegrityError: The bytes are not what was written, or contradict themselves.
            StateError: Another version wrote them.
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
        if tensor.dtype not in ITEM_BYTES:
            raise IntegrityError(
                f"{name}: tensor {key!r} has dtype {tensor.dtype!r}, none of {sorted(ITEM_BYTES)}"
            )
        # Elements are only counted: the writer keeps chunks from overlapping, and a changed index fails its digest.
        found, wanted = sum(math.prod(c.sizes) for c in tensor.chunks), math.prod(tensor.sizes)
        if found != wanted:
            raise IntegrityError(
                f"{name}: chunks of tensor {key!r} hold {found} elements, it has {wanted}"
            )
        for chunk in tensor.chunks:
            self._check_box(key, tensor, chunk, name)
            size = math.prod(chunk.sizes) * ITEM_BYTES[tensor.dtype]
            file = self.files.get(chunk.file)
            if file is None or chunk.at + size > file.size_bytes:
                there = "is not listed" if file is None else f"has {file.size_bytes} bytes"
                raise IntegrityError(
                    f"{name}: tensor {key!r} lies at {chunk.at}+{size} of {chunk.file}, which {there}"
                )

    @staticmethod
    def _check_box(key: str, tensor: SavedTensor, chunk: Chunk, name: str) -> None:
        within = len(chunk.offsets) == len(chunk.sizes) == len(tensor.sizes) and all(
            offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.sizes, strict=True)
        )
        if not within:
            raise IntegrityError(
                f"{name}: a chunk of tensor {key!r} is the box {chunk.sizes} at {chunk.offsets}, "
                f"which leaves {tensor.sizes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkToSave:
    """A chunk that goes into a shard."""

    tensor: str
    dtype: str
    """Name of ``ITEM_BYTES``."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunk."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


def shard_name(number: int, count: int) -> str:
    """Return the file name of a rank: ``number`` of ``count``, from 1."""
    return f"shard-{number:05d}-of-{count:05d}.safetensors"


def lay_out(chunks: Sequence[ChunkToSave]) -> tuple[bytes, tuple[int, ...]]:
    """Lay chunks one after another in a safetensors file, in the given order.

    The header fills whole pages, so that tensors that fill pages are page-aligned when the file is mapped.

    Returns:
        The bytes ahead of the chunks, and the first byte of each chunk within the file.
    """
    entries: dict[str, object] = {}
    offsets: dict[str, Mapping[str, Sequence[int]]] = {}
    at, starts = 0, []
    for chunk, key in zip(chunks, _keys_of(chunks), strict=True):
        starts.append(at)
        entries[key] = {
            "dtype": chunk.dtype,
            "shape": chunk.sizes,
            "data_offsets": (at, at + chunk.size_bytes),
        }
        offsets[key] = {"saved_offsets": chunk.offsets}
        at += chunk.size_bytes
    # Names under which torch's own reader of safetensors looks for DCP's additions.
    custom = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": orjson.dumps(offsets).decode(),
    }
    text = orjson.dumps({"__metadata__": custom, **entries})
    # The format allows a header to end in spaces; its length, eight bytes, comes before it.
    text = text.ljust(-(-(8 + len(text)) // _PAGE_BYTES) * _PAGE_BYTES - 8)
    head = len(text).to_bytes(8, "little") + text
    return head, tuple(len(head) + start for start in starts)


def _keys_of(chunks: Iterable[ChunkToSave]) -> list[str]:
    """Return a name for each chunk: its tensor's name, with the offsets if a rank has several chunks of it."""
    keys: list[str] = []
    seen: set[str] = set()
    for chunk in chunks:
        place = ",".join(map(str, chunk.offsets))
        # The plain name is used if it is free, because other readers of safetensors look for it.
        keys.append(f"{chunk.tensor}@{place}" if chunk.tensor in seen else chunk.tensor)
        seen.add(chunk.tensor)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Some rows of a box, along one of its dimensions, and the bytes of the chunk that enclose them."""

    dimension: int
    first_row: int
    """First row along ``dimension`` of the box."""
    num_rows: int
    offset_bytes: int
    """First byte within the chunk."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a chunk.

    Raises:
        ValueError: The box exceeds the chunk.
    """

    sizes_D: tuple[int, ...]
    """Elements of the chunk along each dimension."""
    offsets_D: tuple[int, ...]
    """First element of the box."""
    lengths_D: tuple[int, ...]
    """Lengths of the box along each dimension."""

    def __post_init__(self) -> None:
        fits = len(self.sizes_D) == len(self.offsets_D) == len(self.lengths_D) and all(
            at >= 0 and length >= 0 and at + length <= size
            for size, at, length in zip(self.sizes_D, self.offsets_D, self.lengths_D, strict=True)
        )
        if not fits:
            raise ValueError(
                f"box {self.lengths_D} at {self.offsets_D} is not within a chunk of {self.sizes_D}"
            )

    @property
    def strides_D(self) -> tuple[int, ...]:
        """Elements of the chunk between neighbours along each dimension."""
        return tuple(math.prod(self.sizes_D[d + 1 :]) for d in range(len(self.sizes_D)))

    @property
    def first_element(self) -> int:
        """Number of the box's first element within the chunk."""
        return sum(at * step for at, step in zip(self.offsets_D, self.strides_D, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.lengths_D)

    @property
    def run_elements(self) -> int:
        """Contiguous elements of the box in the chunk, a number that is the same everywhere."""
        run = 1
        for size, length in zip(reversed(self.sizes_D), reversed(self.lengths_D), strict=True):
            run *= length
            if length != size:
                break
        return run

    def runs(self) -> Iterator[int]:
        """Yield the first element of every run, rising, which is the order of the box's own elements.

        There are ``num_elements / run_elements`` runs, and none for an empty box.
        """
        if not self.num_elements:
            return
        dimensions = len(self.sizes_D)
        inner = next(
            d for d in range(dimensions + 1) if math.prod(self.lengths_D[d:]) == self.run_elements
        )
        # Dimensions with a single element add only an offset.
        yield from self._starts(0, inner, self.first_element)

    def _starts(self, dimension: int, stop: int, at: int) -> Iterator[int]:
        if dimension == stop:
            yield at
            return
        for row in range(self.lengths_D[dimension]):
            yield from self._starts(dimension + 1, stop, at + row * self.strides_D[dimension])

    def slabs(self, element_bytes: int, *, most_bytes: int) -> Iterator[Slab]:
        """Cut the box along its first dimension with more than one element, to read it in pieces.

        Args:
            element_bytes: Bytes of an element.
            most_bytes: Most bytes of the chunk that a slab encloses; one row is always allowed.

        Yields:
            Slabs of whole rows that together contain the box once; none for an empty box.
        """
        if not self.num_elements:
            return
        # If the box were cut along a dimension of a single element, every slab would enclose the whole box.
        dimension = next((d for d, n in enumerate(self.lengths_D) if n > 1), 0)
        rows = self.lengths_D[dimension] if self.lengths_D else 1
        stride = self.strides_D[dimension] if self.strides_D else 1
        # From the first element of a row to its last, both included.
        row = 1 + sum(
            (length - 1) * step
            for d, (length, step) in enumerate(zip(self.lengths_D, self.strides_D, strict=True))
            if d != dimension
        )
        # The first row counts in full, and each further row as the stride to it.
        per_slab = 1 + max(0, (most_bytes // element_bytes - row) // stride)
        for begin in range(0, rows, per_slab):
            num_rows = min(per_slab, rows - begin)
            yield Slab(
                dimension=dimension,
                first_row=begin,
                num_rows=num_rows,
                offset_bytes=(self.first_element + begin * stride) * element_bytes,
                size_bytes=((num_rows - 1) * stride + row) * element_bytes,
            )
