"""Shards that were damaged at random, of every kind: refused by name, or read as what they hold now.

What a format says of itself (lengths, offsets, counts) is followed only after it was checked: whatever
bytes stand there, an error is one of ours and names a file, and no read leads out of it.
"""

import itertools
import struct

import numpy as np
import pytest

from omniload.base.errors import OmniloadError
from omniload.source.source import open_source
from tests.support.plane.source_contract import texts_of_shard
from tests.support.plane.source_kinds import KINDS

MUTANTS = 60
NUMBERS = (0, 1, -1, 7, 255, 2**15, 2**31 - 1, -(2**31), 2**62, -(2**63))


def damaged(data, rng):
    """Return other bytes: a number replaced, bytes flipped, taken out, doubled or cut off."""
    data = bytearray(data)
    at = int(rng.integers(len(data)))
    if rng.random() < 0.5:  # heads are at the ends
        at = int(rng.choice([at % 256, len(data) - 1 - at % 64])) % len(data)
    length = int(rng.choice([1, 4, 8, 30]))
    match int(rng.integers(5)):
        case 0:
            number = NUMBERS[rng.integers(len(NUMBERS))]
            value = struct.pack("<q", number)[: int(rng.choice([1, 2, 4, 8]))]
            data[at : at + len(value)] = value
        case 1:
            for place in range(at, min(at + length, len(data))):
                data[place] ^= int(rng.integers(1, 256))
        case 2:
            del data[at : at + length]
        case 3:
            data[at:at] = data[at : at + length]
        case 4:
            del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_shard_is_refused_by_name_or_read(name, tmp_path):
    kind = KINDS[name]()
    kind.write(tmp_path / f"part-0{kind.suffix}", texts_of_shard(0))
    config = kind.config(tmp_path)
    files = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    rng = np.random.default_rng(17)
    outcomes = {"refused": 0, "read": 0}
    nameless = []

    for path in itertools.islice(itertools.cycle(files), MUTANTS):
        path.write_bytes(damaged(files[path], rng))
        try:
            source = open_source("web", config, seed=1, tokenizer=kind.tokenizer, base_dir=tmp_path)
            block = source.read(0, min(source.positions_per_epoch, 1_000))
        except OmniloadError as error:
            outcomes["refused"] += 1
            nameless += [str(error)] * ("part-" not in str(error) and path.name not in str(error))
        else:
            assert int(block.tokens.offsets[-1]) == len(block.tokens.values_V)
            assert block.tokens.values_V.min(initial=0) >= 0
            outcomes["read"] += 1
        path.write_bytes(files[path])

    assert nameless == []
    assert outcomes["refused"] > MUTANTS // 20
