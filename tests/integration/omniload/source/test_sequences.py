"""Runs of joined documents, with weights by sequences: exact over ranks, readers, resumes and a token cache.

The oracle reads the files by pyarrow, json and numpy, without any code of ours. For documents that stay apart, it
computes their lengths as OLMo-core does and positions as Megatron does.
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
from omniload.batch.microbatch import IGNORE_LABEL
from omniload.batch.rows import documents_of, pieces_of
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


def a_joined_mix(
    folder, *, stop="never", weights=(3, 1), loader=None, documents="joined", **changes
) -> MixConfig:
    a_mixed_corpus(folder)
    joined = {"transforms": [JOINED | {"documents": documents}]}
    return a_mix(
        sources={name: source | joined for name, source in SOURCES.items()},
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
    """Return the digest of each step, and the state after each."""
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
    assert len(entries) == 1  # the log entry is about text alone
    assert run(tmp_path, kept)[0] == alone
    entries[0].write_bytes(entries[0].read_bytes()[:-9])
    assert run(tmp_path, kept)[0] == alone
    for at in range(1, STEPS, 3):
        resumed, _ = run(tmp_path, mix, dp=2, count=STEPS - at, state=states[at - 1])
        assert resumed == alone[at:]


END = 7


def get_document_lengths(input_ids, eos_token_id):
    """The function of OLMo-core, ``olmo_core.data.utils``, with numpy instead of torch."""
    boundaries = np.concatenate(
        [
            [-1],
            (input_ids == eos_token_id).nonzero()[0],
            [] if input_ids[-1] == eos_token_id else [input_ids.shape[0] - 1],
        ]
    )
    return boundaries[1:] - boundaries[:-1]


def reset_position_ids(data, eod_token):
    """``_get_ltor_masks_and_position_ids`` of Megatron-LM, with numpy instead of torch."""
    position_ids = np.arange(len(data))
    prev_index = 0
    for i in position_ids[data == eod_token].copy():
        position_ids[(i + 1) :] -= i + 1 - prev_index
        prev_index = i + 1
    return position_ids


def lengths_in_files(folder):
    """Return the lengths of the documents in each sequence of the files, by its tokens."""
    found = {}

    def cut(name, documents):
        flat = np.concatenate(documents)
        owners = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
        for at in range(0, len(flat), LENGTH):
            _, sizes = np.unique(owners[at : at + LENGTH], return_counts=True)
            found[name, tuple(flat[at : at + LENGTH].tolist())] = sizes.tolist()

    for path in sorted((folder / "ids").glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            lists = file.read_row_group(group)["tokens"].to_pylist()
            cut("ids", [np.asarray(each, np.int64) for each in lists])
    lines = (folder / "text/0.jsonl").read_bytes().splitlines()
    cut("text", [np.array([*orjson.loads(line)["text"].encode(), 256]) for line in lines])
    return found


def batches_of(folder, mix, dp, count):
    """Return the batches of all ranks of each step."""
    spec = PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=dp))
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(dp)]
        return [[client.next_batch() for client in clients] for _ in range(count)]


def documents_in(batch):
    """Yield each piece of a batch with the bounds, positions and labels of its tokens."""
    for rows in batch.microbatches:
        documents, labels = documents_of(rows), rows.labels_RT.reshape(-1)
        positions = documents.positions.reshape(-1)
        for number, piece in zip(np.flatnonzero(rows.sources_D >= 0), pieces_of(rows), strict=True):
            start, stop = rows.cu_seqlens[number : number + 2].tolist()
            bounds = documents.cu_seqlens
            inside = bounds[(bounds >= start) & (bounds <= stop)] - start
            yield piece, inside, positions[start:stop], labels[start:stop]


def cost_of(lengths):
    """The default cost of ``balance``: six times a width of 128, and pairs within documents."""
    return sum(768.0 * length + float(length) ** 2 for length in lengths)


@pytest.mark.parametrize("method", ["best_fit", "none"])
def test_attention_labels_and_costs_stay_within_documents_that_are_joined_apart(tmp_path, method):
    mix = a_joined_mix(tmp_path, documents="apart", pack={"method": method})
    expected, several = lengths_in_files(tmp_path), 0

    for batches in batches_of(tmp_path, mix, dp=2, count=STEPS):
        costs, labelled = [], 0
        for batch in batches:
            costs.append(0.0)
            for piece, bounds, positions, labels in documents_in(batch):
                lengths = expected[mix.names[piece.source], tuple(piece.tokens.tolist())]
                assert np.diff(bounds).tolist() == lengths
                assert positions.tolist() == list(chain(*map(range, lengths)))
                predicted = [*piece.tokens[1:].tolist(), IGNORE_LABEL]
                for end in np.cumsum(lengths).tolist():
                    predicted[end - 1] = IGNORE_LABEL
                # In a source with masks, some further labels are left out.
                held = labels != IGNORE_LABEL
                assert labels[held].tolist() == np.array(predicted)[held].tolist()
                assert piece.source == 0 or labels.tolist() == predicted
                labelled += int(held.sum())
                costs[-1] += cost_of(lengths)
                several += len(lengths) > 1
        assert {batch.loss_tokens for batch in batches} == {labelled}
        assert batches[0].imbalance == pytest.approx(max(costs) / np.mean(costs))
    assert several > STEPS


def test_steps_of_documents_apart_are_the_same_for_other_ranks_readers_and_resumes(tmp_path):
    mix = a_joined_mix(tmp_path, documents="apart")
    alone, states = run(tmp_path, mix)
    read = a_joined_mix(tmp_path, documents="apart", loader={"readers": {"ids": 2}})

    assert alone != run(tmp_path, a_joined_mix(tmp_path))[0]
    assert run(tmp_path, mix, dp=4)[0] == alone
    assert run(tmp_path, read)[0] == alone
    for at in range(1, STEPS, 4):
        resumed, _ = run(tmp_path, mix, dp=2, count=STEPS - at, state=states[at - 1])
        assert resumed == alone[at:]


def test_rows_of_a_file_know_their_documents_as_olmo_core_and_megatron_find_them(tmp_path):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 60, 40 * LENGTH + 5).astype(np.uint16)
    # Ends are at the first and the last token of a row, and one after another; one row has none.
    ids[[0, LENGTH - 1, LENGTH, 2 * LENGTH - 2, 2 * LENGTH - 1]] = END
    ids[3 * LENGTH : 4 * LENGTH] = 9
    ids.tofile(tmp_path / "flat.bin")
    source = {
        "type": "numpy",
        "path": "flat.bin",
        "dtype": "uint16",
        "row_tokens": LENGTH,
        "end_of_document": END,
    }
    mix = a_mix(
        sources={"flat": source},
        length=LENGTH,
        rows=8,
        micro_rows=2,
        mix={"level": "sequence", "stop": "each_once", "stages": [{"weights": {"flat": 1}}]},
    )
    drawn = []

    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        while (batch := client.next_batch()) is not None:
            for piece, bounds, positions, _ in documents_in(batch):
                assert np.diff(bounds).tolist() == get_document_lengths(piece.tokens, END).tolist()
                assert positions.tolist() == reset_position_ids(piece.tokens, END).tolist()
                drawn.append(tuple(piece.tokens.tolist()))

    rows = [ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH)]
    assert Counter(drawn) == Counter(tuple(row.tolist()) for row in rows)
