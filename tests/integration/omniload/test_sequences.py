"""Runs of joined documents, weights counting sequences: exact over ranks, readers, resumes and a token cache.

The oracle reads the files by pyarrow and json, and knows no code of ours.
"""

import json
from collections import Counter
from itertools import chain

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest, combined
from omniload.batch.rows import pieces_of
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix
from tests.support.plane.corpora import a_mixed_corpus

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

LENGTH, STEPS = 32, 12
JOINED = {"type": "concat", "tokens": LENGTH}
SOURCES = {
    "ids": {
        "type": "parquet",
        "path": "ids/*.parquet",
        "tokens": "tokens",
        "columns": {"loss_mask": "mask"},
        "transforms": [JOINED],
    },
    "text": {"type": "jsonl", "path": "text/*.jsonl", "unit": 1 << 20, "transforms": [JOINED]},
}


def a_joined_mix(folder, *, stop="never", weights=(3, 1), loader=None, **changes) -> MixConfig:
    a_mixed_corpus(folder)
    return a_mix(
        sources=SOURCES,
        tokenizer={"type": "bytes"},
        length=LENGTH,
        rows=8,
        micro_rows=1,
        mix={
            "level": "sequence",
            "stop": stop,
            "stages": [{"weights": dict(zip(SOURCES, weights, strict=True))}],
        },
        loader=loader or {},
        **changes,
    )


def run(folder, mix, *, dp=1, count=STEPS, state=None):
    """Return the digest of each step, and the state behind each."""
    spec = PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=dp), state=state)
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(dp)]
        digests, states = [], []
        for _ in range(count):
            digests.append(combined(batch_digest(client.next_batch()) for client in clients))
            states.append(json.loads(json.dumps(clients[0].state_dict())))
        return digests, states


def sequences_of_files(folder):
    """Return the sequences of each source: the documents of a row group, or of the file, laid end to end and cut."""

    def cut(documents):
        flat = np.concatenate(documents)
        whole = len(flat) // LENGTH * LENGTH
        return [
            *map(tuple, flat[:whole].reshape(-1, LENGTH).tolist()),
            tuple(flat[whole:].tolist()),
        ]

    ids = []
    for path in sorted((folder / "ids").glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            lists = file.read_row_group(group)["tokens"].to_pylist()
            ids += cut([np.asarray(each, np.int64) for each in lists])
    lines = (folder / "text/0.jsonl").read_bytes().splitlines()
    # Bytes of UTF-8, and 256 at the end of a document.
    text = cut([np.array([*orjson.loads(line)["text"].encode(), 256]) for line in lines])
    return {"ids": [each for each in ids if each], "text": [each for each in text if each]}


def pieces_by_step(folder, mix):
    spec = PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=1))
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        steps = []
        while (batch := client.next_batch()) is not None:
            pieces = chain(*map(pieces_of, batch.microbatches))
            steps.append([(mix.names[p.source], tuple(p.tokens.tolist())) for p in pieces])
            if mix.mix.stop == "never" and len(steps) == STEPS:
                break
        return steps


def test_every_sequence_of_the_files_is_drawn_once_and_no_other(tmp_path):
    mix = a_joined_mix(tmp_path, stop="each_once")

    drawn = Counter(chain(*pieces_by_step(tmp_path, mix)))

    expected = sequences_of_files(tmp_path)
    assert drawn == Counter((name, each) for name in expected for each in expected[name])
    assert sum(len(each) < LENGTH for _, each in drawn) > 1


def test_weights_count_sequences_whatever_the_lengths_of_documents(tmp_path):
    steps = pieces_by_step(tmp_path, a_joined_mix(tmp_path))

    drawn = np.cumsum([[sum(n == name for n, _ in step) for name in SOURCES] for step in steps], 0)
    assert (np.abs(drawn[:, 0] - 3 * drawn[:, 1]) <= 4).all()


@pytest.mark.parametrize("method", ["best_fit", "none"])
def test_steps_are_the_same_for_other_ranks_readers_and_a_token_cache_of_any_fill(tmp_path, method):
    mix = a_joined_mix(tmp_path, pack={"method": method})
    alone, states = run(tmp_path, mix)
    cached = {"token_cache": {"path": str(tmp_path / "kept")}}
    kept = a_joined_mix(tmp_path, pack={"method": method}, loader=cached)
    read = a_joined_mix(tmp_path, pack={"method": method}, loader={"readers": {"ids": 2}})

    assert run(tmp_path, mix, dp=2)[0] == alone
    assert run(tmp_path, read)[0] == alone
    assert run(tmp_path, kept, count=3)[0] == alone[:3]
    entries = sorted(path for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert len(entries) == 1  # of text alone
    assert run(tmp_path, kept)[0] == alone
    entries[0].write_bytes(entries[0].read_bytes()[:-9])
    assert run(tmp_path, kept)[0] == alone
    for at in range(1, STEPS, 3):
        resumed, _ = run(tmp_path, mix, dp=2, count=STEPS - at, state=states[at - 1])
        assert resumed == alone[at:]
