"""Ranges are read in parts of about a quarter of a second each, whatever a record takes."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from omniload.actors.roles.sources import Caches, PartReads, SourceOpening
from omniload.base.clock import FakeClock
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.ragged import Ragged
from omniload.mix.config import load_mix
from omniload.source.parts.divided import DividedSource, ThreadReader
from omniload.source.parts.sample_block import SampleBlock
from tests.support.plane.builders import a_mix, a_table


class Reading:
    """A source whose records take ``record_s`` each."""

    def __init__(self, record_s, damaged=()):
        self.record_s, self.clock, self.sizes, self.damaged = record_s, FakeClock(), [], damaged
        self.failed = []

    def block_stop(self, position):
        return (position // 100 + 1) * 100

    def read(self, start, stop):
        if any(block * 100 < stop and start < (block + 1) * 100 for block in self.damaged):
            self.failed.append((start, stop))
            raise IntegrityError("a.parquet: row group 7: is damaged; replace it")
        self.sizes.append(stop - start)
        self.clock.sleep((stop - start) * self.record_s)
        lengths = [1 + position % 3 for position in range(start, stop)]
        return SampleBlock(
            table=replace(a_table(lengths, start=start), bad_N=np.array([stop - 1])),
            tokens=Ragged.of([[position] * (1 + position % 3) for position in range(start, stop)]),
        )


def read_whole(parts, reading, start, stop):
    """Ask for the rest of a range until all of it is there; return the answers."""
    answers = []
    while start < stop:
        answers.append(parts.read(start, stop, reading.read, reading.block_stop))
        start = answers[-1].table.stop
    return answers


@pytest.mark.parametrize("record_s", [0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_no_part_takes_long_once_it_is_known_what_a_record_takes(record_s):
    reading = Reading(record_s)
    parts = PartReads(reading.clock)

    for start in range(0, 8000, 2000):
        read_whole(parts, reading, start, start + 2000)

    usual = reading.sizes[len(reading.sizes) // 2 :]
    assert all(size * record_s <= 0.5 or size == 1 for size in usual)
    # There are not many, because each has a cost: the rests of ranges, and the reads that measure the speed.
    assert len(reading.sizes) <= 8000 * record_s / 0.05 + 4 + 6
    assert sum(reading.sizes) == 8000


def test_what_is_read_in_parts_is_what_is_read_at_once():
    reading = Reading(1e-3)

    found = PartReads(reading.clock).read(100, 400, reading.read, reading.block_stop)

    assert len(reading.sizes) > 1
    whole = reading.read(100, 400)
    assert found.tokens.values_V.tolist() == whole.tokens.values_V.tolist()
    assert found.tokens.offsets.tolist() == whole.tokens.offsets.tolist()
    assert found.table.positions_N.tolist() == whole.table.positions_N.tolist()
    assert found.skipped == len(reading.sizes) - 1
    assert found.table.bad_N.tolist() == (100 + np.cumsum(reading.sizes[:-1]) - 1).tolist()


@pytest.mark.parametrize("record_s", [0.01, 0.1, 3.0])
def test_a_range_that_takes_long_is_answered_with_its_first_records(record_s):
    reading = Reading(record_s)
    parts = PartReads(reading.clock)
    parts.read(0, 16, reading.read, reading.block_stop)

    began_s, asked = reading.clock.now_s(), len(reading.sizes)
    answers = read_whole(parts, reading, 16, 400)

    assert len(answers) > 5
    # Half a second, and the part that was begun before that.
    assert all(len(answer.table) * record_s <= 0.5 + max(0.5, 8 * record_s) for answer in answers)
    assert reading.clock.now_s() - began_s == pytest.approx(384 * record_s)
    assert sum(reading.sizes[asked:]) == 384
    whole = reading.read(16, 400)
    assert np.concatenate([a.tokens.values_V for a in answers]).tolist() == (
        whole.tokens.values_V.tolist()
    )


def test_a_read_that_begins_with_decoding_goes_on_to_the_end_of_its_range():
    reading = Reading(0.1)

    found = PartReads(reading.clock, goes_on=lambda: True).read(
        0, 400, reading.read, reading.block_stop
    )

    assert found.table.stop == 400


def test_records_before_a_damaged_block_are_read_to_the_last_one():
    reading = Reading(1e-5, damaged=(7,))
    parts = PartReads(reading.clock)

    answers = read_whole(parts, reading, 0, 700)
    found = parts.read(500, 3000, reading.read, reading.block_stop)

    assert answers[-1].table.stop == 700
    assert (found.table.start, found.table.stop) == (500, 700)
    assert found.table.positions_N.tolist() == list(range(500, 700))
    assert reading.failed == [(500, 1524), (700, 800)], "the block itself is tried once"
    with pytest.raises(IntegrityError, match="row group 7"):
        parts.read(700, 3000, reading.read, reading.block_stop)


def test_records_after_a_damaged_block_are_read():
    reading = Reading(1e-5, damaged=(7,))
    parts = PartReads(reading.clock)
    with pytest.raises(IntegrityError):
        parts.read(730, 760, reading.read, reading.block_stop)

    assert parts.read(800, 1200, reading.read, reading.block_stop).table.stop == 1200
    assert reading.failed == [(730, 746)]


def test_a_range_of_nothing_is_read_as_one():
    reading = Reading(0.0)

    assert len(PartReads(reading.clock).read(5, 5, reading.read, reading.block_stop).table) == 0
    assert reading.sizes == [0]


def test_what_further_readers_read_of_shards_is_counted_by_their_loader(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"{i} " * 50}) for i in range(500)))
    os.utime(texts, (1_700_000_000, 1_700_000_000))
    mix_file = tmp_path / "mix.yaml"
    mix_file.write_text(f"""
