"""Digests of batches: how "the same samples" is proved.

Every row has a 64-bit digest of its tokens, labels, document bounds, sample keys and columns of a user's own, every
image one of its patches, their grid and its sample's key. A step's digest is the sum of all
modulo 2**64: it does not depend on which rank or microbatch holds a row or an image, and the
ranks' shares of it can be added up by an all-reduce.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from omniload.batch.images import images_of
from omniload.batch.microbatch import Batch, Microbatch
from omniload.mix.columns import COLUMNS

__all__ = ["DIGEST_MODULUS", "batch_digest", "combined", "microbatch_digest"]

# Unsigned 64-bit numbers wrap around, so any collective that adds them gives the same sum.
DIGEST_MODULUS = 1 << 64


def microbatch_digest(microbatch: Microbatch) -> int:
    """Return the sum of the digests of rows and images of one microbatch, in ``[0, 2**64)``."""
    num_rows, length = microbatch.tokens_RT.shape
    bounds = microbatch.cu_seqlens.astype("<i8")
    # Padding is a document without a key, so keys are dealt to rows by their documents' sources.
    begins = bounds[:-1]
    held = microbatch.sources_D >= 0
    rows_of_keys = (begins[held] // length).astype(np.int64) if length else np.empty(0, np.int64)
    key_bounds = rows_of_keys.searchsorted(np.arange(num_rows + 1))
    bound_rows = begins.searchsorted(np.arange(num_rows + 1) * length)
    starts = microbatch.document_starts.astype("<i8")
    tags = sorted(microbatch.columns_K.keys() - COLUMNS.keys())
    total = 0
    for row in range(num_rows):
        digest = xxhash.xxh3_64()
        # One byte order everywhere, because digests of all hosts are added up and compared with other runs.
        digest.update(np.ascontiguousarray(microbatch.tokens_RT[row], "<i4").data)
        # Labels too: a mask or a cut that moved trains on something else with the same tokens.
        digest.update(np.ascontiguousarray(microbatch.labels_RT[row], "<i4").data)
        digest.update((begins[bound_rows[row] : bound_rows[row + 1]] - row * length).tobytes())
        keys = microbatch.keys_K4[key_bounds[row] : key_bounds[row + 1]]
        digest.update(np.ascontiguousarray(keys, "<i8").data if len(keys) else b"")
        # Only for rows with such bounds; the digests of all other rows stay those of earlier releases.
        if len(starts):
            inside = starts[(starts >= row * length) & (starts < (row + 1) * length)]
            digest.update((inside - row * length).tobytes())
        for name in sorted(microbatch.aligned_RT):
            values = microbatch.aligned_RT[name][row]
            # Its name too: two columns that change places are another step.
            digest.update(name.encode())
            digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
        first, last = int(key_bounds[row]), int(key_bounds[row + 1])
        for name in tags:
            column = microbatch.columns_K[name].between(first, last)
            digest.update(name.encode())
            digest.update(column.offsets.astype("<i8", copy=False).tobytes())
            values_V = column.values_V
            digest.update(values_V.astype(values_V.dtype.newbyteorder("<"), copy=False).tobytes())
        total += digest.intdigest()
    for image in images_of(microbatch):
        total += _image_digest(image.key, image.number, image.grid, image.values_V)
    return total % DIGEST_MODULUS


def _image_digest(
    key_3: NDArray[np.int64], number: int, grid: tuple[int, int], values_V: NDArray[Any]
) -> int:
    """Return the digest of an image.

    Args:
        key_3: Source, position and sub of its sample.
        number: Its number in the sample.
        grid: Rows and columns of its patches.
        values_V: All values of its patches.
    """
    digest = xxhash.xxh3_64()
    digest.update(np.array([*key_3.tolist(), number, *grid], "<i8").data)
    digest.update(np.ascontiguousarray(values_V).data)
    return digest.intdigest()


def batch_digest(batch: Batch) -> int:
    """Return one rank's share of the digest of its step, in ``[0, 2**64)``.

    Raises:
        ValueError: The batch holds context-parallel slices; a row's digest needs the whole row.
    """
    whole = [microbatch for microbatch in batch.microbatches if isinstance(microbatch, Microbatch)]
    if len(whole) < len(batch.microbatches):
        raise ValueError(
            f"step {batch.step} holds context-parallel slices; take digests where whole rows are served"
        )
    return combined(microbatch_digest(microbatch) for microbatch in whole)


def combined(digests: Iterable[int]) -> int:
    """Add up digests of parts of a step."""
    return sum(digests) % DIGEST_MODULUS
