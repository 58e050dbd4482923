"""The promises of every source; ``tests/support/plane/sources/source_kinds.py`` has the kinds of shards.

A kind has::

    write(path, texts)   writes one shard, with several units if the format has them
    config(folder)       the mix file's entry for all shards in the folder
    suffix               suffix of its shards
    tokenizer            tokenizer of the mix, or None
    corrupt(path)        makes a shard undecodable without changing its size
    truncate(path)       cuts a shard short

and, if it differs from the usual::

    shards(folder)       one file of each shard
    everything(folder)   all files of all shards
    number               column or key with the number of a record in its shard, if it has one
    empty_records        False if no record can be empty
    without_files        the message when all of ``everything`` is gone
    without_store        the message about a URL, if a library reads by itself and does not know our stores
    takes_damage         False if a library may end the process at altered bytes
"""

import os
import re
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xxhash

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, IntegrityError, OmniloadError
from omniload.client import Client
from omniload.commands.opening import find_sources
from omniload.mix.schema.records import Between
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.distinct.drawn_before import drawn_so_far, write_drawn
from omniload.source.formats import held_files
from omniload.source.formats.opening import open_format
from omniload.source.parts.sample_block import merged
from omniload.source.parts.share import Part
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.builders import a_mix

SHARDS = 3
TEXTS_PER_SHARD = 40


def texts_of_shard(shard):
    return [f"shard {shard} record {i} {'x' * (i * 7 % 23)} é" for i in range(TEXTS_PER_SHARD)]


def expected_tokens(text):
    return (*text.encode(), 256)


def samples(block):
    values, ends = block.tokens.values_V.tolist(), block.tokens.lengths_N.cumsum().tolist()
    return [tuple(values[start:end]) for start, end in pairwise([0, *ends])]