version: 1
seed: 1
tokenizer: {{type: bytes}}
sources: {{web: {{type: jsonl, path: "local://{texts}", unit: 8KiB}}}}
mix: {{stages: [{{from_step: 0, weights: {{web: 1}}}}]}}
pack: {{length: 512}}
batch: {{tokens: 4096, micro_tokens: 4096}}
loader: {{shard_cache: {{path: near, limit: 64MB}}}}
""")
    opening = SourceOpening(mix=load_mix(mix_file)[0], number=0, base_dir=tmp_path, cache_dir=None)

    def read_bytes(readers):
        """Open it, and return the disk reads of reading everything; all of it is on the disk."""
        caches = Caches.of(opening.mix, tmp_path)
        parts = [ThreadReader(opening.open_part) for _ in range(1, readers)]
        for part in parts:
            while part.facts() is None:
                os.sched_yield()
        ready = iter(parts)
        source = DividedSource(opening.open(caches), readers, lambda _: next(ready), caches.shards)
        opened = caches.figures()["shard_disk_bytes_total"]
        source.read(0, 500)
        source.close()
        figures = caches.figures()
        assert figures["shard_store_bytes_total"] == 0
        return figures["shard_disk_bytes_total"] - opened

    opening.open(Caches.of(opening.mix, tmp_path))  # it keeps the data that it reads
    alone = read_bytes(1)
    shared = read_bytes(2)

    assert shared >= alone > texts.stat().st_size


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"text": "txt"}, r"^sources\.web: .*a\.csv.*has no column 'txt'"),
        ({"path": "b.csv"}, r"^sources\.web\.path: "),
    ],
)
def test_a_source_that_cannot_be_opened_is_named_once_with_what_is_wrong(tmp_path, source, said):
    (tmp_path / "a.csv").write_text("text\na\n")
    web = {"type": "csv", "path": "a.csv", "text": "text"} | source
    stages = [{"from_step": 0, "weights": {"web": 1}}]
    mix = a_mix(sources={"web": web}, mix={"stages": stages}, tokenizer={"type": "bytes"})
    opening = SourceOpening(mix=mix, number=0, base_dir=tmp_path, cache_dir=None)

    with pytest.raises(OmniloadError, match=said) as raised:
        opening.open(Caches.of(mix, tmp_path))

    assert str(raised.value).count("sources.web") == 1
