"""What every source promises; a format adds a fixture named ``kind`` that writes its shards.

A kind holds::

    write(path, texts)   one shard, several units where the format has them
    config(folder)       its part of a mix file, for all shards in the folder
    suffix               of its shards
    tokenizer            of the mix, or None
    corrupt(path)        makes a shard undecodable without changing its size
    truncate(path)       cuts a shard short
"""

import os

import numpy as np
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.source.source import open_source

SHARDS = 3
TEXTS_PER_SHARD = 40


def texts_of_shard(shard):
    return [f"shard {shard} record {i} {'x' * (i * 7 % 23)} é" for i in range(TEXTS_PER_SHARD)]


def expected_tokens(text):
    return (*text.encode(), 256)


def samples(block):
    return [tuple(block.tokens[i].tolist()) for i in range(len(block.tokens))]


class SourceContract:
    @pytest.fixture
    def folder(self, tmp_path, kind):
        for shard in range(SHARDS):
            kind.write(tmp_path / f"part-{shard}{kind.suffix}", texts_of_shard(shard))
        return tmp_path

    @pytest.fixture
    def opened(self, folder, kind):
        def open_again(name="web", seed=11, **changes):
            config = kind.config(folder).model_copy(update=changes)
            return open_source(name, config, seed=seed, tokenizer=kind.tokenizer, base_dir=folder)

        return open_again

    @pytest.fixture
    def shards(self, folder, kind):
        return sorted(folder.glob(f"part-*{kind.suffix}"))

    def test_an_epoch_holds_every_record_exactly_once(self, opened):
        source = opened()

        block = source.read(0, source.positions_per_epoch)

        assert source.positions_per_epoch == SHARDS * TEXTS_PER_SHARD
        assert sorted(samples(block)) == sorted(
            expected_tokens(text) for shard in range(SHARDS) for text in texts_of_shard(shard)
        )

    def test_tables_and_tokens_agree(self, opened):
        block = opened().read(5, 50)

        assert (block.table.start, block.table.stop, block.skipped) == (5, 50, 0)
        assert block.table.positions_N.tolist() == list(range(5, 50))
        assert block.table.subs_N.tolist() == [0] * 45
        assert block.table.lengths_N.tolist() == block.tokens.lengths_N.tolist()
        assert block.tokens.values_V.dtype == np.int32
        assert block.table.lengths_N.dtype == block.table.subs_N.dtype == np.int32

    def test_records_are_shuffled_anew_in_every_epoch(self, opened):
        source = opened()
        n = source.positions_per_epoch

        first, second = samples(source.read(0, n)), samples(source.read(n, 2 * n))

        assert first != second
        assert sorted(first) == sorted(second)

    def test_without_shuffle_records_come_as_stored(self, opened, kind):
        shuffle = kind.config(".").shuffle.model_copy(update={"method": "none"})

        block = opened(shuffle=shuffle).read(0, SHARDS * TEXTS_PER_SHARD)

        assert samples(block) == [
            expected_tokens(text) for shard in range(SHARDS) for text in texts_of_shard(shard)
        ]

    def test_reading_resumes_at_every_position(self, opened):
        source, resumed = opened(), opened()
        stop = source.positions_per_epoch + 7
        whole = samples(source.read(0, stop))

        tails = [samples(resumed.read(start, stop)) for start in range(stop + 1)]

        assert tails == [whole[start:] for start in range(stop + 1)]

    def test_single_positions_in_any_order_give_the_samples_of_one_read(self, opened):
        source, hopping = opened(), opened()
        n = 2 * source.positions_per_epoch
        positions = np.random.default_rng(0).permutation(n)[:60].tolist()

        whole = samples(source.read(0, n))

        assert [samples(hopping.read(p, p + 1))[0] for p in positions] == [
            whole[p] for p in positions
        ]

    def test_other_names_and_seeds_give_other_orders(self, opened):
        n = SHARDS * TEXTS_PER_SHARD
        here = samples(opened().read(0, n))

        assert samples(opened(name="code").read(0, n)) != here
        assert samples(opened(seed=12).read(0, n)) != here
        assert samples(opened().read(0, n)) == here

    def test_an_empty_range_is_an_empty_block(self, opened):
        block = opened().read(9, 9)

        assert (block.table.start, block.table.stop, len(block.table)) == (9, 9, 0)
        assert (len(block.tokens), block.tokens.values_V.dtype) == (0, np.int32)

    def test_a_range_that_is_none_is_refused(self, opened):
        with pytest.raises(ValueError, match="positions 4 to 3"):
            opened().read(4, 3)

    def test_releasing_the_decoded_block_changes_nothing(self, opened):
        source = opened()
        before = samples(source.read(0, 30))

        source.release()

        assert samples(source.read(0, 30)) == before

    def test_an_empty_shard_gives_no_sample(self, opened, folder, kind):
        kind.write(folder / f"part-1a{kind.suffix}", [])
        source = opened()

        block = source.read(0, source.positions_per_epoch)

        assert len(block.tokens) == SHARDS * TEXTS_PER_SHARD

    def test_a_record_of_empty_text_gives_no_sample(self, opened, folder, kind):
        kind.write(folder / f"part-9{kind.suffix}", ["", "one", ""])
        source = opened()

        block = source.read(0, source.positions_per_epoch)

        assert source.positions_per_epoch == SHARDS * TEXTS_PER_SHARD + 3
        assert len(block.tokens) == SHARDS * TEXTS_PER_SHARD + 1
        assert len(set(block.table.positions_N.tolist())) == len(block.tokens)
        assert block.skipped == 0

    def test_a_source_without_files_is_refused(self, opened, shards):
        for shard in shards:
            shard.unlink()

        with pytest.raises(ConfigError, match="matches no file"):
            opened()

    def test_a_corrupt_shard_is_named(self, opened, shards, kind):
        kind.corrupt(shards[1])

        with pytest.raises(IntegrityError, match="part-1"):
            opened().read(0, SHARDS * TEXTS_PER_SHARD)

    def test_a_shard_cut_short_is_named(self, opened, shards, kind):
        kind.truncate(shards[1])

        with pytest.raises(IntegrityError, match="part-1"):
            opened().read(0, SHARDS * TEXTS_PER_SHARD)

    def test_a_shard_that_changes_under_way_is_named(self, opened, shards):
        source = opened()
        status = shards[1].stat()
        os.utime(shards[1], ns=(status.st_atime_ns, status.st_mtime_ns + 1))

        with pytest.raises(IntegrityError, match=r"part-1.*changed since the source was opened"):
            source.read(0, source.positions_per_epoch)

    def test_a_shard_that_vanishes_under_way_is_named(self, opened, shards):
        source = opened()
        shards[1].unlink()

        with pytest.raises(IntegrityError, match=r"part-1.*gone since the source was opened"):
            source.read(0, source.positions_per_epoch)
