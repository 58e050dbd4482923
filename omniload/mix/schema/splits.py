"""Splits: which documents are held out of training, by a hash and by nothing else.

A document has a 64-bit key: ``xxh3_64`` of what its source's ``key`` names, or of its content. Splits
lie end to end from 0 on in the range of the key, in the order of the file, and training takes
the rest::

    0       0.01     0.03                                                     1
    |  eval  |  test  |  train                                                |     key / 2**64

So a document's split depends on neither seed, order, shards nor other documents; documents of one
key, such as copies, are in one split. Whoever has the key finds the split without this code.

Shape suffixes:
    R  records
"""

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Annotated

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field

from omniload.base.config import fault_at
from omniload.base.ragged import Ragged
from omniload.base.settings.faults import NAME_PATTERN, value_shown

__all__ = ["TRAIN", "Name", "Split", "Splits", "content_keys", "in_split", "key_of", "share_of"]

TRAIN = "train"
"""The split that is what no other takes."""
_KEYS = 1 << 64

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=128)]
"""Name of a source, a split or a tag."""


def _leave_some(splits: dict[str, float]) -> dict[str, float]:
    if TRAIN in splits:
        raise fault_at(
            f"{TRAIN} is {splits[TRAIN]}, and {TRAIN} is what the splits leave; remove it, or choose another name",
            TRAIN,
        )
    # Exactly: as doubles ten times 0.1 come to less than 1, and training would be left nothing all the same.
    if (held_out := sum(map(Fraction, splits.values()))) >= 1:
        raise fault_at(
            f"shares sum to {float(held_out):g}, so nothing is left for training; lower one"
        )
    return splits


Splits = Annotated[
    dict[Name, Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]],
    AfterValidator(_leave_some),
]
"""Share of the keys that each split takes."""


def _one_split(value: object) -> object:
    if isinstance(value, Mapping):
        raise fault_at(
            f"found {value_shown(dict(value))}, but split is the name of the split to draw; write the shares to hold "
            "out under splits"
        )
    return value


Split = Annotated[Name, BeforeValidator(_one_split)]
"""Name of the split that is drawn."""


def share_of(splits: Mapping[str, float], split: str) -> float:
    """Return the share of the keys that a split takes; 0 for one that is not there."""
    return (1.0 - sum(splits.values())) if split == TRAIN else splits.get(split, 0.0)


def in_split(
    keys_R: NDArray[np.uint64], splits: Mapping[str, float], split: str
) -> NDArray[np.bool_]:
    """Tell which records a split takes.

    Returns:
        True for the records of ``split``. Over all splits and ``train``, every record is true exactly once.
    """
    bounds: list[int] = []
    # In fractions: every machine must part the keys at the same one.
    exact = Fraction(0)
    for share in splits.values():
        exact += Fraction(share)
        # At most the last key: 2**64 itself is no number of 64 bits.
        bounds.append(min(ceil(exact * _KEYS), _KEYS - 1))
    # From the right: a key on a bound is of the split behind it.
    places_R = np.searchsorted(np.asarray(bounds, np.uint64), keys_R, side="right")
    wanted = len(splits) if split == TRAIN else list(splits).index(split)
    taken_R: NDArray[np.bool_] = places_R == wanted
    return taken_R


def key_of(content: bytes | memoryview) -> int:
    """Return the key of a document: of the UTF-8 of its key, or of its content."""
    return xxhash.xxh3_64_intdigest(content)


def content_keys(column: Ragged) -> NDArray[np.uint64]:
    """Return the key of each record by its content: its text, or its token ids as little-endian int32."""
    width = column.values_V.itemsize
    # As bytes where they lie: each record is hashed from a part of this view, without a copy.
    data = np.ascontiguousarray(column.values_V).data.cast("B")
    ends = (column.offsets * width).tolist()
    digests = (xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in pairwise(ends))
    return np.fromiter(digests, np.uint64, len(column))
