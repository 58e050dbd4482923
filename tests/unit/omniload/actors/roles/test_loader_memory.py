"""``loader.memory`` is a limit: a loader's memory for its sources, blocks and samples read ahead, stays below it."""

import contextlib
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles import sources as sources_module
from omniload.actors.roles.loader import LoaderShell
from omniload.machine.messages import ReadAhead, ReleaseSamples
from omniload.source.block_memory import BlockMemory
from tests.support.plane.builders import a_mix

MIB = 1 << 20
RECORDS, TOKENS, GROUP = 256, 1024, 64
"""Size of each source: 256 records of 4 KiB, in row groups of 256 KiB, of which four make a block."""
NAMES = tuple(f"s{number}" for number in range(6))


class Counted(BlockMemory):
    """Records the memory in use after each change."""

    def __init__(self, *limits):
        super().__init__(*limits)
        self.decoded, self.most_bytes, self.over = 0, 0, []

    def look(self):
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        if self.used_bytes > self.limit_bytes:
            self.over.append(self.used_bytes)

    def hold(self, block):
        held = super().hold(block)
        self.look()
        return held

    def set_others(self, size_bytes):
        super().set_others(size_bytes)
        self.look()

    @contextlib.contextmanager
    def writing(self):
        with super().writing() as writer:
            self.look()
            yield writer
        self.decoded += 1
        self.look()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(3)
    for name in NAMES:
        tokens = pa.array(list(rng.integers(1, 1 << 30, (RECORDS, TOKENS), np.int32)))
        pq.write_table(
            pa.table({"tokens": tokens}), folder / f"{name}.parquet", row_group_size=GROUP
        )
    return folder


@pytest.fixture
def drawn(corpus, monkeypatch):
    """Read every source twice, alternately, as plans request them; return the memory in use, and the samples."""

    def read(limit, at_once=16):
        memories = []

        def counted(*limits):
            memories.append(Counted(*limits))
            return memories[-1]

        monkeypatch.setattr(sources_module, "BlockMemory", counted)
        given = {
            name: {"type": "parquet", "path": f"{name}.parquet", "tokens": "tokens"}
            for name in NAMES
        }
        mix = a_mix(sources=given, loader={"memory": limit, "spill": str(corpus)})
        shell = LoaderShell(
            mix, range(len(NAMES)), base_dir=corpus, cache_dir=None, activity=Activity("loader-0")
        )
        found = {number: [] for number in range(len(NAMES))}
        for start in range(0, 2 * RECORDS, at_once):
            for source, samples in found.items():
                asked = ReadAhead(source=source, start=start, stop=start + at_once)
                table = shell.read_ahead(asked).table
                samples.append(table.positions_N.tolist())
            # Ranks have all of the reads before the last one.
            shell.release(ReleaseSamples(floors=dict.fromkeys(found, start)))
        shell.close()
        (memory,) = memories
        return memory, list(chain.from_iterable(found.values()))

    return read


@pytest.mark.parametrize("limit", [3 * MIB, 5 * MIB])
def test_a_loader_holds_what_its_memory_says_of_blocks_and_samples_together(drawn, limit):
    memory, samples = drawn(limit)
    free, as_samples = drawn(64 * MIB)

    assert free.most_bytes > 6 * MIB, "six blocks of 1 MiB, and samples: more than both limits"
    assert samples == as_samples
    assert memory.over == []
    assert limit / 2 < memory.most_bytes <= limit
    assert memory.decoded == free.decoded, "a block that is on the disk is not decoded again"
