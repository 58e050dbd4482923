"""A source by position: where a record lies."""

import numpy as np
import pytest

from omniload.base.errors import IntegrityError
from omniload.mix.schema.tokenizers import ByteTokenizer
from omniload.mix.sources import JsonlSource
from omniload.source.block_memory import BlockMemory
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec


@pytest.fixture
def source(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_text('{"text": "x"}\n' * 40)
    config = JsonlSource(type="jsonl", path="*.jsonl", unit=100, shuffle={"block_units": 3})
    return open_source(
        SourceSpec("web", config, seed=1, tokenizer=ByteTokenizer(type="bytes"), base_dir=tmp_path)
    )


def test_a_source_stands_at_the_rest_of_a_block_whose_files_are_not_read_again(source, tmp_path):
    # Blocks of three units, of 8 records each.
    assert [source.decode_ahead(at, at + 1) for at in (30, 125, 7)] == [48, 144, 24]
    expected = source.read(7, 24).tokens.values_V.tolist()
    for shard in tmp_path.glob("*.jsonl"):
        shard.unlink()

    assert source.decode_ahead(23, 24) == 24
    assert source.read(7, 24).tokens.values_V.tolist() == expected
    with pytest.raises(IntegrityError, match="gone"):
        source.decode_ahead(24, 25)


def test_a_source_stands_at_two_blocks_and_decodes_neither_again_whichever_is_read_first(
    source, tmp_path
):
    expected = source.read(20, 48).tokens.values_V.tolist()
    # The second is at hand already; up to the end of the one behind it, which is not decoded.
    assert source.decode_ahead(20, 60) == 48
    for shard in tmp_path.glob("*.jsonl"):
        shard.unlink()

    later = source.read(30, 48).tokens.values_V.tolist()
    assert source.read(20, 30).tokens.values_V.tolist() + later == expected
    assert source.decode_ahead(24, 48) == 48
    with pytest.raises(IntegrityError, match="gone"):
        source.read(20, 24)


def test_a_block_that_is_neither_of_the_two_takes_the_place_of_both(source):
    memory = BlockMemory()
    source.share(memory)
    source.decode_ahead(20, 21)
    one = memory.used_bytes
    source.decode_ahead(20, 60)
    two = memory.used_bytes

    source.read(48, 50)

    assert (two, memory.used_bytes) == (2 * one, one)


def test_the_shards_of_many_records_of_a_block_are_told_by_ordering_it_once(source, monkeypatch):
    drawn, philox = [], np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda **words: drawn.append(1) or philox(**words))

    found = [source.shard_at(position) for position in range(source.positions_per_epoch)]

    assert [found.count(shard) for shard in range(3)] == [40, 40, 40]
    assert len(drawn) == 1 + 5  # the shards of the epoch, and the rows of each block
