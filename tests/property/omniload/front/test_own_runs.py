"""A user's own columns in whole runs, compared with a loop over the files; every token is written in one place.

The loop does not model records, packing or cuts: it looks up a value by its token, or by its label.
"""

import json
import struct
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import omniload
from omniload.batch.microbatch import IGNORE_LABEL

OWN = {
    "loss_weight": {"column": "w", "dtype": "float32", "of": "labels", "default": 1.5},
    "teacher": {"column": "w", "dtype": "float64", "default": -0.25},
    "kind": {"column": "k", "dtype": "int8", "default": 7},
    "kept": {"column": "b", "dtype": "bool", "default": True},
}
DEFAULTS = {"loss_weight": 1.5, "teacher": -0.25, "kind": 7, "kept": True}
DOCUMENTS, LONGEST, STEPS = 90, 70, 6


def documents(number):
    """Return documents whose token ids are in no other document."""
    rng = np.random.default_rng(number)
    sizes = rng.integers(1, LONGEST, DOCUMENTS)
    ids = np.arange(1 + 100_000 * number, 1 + 100_000 * number + sizes.sum())
    return np.split(ids, np.cumsum(sizes)[:-1])


def values_of(ids):
    return {"w": ids / 3, "k": ids % 127, "b": ids % 2 == 0}


def write_table(folder, kind, found):
    columns = [values_of(ids) for ids in found]
    table = pa.table(
        {"ids": [list(ids) for ids in found]}
        | {name: [list(each[name]) for each in columns] for name in "wkb"}
    )
    if kind == "parquet":
        pq.write_table(table, folder / "own.parquet", row_group_size=17)
        return {"type": "parquet", "path": "own.parquet"}
    with (
        pa.OSFile(str(folder / "own.arrow"), "wb") as out,
        pa.ipc.new_file(out, table.schema) as to,
    ):
        to.write_table(table, max_chunksize=17)
    return {"type": "arrow", "path": "own.arrow"}