class SourceContract:
    @pytest.fixture(scope="session")
    def written(self, tmp_path_factory):
        """The shards of a kind, written once; each test changes its own copy."""

        @cache
        def of(kind):
            folder = tmp_path_factory.mktemp("shards")
            for shard in range(SHARDS):
                kind().write(folder / f"part-{shard}{kind.suffix}", texts_of_shard(shard))
            return folder

        return of

    @pytest.fixture
    def folder(self, tmp_path, written, kind):
        return shutil.copytree(written(type(kind)), tmp_path, dirs_exist_ok=True)

    @pytest.fixture
    def opened(self, folder, kind):
        def open_again(name="web", seed=11, cache_dir=None, **changes):
            config = kind.config(folder).model_copy(update=changes)
            return open_source(
                SourceSpec(
                    name,
                    config,
                    seed=seed,
                    tokenizer=kind.tokenizer,
                    base_dir=folder,
                    cache_dir=cache_dir,
                )
            )

        return open_again

    @pytest.fixture
    def shards(self, folder, kind):
        found = getattr(kind, "shards", lambda folder: sorted(folder.glob(f"part-*{kind.suffix}")))
        return found(folder)

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

    @pytest.mark.parametrize("readers", [2, 3])
    def test_parts_that_readers_have_read_are_together_what_one_reads(self, opened, readers):
        whole = opened().read(3, 200)

        parts = [opened().read_part(3, 200, Part(k, readers)) for k in range(readers)]

        assert sum(len(part.table) for part in parts) == len(whole.table)
        assert samples(merged(parts)) == samples(whole)
        assert merged(parts).table.positions_N.tolist() == whole.table.positions_N.tolist()

    def test_without_a_shard_all_other_records_are_where_they_were(self, opened):
        source, whole = opened(), opened().read(3, 200)
        shards = [source.shard_at(position) for position in whole.table.positions_N.tolist()]
        found = samples(whole)

        for shard in range(SHARDS):
            left = source.read(3, 200, (shard,))
            kept = [i for i, each in enumerate(shards) if each != shard]
            assert 0 < len(kept) < len(shards)
            assert samples(left) == [found[i] for i in kept]
            assert left.table.positions_N.tolist() == whole.table.positions_N[kept].tolist()
            assert (left.table.start, left.table.stop) == (3, 200)

    @pytest.mark.parametrize("length", [1, SHARDS * TEXTS_PER_SHARD])
    @pytest.mark.parametrize("position", [0, 37, SHARDS * TEXTS_PER_SHARD + 5])
    def test_where_a_source_stands_it_reads_without_its_files(
        self, opened, folder, position, length
    ):
        source, expected = opened(), opened()
        stop = source.decode_ahead(position, position + length)

        away = folder.rename(folder.with_name("away"))
        try:
            block = source.read(position, stop)
        finally:
            away.rename(folder)

        assert stop > position
        assert samples(block) == samples(expected.read(position, stop))

    def test_where_a_source_stands_less_a_shard_it_reads_less_that_shard(self, opened):
        source = opened()
        shard = source.shard_at(40)

        stop = source.decode_ahead(40, 41, (shard,))

        assert samples(source.read(40, stop, (shard,))) == samples(
            opened().read(40, stop, (shard,))
        )

    def test_the_shards_of_a_source_are_files_that_its_records_lie_in(self, opened):
        source = opened()

        assert len({*source.shards}) == len(source.shards)
        firsts = [shard.partition(" and ")[0] for shard in source.shards]  # for groups of files
        assert all(Path(first).is_file() for first in firsts)
        every = {source.shard_at(p) for p in range(source.positions_per_epoch)}
        assert every == {*range(len(source.shards))}

    def test_a_folder_whose_name_is_no_utf8_is_read_as_any_other(
        self, opened, folder, kind, tmp_path_factory
    ):
        strange = tmp_path_factory.mktemp("names") / os.fsdecode(b"caf\xe9")
        shutil.copytree(folder, strange)
        n = SHARDS * TEXTS_PER_SHARD

        def open_strange():
            return open_source(
                SourceSpec(
                    "web",
                    kind.config(strange),
                    seed=11,
                    tokenizer=kind.tokenizer,
                    base_dir=strange,
                    cache_dir=strange / "index",
                )
            )

        if getattr(kind, "utf8_alone", False):
            with pytest.raises(ConfigError, match="the name is not UTF-8"):
                open_strange()
        else:
            assert samples(open_strange().read(0, n)) == samples(opened().read(0, n))

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

    def test_records_that_another_loader_had_drawn_are_left_out_of_the_first_epoch_alone(
        self, opened, kind, folder, tmp_path_factory
    ):
        shuffle = kind.config(".").shuffle.model_copy(update={"method": "none"})
        n = SHARDS * TEXTS_PER_SHARD
        stored = samples(opened(shuffle=shuffle).read(0, n))
        found = open_format(SourceSpec("web", kind.config(folder), base_dir=folder))
        rows_F = found.format.units().records_F(len(found.files))
        ends_F = np.cumsum(rows_F)
        # The first and the last record of every second file.
        ends = {
            f: (int(ends_F[f] - rows_F[f]), int(ends_F[f]) - 1) for f in range(0, len(rows_F), 2)
        }
        drawn = {record for both in ends.values() for record in both}
        path = tmp_path_factory.mktemp("drawn") / "web.arrow"
        write_drawn(
            path,
            {
                found.files[f].path: np.unique([0, last - first])
                for f, (first, last) in ends.items()
            }.items(),
        )

        source = opened(drawn_before=str(path))

        assert 2 <= len(drawn) < n
        assert sorted(samples(source.read(0, n))) == sorted(
            sample for record, sample in enumerate(stored) if record not in drawn
        )
        assert sorted(samples(source.read(n, 2 * n))) == sorted(stored)

    @pytest.mark.parametrize("before", [1, 37, SHARDS * TEXTS_PER_SHARD + 50])
    def test_what_a_run_had_drawn_and_the_first_epoch_of_the_next_are_together_every_record_once(
        self, opened, kind, folder, tmp_path_factory, before
    ):
        n = SHARDS * TEXTS_PER_SHARD
        begun, path = before // n * n, tmp_path_factory.mktemp("drawn") / "web.arrow"
        spec = SourceSpec("web", kind.config(folder), base_dir=folder, seed=11)
        found = open_format(spec)

        so_far = drawn_so_far(spec, found.format.units(), found.files, cursor=(before - 1, 1, 0))
        write_drawn(path, so_far.by_shard())
        rest = opened(name="again", seed=5, drawn_before=str(path))

        had = samples(opened().read(begun, before))
        assert (so_far.epoch, so_far.drawn.total()) == (before // n, len(had))
        assert sorted(had + samples(rest.read(0, n))) == sorted(samples(opened().read(0, n)))

    def test_reading_resumes_at_every_position(self, opened):
        source, resumed = opened(), opened()
        stop = source.positions_per_epoch + 7
        whole = samples(source.read(0, stop))
        # A few steps from every place, and to the end from some places: a full read from each place would take long.
        until = {p: stop if p % 16 == 0 else min(p + 8, stop) for p in range(stop + 1)}

        parts = [samples(resumed.read(start, end)) for start, end in until.items()]

        assert parts == [whole[start:end] for start, end in until.items()]

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
        if not getattr(kind, "empty_records", True):
            pytest.skip("no record of this kind can be empty")
        kind.write(folder / f"part-9{kind.suffix}", ["", "one", ""])
        source = opened()

        block = source.read(0, source.positions_per_epoch)

        assert source.positions_per_epoch == SHARDS * TEXTS_PER_SHARD + 3
        assert len(block.tokens) == SHARDS * TEXTS_PER_SHARD + 1
        assert len(set(block.table.positions_N.tolist())) == len(block.tokens)
        assert block.skipped == 0

    def test_of_equal_records_the_first_is_drawn_and_positions_stay(self, opened, folder, kind):
        kind.write(folder / f"part-1{kind.suffix}", texts_of_shard(0))
        every, once = (opened(dedupe=by, cache_dir=folder / "kept") for by in (None, "content"))
        again = opened(dedupe="content", cache_dir=folder / "kept")
        epoch = every.positions_per_epoch
        block, whole = once.read(0, epoch), every.read(0, epoch)

        assert once.positions_per_epoch == epoch == SHARDS * TEXTS_PER_SHARD
        assert sorted(samples(block)) == sorted(set(samples(whole)))
        at = dict(zip(whole.table.positions_N.tolist(), samples(whole), strict=True))
        assert [at[p] for p in block.table.positions_N.tolist()] == samples(block)
        parts = [again.read(p, p + 7) for p in range(0, 2 * epoch, 7)]
        found = [sample for part in parts for sample in samples(part)]
        assert found[: len(block.tokens)] == samples(block)
        assert sorted(set(found)) == sorted(samples(block))

    def test_conditions_leave_records_out_and_positions_stay(self, opened, kind):
        if (number := getattr(kind, "number", None)) is None:
            pytest.skip("its records have no number in a column of their own")
        every, some = opened(), opened(where={number: Between(at_least=10, at_most=19.5)})
        epoch = every.positions_per_epoch
        whole, left = every.read(0, epoch), some.read(0, epoch)

        at = dict(zip(whole.table.positions_N.tolist(), samples(whole), strict=True))
        assert some.positions_per_epoch == epoch
        assert [at[p] for p in left.table.positions_N.tolist()] == samples(left)
        assert sorted(samples(left)) == sorted(
            expected_tokens(text)
            for shard in range(SHARDS)
            for text in texts_of_shard(shard)[10:20]
        )

    def test_a_hold_out_by_key_is_exact_and_disjoint(self, opened, kind):
        if (number := getattr(kind, "number", None)) is None:
            pytest.skip("its records have no number in a column of their own")
        named = {kind.config(".").key_field: number, "splits": {"eval": 0.3}}
        held_out, trained = (opened(**named, split=split) for split in ("eval", "train"))

        found = [
            sorted(samples(each.read(0, SHARDS * TEXTS_PER_SHARD))) for each in (held_out, trained)
        ]

        wanted = [[], []]
        for shard in range(SHARDS):
            for i, text in enumerate(texts_of_shard(shard)):
                is_held = xxhash.xxh3_64_intdigest(f"{i}".encode()) / 2**64 < 0.3
                wanted[not is_held].append(expected_tokens(text))
        assert found == [sorted(each) for each in wanted]

    def test_a_source_without_files_is_refused(self, opened, folder, shards, kind):
        for shard in getattr(kind, "everything", lambda _: shards)(folder):
            shard.unlink()

        with pytest.raises(OmniloadError) as caught:
            opened()

        said = f"{type(caught.value).__name__}: {caught.value}"
        assert re.match(getattr(kind, "without_files", "ConfigError: .*matches no file"), said)

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

    def test_a_shard_written_under_way_with_its_size_and_its_time_is_named(
        self, opened, folder, kind, shards
    ):
        source = opened()
        times = {each: each.stat() for each in folder.rglob("*") if each.is_file()}

        kind.write(folder / f"part-1{kind.suffix}", [each.swapcase() for each in texts_of_shard(1)])
        for each, status in times.items():
            if each.exists():  # the names of some depend on their contents
                os.utime(each, ns=(status.st_atime_ns, status.st_mtime_ns))

        with pytest.raises(IntegrityError, match=r"part-1.*(changed|gone) since the source was"):
            source.read(0, source.positions_per_epoch)

    def test_a_shard_with_another_mode_link_and_copy_is_read_on(self, opened, shards):
        source, whole = opened(), samples(opened().read(0, SHARDS * TEXTS_PER_SHARD))
        for shard in shards:
            shard.chmod(0o400)
            shutil.copy2(shard, copy := shard.with_name(".copy"))
            copy.replace(shard)

        assert samples(source.read(0, SHARDS * TEXTS_PER_SHARD)) == whole

    def test_a_shard_that_is_replaced_while_its_units_are_at_hand_is_named(
        self, opened, shards, monkeypatch
    ):
        for wait in ("_EVERY_S", "_REST"):
            monkeypatch.setattr(held_files, wait, 0)
        source = opened()
        source.read(0, source.positions_per_epoch)
        source.read(0, source.positions_per_epoch)  # nothing has changed, and nothing is reported
        status = shards[1].stat()
        os.utime(shards[1], ns=(status.st_atime_ns, status.st_mtime_ns + 1))

        with pytest.raises(IntegrityError, match=r"part-1.*changed since the source was opened"):
            source.read(0, source.positions_per_epoch)

    def test_a_shard_that_vanishes_under_way_is_named(self, opened, shards):
        source = opened()
        shards[1].unlink()

        with pytest.raises(IntegrityError, match=r"part-1.*gone since the source was opened"):
            source.read(0, source.positions_per_epoch)

    def test_a_store_gives_the_samples_of_a_folder(self, opened, folder, kind):
        url = f"memory://contract/{kind.config(folder).path.removeprefix('.')}"
        store = fsspec.filesystem("memory")
        store.put(f"{folder}/", "/contract/", recursive=True)
        expected = samples(opened().read(0, 150))

        try:
            if said := getattr(kind, "without_store", ""):
                with pytest.raises(ConfigError, match=said):
                    opened(path=url)
                return
            source = opened(path=url)
            assert samples(source.read(0, 150)) == expected
        finally:
            store.store.clear()
            store.pseudo_dirs[:] = [""]

    def test_a_shard_replaced_by_one_of_its_size_and_time_holds_other_content(
        self, opened, folder, kind, shards
    ):
        before = opened(cache_dir=folder / "index")
        path = folder / f"part-1{kind.suffix}"
        times = {each: each.stat() for each in folder.iterdir() if each.is_file()}

        kind.write(path, [text.swapcase() for text in texts_of_shard(1)])
        for each, status in times.items():
            os.utime(each, ns=(status.st_atime_ns, status.st_mtime_ns))
        after = opened(cache_dir=folder / "index")

        assert after.facts.order_digest == before.facts.order_digest
        assert after.facts.content_digest != before.facts.content_digest

    def test_a_kept_index_gives_the_same_source(self, opened, folder):
        first = opened(cache_dir=folder / "index")
        again = opened(cache_dir=folder / "index")

        assert list((folder / "index").glob("web.*.index.arrow"))
        assert again.facts.content_digest == first.facts.content_digest
        assert samples(again.read(3, 90)) == samples(first.read(3, 90))

    def test_a_run_resumes_exactly_on_another_number_of_ranks(self, folder, kind):
        config = kind.config(folder).model_dump(mode="json")
        mix = a_mix(sources={"web": config}, tokenizer=kind.tokenizer)

        def steps(ranks, state=None, stop=6):
            tree = ClientPlaceTree.of(dp=ranks)
            spec = PlaneSpec(mix=mix, base_dir=folder, tree=tree, state=state, num_steps=stop)
            with LocalPlane(spec) as plane:
                clients = [Client(plane.handle(rank)) for rank in range(ranks)]
                batches = zip(*clients, strict=True)
                rows = [sorted(row for batch in each for row in rows_of(batch)) for each in batches]
                return rows, clients[0].state_dict()

        whole, _ = steps(1)
        _, saved = steps(2, stop=3)
        rest, _ = steps(2, saved)

        assert len(whole) == 6
        assert rest == whole[3:]

    def test_a_check_decodes_the_first_records(self, folder, kind):
        config = kind.config(folder).model_dump(mode="json")
        spec = PlaneSpec(
            mix=a_mix(sources={"web": config}, tokenizer=kind.tokenizer),
            base_dir=folder,
            tree=ClientPlaceTree.of(),
        )

        (found,) = find_sources(spec)

        assert (found.format, found.records) == (config["type"], SHARDS * TEXTS_PER_SHARD)
        lengths = [len(expected_tokens(text)) for text in texts_of_shard(0)]
        assert min(lengths) <= found.tokens_per_record <= max(lengths)


def rows_of(batch):
    return [tuple(row) for each in batch.microbatches for row in each.tokens_RT.tolist()]
