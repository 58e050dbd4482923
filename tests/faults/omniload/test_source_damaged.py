"""Shards and mix files that were spoilt at random, of every kind: refused by name, or read as what they hold now.

What a format says of itself (lengths, offsets, counts) is followed only after it was checked: whatever
bytes stand there, an error is one of ours and names a file, no read leads out of it, and records that may be
left out take none of another file with them.
"""

import numpy as np
import pytest

from tests.support.plane.sources.bad_inputs import SPOILT, spoilt_mixes, spoilt_shards

SHARDS, MIXES = 60, 12
MANY = 1_500


DAMAGED = [name for name, kind in SPOILT.items() if getattr(kind, "takes_damage", True)]
LONG = {"jsonl-gz-entered", "jsonl-zst-entered"}
"""Whose shards are of megabytes: in ``make soak`` alone."""


@pytest.mark.parametrize("name", [name for name in DAMAGED if name not in LONG])
def test_a_damaged_shard_is_refused_by_name_or_read_and_others_are_whole(name, tmp_path):
    outcomes = spoilt_shards(SPOILT[name](), tmp_path, np.random.default_rng(17), SHARDS)

    assert outcomes.nameless == outcomes.lost == []
    assert outcomes.cases == SHARDS
    assert outcomes.how["refused"] + outcomes.how["skipped"] > SHARDS // 20


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_mix_file_is_refused_with_its_line_or_is_one(name, tmp_path):
    outcomes = spoilt_mixes(SPOILT[name](), tmp_path, np.random.default_rng(17), MIXES)

    assert outcomes.nameless == []
    assert outcomes.how["refused"] > MIXES // 2


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DAMAGED)
def test_many_spoilt_inputs_of_a_kind(name, tmp_path):
    rng = np.random.default_rng(18)
    (tmp_path / "shards").mkdir()

    shards = spoilt_shards(SPOILT[name](), tmp_path / "shards", rng, MANY)
    mixes = spoilt_mixes(SPOILT[name](), tmp_path, rng, MANY)

    assert shards.nameless == shards.lost == mixes.nameless == []
    assert shards.cases + mixes.cases == 2 * MANY