def write_mds(folder, found):
    """Write one shard: ids with a type in the index, floats with their own type, and plain bytes."""
    names, encodings = ["b", "ids", "k", "w"], ["bytes", "ndarray:int32", "bytes", "ndarray"]

    def array(values, code=b""):
        return code + bytes([1 << 2 | 1]) + struct.pack("<H", len(values)) + values.tobytes()

    samples = []
    for ids in found:
        of = values_of(ids)
        cells = (
            of["b"].astype("u1").tobytes(),
            array(ids.astype("<i4")),
            of["k"].astype("i1").tobytes(),
            array(of["w"].astype("<f8"), bytes([66])),
        )
        samples.append(struct.pack("<4I", *map(len, cells)) + b"".join(cells))
    first = 4 + 4 * (len(samples) + 1)
    offsets = first + np.cumsum([0, *map(len, samples)])
    data = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + b"".join(samples)
    (folder / "own").mkdir()
    (folder / "own" / "0.mds").write_bytes(data)
    shard = {"format": "mds", "version": 2, "samples": len(samples), "compression": None}
    shard |= {"raw_data": {"basename": "0.mds", "bytes": len(data)}, "zip_data": None}
    shard |= {"column_names": names, "column_encodings": encodings, "column_sizes": [None] * 4}
    (folder / "own" / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return {"type": "mds", "path": "own"}


def a_mix(folder, kind="parquet", transforms=(), method="best_fit"):
    """Write a source with columns and one without, and return a mix of both."""
    found = documents(0)
    own = write_mds(folder, found) if kind == "mds" else write_table(folder, kind, found)
    pq.write_table(pa.table({"ids": [list(ids) for ids in documents(1)]}), folder / "plain.parquet")
    own |= {"tokens": "ids", "columns": OWN, "transforms": list(transforms)}
    plain = {"type": "parquet", "path": "plain.parquet", "tokens": "ids"}
    mix = {
        "version": 1,
        "seed": 5,
        "sources": {"own": own, "plain": plain},
        "mix": {"stages": [{"from_step": 0, "weights": {"own": 2, "plain": 1}}]},
        "pack": {"length": 32, "method": method},
        "batch": {"tokens": 256, "micro_tokens": 64, "columns": list(OWN)},
    }
    file = folder / "mix.yaml"
    file.write_text(json.dumps(mix))
    return file


def looked_up():
    """Return the value of every column at every token that was written, by a loop over the documents."""
    known = {}
    for number in (0, 1):
        for ids in documents(number):
            of = values_of(ids)
            for i, token in enumerate(ids.tolist()):
                held = {
                    "loss_weight": of["w"],
                    "teacher": of["w"],
                    "kind": of["k"],
                    "kept": of["b"],
                }
                known[token] = {n: held[n][i] for n in held} if number == 0 else DEFAULTS
    return known


KNOWN = looked_up()


def require_as_written(batch):
    for rows in (batch, *batch.microbatches):
        assert rows.token_columns == tuple(sorted(OWN))
        for name, said in OWN.items():
            found = rows.token_column(name)
            at = rows.labels if said.get("of") == "labels" else rows.tokens
            blank = IGNORE_LABEL if said.get("of") == "labels" else 0
            expected = [
                [0 if token == blank else KNOWN[token][name] for token in row]
                for row in at.tolist()
            ]
            assert found.dtype == np.dtype(said["dtype"])
            assert np.array_equal(found, np.array(expected).astype(said["dtype"])), name


CLAMP, JOINED = {"type": "clamp", "tokens": 21}, {"type": "concat", "tokens": 40}
WAYS = {
    "parquet": {},
    "arrow-cut": {"kind": "arrow", "method": "concat_and_split"},
    "mds": {"kind": "mds"},
    "clamp-filter": {"transforms": [{"type": "filter", "min_tokens": 9}, CLAMP]},
    "concat": {"transforms": [JOINED], "method": "concat_and_split"},
    "apart": {"transforms": [JOINED | {"documents": "apart", "tokens": 32}]},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_value_stands_where_its_token_or_label_does(way, tmp_path):
    file = a_mix(tmp_path, **WAYS[way])

    with omniload.open(file, steps=STEPS, arrays="numpy") as loader:
        batches = list(loader)

    assert len(batches) == STEPS
    for batch in batches:
        require_as_written(batch)


def test_a_run_goes_on_at_every_position_with_the_same_values(tmp_path):
    file = a_mix(tmp_path, method="concat_and_split")
    states, whole = [], []
    with omniload.open(file, steps=STEPS, arrays="numpy") as loader:
        states.append(loader.state_dict())
        for batch in loader:
            whole.append({name: batch.token_column(name) for name in OWN})
            states.append(loader.state_dict())

    for step, state in enumerate(states[:-1]):
        with omniload.open(file, steps=STEPS, arrays="numpy", state=state) as loader:
            batch = next(iter(loader))
        for name in OWN:
            assert np.array_equal(batch.token_column(name), whole[step][name])


def test_a_record_whose_column_is_of_another_length_is_named_or_left_out_and_counted(tmp_path):
    ids = [[1, 2, 3], [4, 5], [6]] * 20
    weights = [[0.5] * len(row) for row in ids]
    weights[4] = [0.5]
    pq.write_table(pa.table({"ids": ids, "w": weights}), tmp_path / "a.parquet")
    source = {"type": "parquet", "path": "a.parquet", "tokens": "ids"}
    source |= {"columns": {"loss_weight": {"column": "w"}}, "shuffle": {"method": "none"}}
    mix = {
        "version": 1,
        "seed": 1,
        "sources": {"a": source},
        "mix": {"stages": [{"weights": {"a": 1}, "from_step": 0}]},
        "pack": {"length": 8},
        "batch": {"tokens": 16, "micro_tokens": 16, "columns": ["loss_weight"]},
    }

    with (
        pytest.raises(
            omniload.IntegrityError,
            match=r"a\.parquet.* row 4: loss_weight has 1 values for 2 tokens",
        ),
        omniload.open(written(tmp_path, mix), arrays="numpy") as loader,
    ):
        list(islice(loader, 3))

    source["on_error"] = {"policy": "skip", "limit": 3}
    with omniload.open(written(tmp_path, mix), steps=3, arrays="numpy") as loader:
        tokens = [batch.tokens for batch in loader]
    assert np.count_nonzero(np.stack(tokens)) > 30


def written(folder, mix):
    file = folder / "mix.json.yaml"
    file.write_text(json.dumps(mix))
    return file
