"""A split has the documents whose key decides so: none repeated, none lost, whatever other options are chosen."""

from fractions import Fraction
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.client import Client
from omniload.mix.config import ByteTokenizer, MixConfig
from omniload.mix.held_out import held_out
from omniload.mix.schema.splits import in_split
from omniload.mix.sources import SourceConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.examples import few
from tests.support.plane.sources.written_rows import ROW_KINDS, write_rows

DOCUMENTS = 150
SPLITS = {"eval": 0.1, "test": 0.25}
SOURCE = TypeAdapter(SourceConfig)

shares = st.dictionaries(
    st.sampled_from(("eval", "test", "dev")), st.floats(1e-9, 0.33, allow_nan=False), max_size=3
)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), shares)
@example([2**63 - 1, 2**63, 2**63 + 2**62 - 1, 2**63 + 2**62, 2**64 - 1], {"a": 0.5, "b": 0.25})
def test_every_key_is_in_exactly_the_split_that_its_place_says(keys, splits):
    keys_R = np.asarray(keys, np.uint64)
    found = {name: in_split(keys_R, splits, name).tolist() for name in (*splits, "train")}

    bounds = list(accumulate(map(Fraction, splits.values())))
    for i, key in enumerate(keys):
        place = sum(Fraction(key, 2**64) >= bound for bound in bounds)
        wanted = [*splits, "train"][place]
        assert [name for name, taken in found.items() if taken[i]] == [wanted]


def text_of(i):
    return f"document {i} " + "x" * (i % 23)


def split_of(known_by):
    """Return the split of a document by the rule on the page."""
    place = xxhash.xxh3_64_intdigest(known_by) / 2**64
    return "eval" if place < 0.1 else "test" if place < 0.35 else "train"


@cache
def corpus():
    """Write the same documents in each format with columns, in two orders of shards; return the mix file's entries."""
    folder = Path(mkdtemp(prefix="omniload-test-splits-"))
    sources = {}
    for order, step in (("rising", 1), ("mixed", 77)):
        which = [i * step % DOCUMENTS for i in range(DOCUMENTS)]
        for shard, some in enumerate((which[:60], which[60:65], which[65:])):
            place = folder / order
            place.mkdir(exist_ok=True)
            for kind in ROW_KINDS:
                # An integer and its digits are one key.
                rows = [{"text": text_of(i), "id": f"{i}" if kind == "jsonl" else i} for i in some]
                source = write_rows(kind, place, f"{shard}", rows)
                sources[kind, order] = source | {"path": f"{order}/{source['path']}"}
    return folder, sources


@few(12, soak=250)
@given(
    kind=st.sampled_from(sorted(ROW_KINDS)),
    order=st.sampled_from(("rising", "mixed")),
    key=st.sampled_from((None, "id")),
    seed=st.integers(0, 1 << 40),
    shuffle=st.sampled_from(("none", "shards", "block", "units", "full")),
)
def test_a_source_gives_the_documents_of_its_split_and_no_others(kind, order, key, seed, shuffle):
    known_by = {
        text_of(i): f"{i}".encode() if key else text_of(i).encode() for i in range(DOCUMENTS)
    }
    folder, sources = corpus()
    for split in ("eval", "test", "train"):
        named = "known_by" if kind == "webdataset" else "key"
        config = SOURCE.validate_python(
            {
                **sources[kind, order],
                **({named: key} if key else {}),
                **({} if kind in {"parquet", "arrow"} else {"unit": 900}),
                "shuffle": {"method": shuffle, "block_units": 2},
                "splits": SPLITS,
                "split": split,
            }
        )
        source = open_source(
            SourceSpec(
                "web", config, seed=seed, tokenizer=ByteTokenizer(type="bytes"), base_dir=folder
            )
        )
        start = seed % 40
        block = source.read(start, start + DOCUMENTS)  # over the end of an epoch, each once
        found = [
            bytes(block.tokens[i][:-1].astype(np.uint8)).decode() for i in range(len(block.tokens))
        ]
        wanted = [text for text, known in known_by.items() if split_of(known) == split]
        assert len(block.table) == len(found)
        assert block.skipped == 0
        if shuffle == "none" or start == 0:
            assert sorted(found) == sorted(wanted)
        assert set(found) <= set(wanted)


@cache
def mixed_corpus():
    """Write three sources of token documents, whose first token is their number; the smallest holds out nothing."""
    folder = Path(mkdtemp(prefix="omniload-test-held-out-"))
    rng = np.random.default_rng(5)
    number = 0
    for name, count in (("web", 90), ("code", 40), ("wiki", 1)):
        documents = []
        for _ in range(count):
            documents.append([number, *rng.integers(500, 900, rng.integers(0, 40)).tolist()])
            number += 1
        table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=11)
    return folder, number


def a_mix(seed):
    names = ("web", "code", "wiki")
    return MixConfig.model_validate(
        {
            "version": 1,
            "seed": seed,
            "splits": {"eval": 0.2},
            "sources": {
                name: {"type": "parquet", "path": f"{name}.parquet", "tokens": "tokens"}
                for name in names
            },
            "mix": {
                "stop": "each_once",
                "stages": [{"from_step": 0, "weights": dict.fromkeys(names, 1)}],
            },
            "pack": {"length": 64, "method": "none"},
            "batch": {"tokens": 384, "micro_tokens": 64},
        }
    )


def documents_of(mix, ranks, state=None, until=None):
    """Return the number of every document that the ranks receive, in step order, and the last state."""
    spec = PlaneSpec(
        mix=mix,
        base_dir=mixed_corpus()[0],
        tree=ClientPlaceTree.of(dp=ranks),
        state=state,
        num_steps=until,
    )
    found = []
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(ranks)]
        ended = 0
        while not ended:
            batches = [client.next_batch() for client in clients]
            ended = sum(batch is None for batch in batches)
            for batch in batches:
                for rows in batch.microbatches if batch is not None else ():
                    found += rows.tokens_RT[:, 0][rows.source_ids_RT[:, 0] >= 0].tolist()
        assert ended == ranks, "all ranks end with the same step"
        state = clients[0].state_dict()
        for client in clients:
            client.close()
    return found, orjson.loads(orjson.dumps(state))


@few(5, soak=60)
@given(st.integers(0, 1000), st.sampled_from((1, 2, 3)), st.integers(1, 3))
def test_training_and_evaluation_share_no_document_and_leave_none_out(seed, ranks, cut):
    mix = a_mix(seed)
    trained, _ = documents_of(mix, ranks)
    evaluated, _ = documents_of(held_out(mix, "eval"), ranks)
    again, _ = documents_of(held_out(a_mix(seed + 1), "eval"), 1)

    assert sorted(trained + evaluated) == list(range(mixed_corpus()[1]))
    assert sorted(again) == sorted(evaluated)
    assert len(evaluated) > 8
    if ranks == 1:
        assert again == evaluated, "the order of an evaluation is that of no training run"

    first, state = documents_of(held_out(mix, "eval"), ranks, until=cut)
    rest, _ = documents_of(held_out(mix, "eval"), 4 - ranks, state=state)
    assert sorted(first + rest) == sorted(evaluated)
