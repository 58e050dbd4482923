"""What must hold of an index that somebody else made, whatever its numbers and names say.

None of this shows that its digests are those of the layer: only who vouches for it does
(``index_sharing``). It shows that whoever reads by it stays inside the blob, the memory
and the tree that an index of our own would keep to.
"""

from typing import get_args

import numpy as np

from omniload.base.errors import IntegrityError
from snapshot.image.entries import MAX_ENTRIES, Entry, Kind, check_entry, clean_path
from snapshot.image.layer_index import MAX_BLOCK_BYTES, LayerIndex
from snapshot.oci.manifest import Descriptor, compression_of

__all__ = ["check_index"]

_KINDS = frozenset(get_args(Kind))


def check_index(index: LayerIndex, layer: Descriptor, diff_id: str) -> LayerIndex:
    """Return an index if it is about this layer and breaks no bounds.

    Args:
        index: As it was decoded.
        layer: As the manifest tells it.
        diff_id: Of the layer, as the configuration tells it.

    Raises:
        IntegrityError: It is about another, or an entry or block of it is impossible.
    """
    said = (index.blob_digest, index.blob_bytes, index.diff_id, index.format)
    known = (layer.digest, layer.size, diff_id, compression_of(layer))
    if said != known:
        raise IntegrityError(f"index of {said}, wanted for {known}; it is not used")
    if fault := _fault_of_blocks(index):
        raise IntegrityError(f"index of layer {layer.digest}: {fault}; it is not used")
    if len(index.entries) > MAX_ENTRIES:
        raise IntegrityError(f"index of layer {layer.digest}: {len(index.entries)} entries")
    for entry in index.entries:
        try:
            _check(entry, index)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise IntegrityError(
                f"index of layer {layer.digest}: {entry.path!r:.200} is no entry: {error!r}"
            ) from error
    return index


def _fault_of_blocks(index: LayerIndex) -> str:
    blocks_B = index.blocks_B
    if not len(blocks_B):
        return ""
    size_B = blocks_B["size"].astype(np.int64)
    packed_B = blocks_B["blob_size"].astype(np.int64)
    place_B = blocks_B["blob_offset"]
    window_B = blocks_B["window"]
    if size_B.min() < 1 or size_B.max() > MAX_BLOCK_BYTES or packed_B.max() > 2 * MAX_BLOCK_BYTES:
        return f"blocks of {size_B.min()} to {size_B.max()} bytes, {packed_B.max()} packed"
    # Unsigned, so nothing may be added before it is known to be small.
    if (place_B > index.blob_bytes).any() or (
        place_B.astype(np.int64) + packed_B > index.blob_bytes
    ).any():
        return f"blocks outside of the {index.blob_bytes} bytes of the blob"
    if (blocks_B["bits"] > 7).any() or ((blocks_B["bits"] > 0) & (place_B == 0)).any():
        return "blocks that begin with bits of no byte"
    if window_B.min() < -1 or window_B.max() >= len(index.windows_W):
        return f"windows up to {window_B.max()} of {len(index.windows_W)}"
    return ""


def _check(entry: Entry, index: LayerIndex) -> None:
    texts = (entry.path, entry.kind, entry.target, *(name for name, _ in entry.xattrs))
    extents = entry.extents
    numbers = [entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.size_bytes, *entry.device]
    numbers += [n for e in extents for n in (e.file_offset, e.stream_offset, e.size_bytes)]
    if not all(type(text) is str for text in texts) or entry.kind not in _KINDS:
        raise TypeError("a name is no text, or the kind unknown")
    if not all(type(number) is int for number in numbers):
        raise TypeError("a number is none")
    if clean_path(entry.path, layer=index.blob_digest) != entry.path:
        raise ValueError("its path is not as we write it")
    if entry.kind == "hardlink" and clean_path(entry.target, layer="") != entry.target:
        raise ValueError(f"its target {entry.target!r:.200} is not as we write it")
    check_entry(entry, layer=index.blob_digest)
    if any(e.stream_offset + e.size_bytes > index.stream_bytes for e in extents):
        raise ValueError(f"it leaves the stream of {index.stream_bytes} bytes")
