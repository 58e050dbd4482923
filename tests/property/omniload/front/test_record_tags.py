"""A user's own columns of whole records, compared with the written records: each token shows its record.

A record of text is one letter, repeated, and no two records share a letter. In a source without columns it is a
digit.
"""

import json
import struct
from itertools import islice
from string import digits

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import omniload
from omniload.mix.columns import LONGEST_TAG
from tests.support.plane.edits.mix_commands import json_of, run_mix

OWN = {
    "lang": {"column": "language", "dtype": "text", "default": "none: ü"},
    "quality": {"column": "q", "dtype": "float32", "default": -0.5},
    "number": {"column": "n", "dtype": "int64", "default": -(2**62)},
    "kept": {"column": "k", "dtype": "bool", "default": True},
}
OWN = {name: said | {"of": "samples"} for name, said in OWN.items()}
DEFAULTS = {name: said["default"] for name, said in OWN.items()}
LETTERS = [chr(code) for code in range(33, 126) if chr(code) not in digits]
STEPS = 5


def records(*, nulls=True):
    """Return records with independent values, some of them null."""
    rng, found = np.random.default_rng(7), []
    for i, letter in enumerate(LETTERS):
        values = {
            "language": ["en", "", "日本語", "d:e"][rng.integers(4)],
            "q": float(rng.normal()),
            "n": int(rng.integers(-(2**62), 2**62)),
            "k": int(rng.integers(2)),
        }
        if nulls and i % 5 == 0:
            values = dict.fromkeys(values)
        found.append({"text": letter * int(rng.integers(1, 60)), **values})
    return found


def write_tables(folder, kind):
    table = pa.Table.from_pylist(records())
    table = table.set_column(1, "language", table["language"].dictionary_encode())
    if kind == "parquet":
        pq.write_table(table, folder / "own.parquet", row_group_size=17)
        return {"path": "own.parquet"}
    if kind == "lance":
        lance = pytest.importorskip("lance")
        lance.write_dataset(
            table.set_column(1, "language", table["language"].cast(pa.string())),
            folder / "own.lance",
        )
        return {"path": "own.lance"}
    to = pa.ipc.new_file(str(folder / "own.arrow"), table.schema)
    with to:
        to.write_table(table, max_chunksize=17)
    return {"path": "own.arrow"}


def write_lines(folder):
    lines = []
    for record in records():
        # A null is written, or its key is left out.
        left_out = record["q"] is None and record["text"][0] < "a"
        held = {k: v for k, v in record.items() if not (left_out and v is None)}
        lines.append(json.dumps(held) + "\n" * (1 + len(lines) % 3))
    (folder / "own.jsonl").write_text("".join(lines))
    return {"path": "own.jsonl", "unit": 700}


def write_mds(folder):
    """Write one shard; MDS has no nulls."""
    encodings = {"k": "uint8", "language": "str", "n": "int64", "q": "float64", "text": "str"}
    kinds = {"uint8": "<u1", "int64": "<i8", "float64": "<f8"}
    samples = []
    for record in records(nulls=False):
        cells = [
            record[name].encode()
            if encoding == "str"
            else np.array(record[name], kinds[encoding]).tobytes()
            for name, encoding in encodings.items()
        ]
        sizes = [len(c) for c, e in zip(cells, encodings.values(), strict=True) if e == "str"]
        samples.append(struct.pack("<2I", *sizes) + b"".join(cells))
    offsets = 4 + 4 * (len(samples) + 1) + np.cumsum([0, *map(len, samples)])
    data = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + b"".join(samples)
    (folder / "own").mkdir()
    (folder / "own" / "0.mds").write_bytes(data)
    shard = {"format": "mds", "version": 2, "samples": len(samples), "compression": None}
    shard |= {"raw_data": {"basename": "0.mds", "bytes": len(data)}, "zip_data": None}
    shard |= {"column_names": list(encodings), "column_encodings": list(encodings.values())}
    shard |= {"column_sizes": [1, None, 8, 8, None]}
    (folder / "own" / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return {"path": "own", "unit": 700}


def a_mix(folder, kind="jsonl", transforms=(), **changes):
    """Write a source with columns and one without, and return the file of a mix of both."""
    writer = {"jsonl": write_lines, "mds": write_mds}.get(kind)
    own = write_tables(folder, kind) if writer is None else writer(folder)
    own |= {"type": kind, "text": "text", "columns": OWN, "transforms": list(transforms)}
    plain = [json.dumps({"text": digit * 40}) for digit in digits]
    (folder / "plain.jsonl").write_text("\n".join(plain))
    mix = {
        "version": 1,
        "seed": 5,
        "tokenizer": {"type": "bytes"},
        "sources": {"own": own, "plain": {"type": "jsonl", "path": "plain.jsonl"}},
        "mix": {"stages": [{"from_step": 0, "weights": {"own": 3, "plain": 1}}]},
        "pack": {"length": 32, "method": "concat_and_split"},
        "batch": {"tokens": 256, "micro_tokens": 64, "columns": list(OWN)},
        **changes,
    }
    file = folder / "mix.yaml"
    file.write_text(json.dumps(mix))
    return file


def known(kind):
    """Return the values of every letter, by a loop over the written records."""
    found = dict.fromkeys(digits, DEFAULTS)
    for record in records(nulls=kind != "mds"):
        values = {name: record[said["column"]] for name, said in OWN.items()}
        found[record["text"][0]] = {
            name: DEFAULTS[name] if value is None else value for name, value in values.items()
        }
    return found


def values_of(columns):
    return {
        name: bytes(columns[name]).decode() if name == "lang" else columns[name].item()
        for name in OWN
    }


def require_as_written(batch, kind):
    """Compare every piece of a batch with the loop; return the letters of the batch."""
    expected, letters = known(kind), set()
    for rows in (batch, *batch.microbatches):
        pieces = rows.pieces()
        for i, piece in enumerate(pieces):
            held = {chr(token) for token in piece.tokens if token in map(ord, [*LETTERS, *digits])}
            (letter,) = held or {None}
            if letter is None:  # the token that ends a document, alone in a row
                continue
            letters.add(letter)
            wanted = expected[letter] | {"quality": np.float32(expected[letter]["quality"]).item()}
            assert values_of(piece.columns) == wanted, (letter, piece.key)
            for name in ("quality", "number", "kept"):
                values, bounds = rows.column(name)
                assert values.dtype == np.dtype(OWN[name]["dtype"])
                assert bounds.tolist() == list(range(len(pieces) + 1))
                assert values[i] == wanted[name]
    return letters


CLAMP, FEW = {"type": "clamp", "tokens": 21}, {"type": "filter", "min_tokens": 9}
FIM = {"type": "fim", "rate": 0.8, "prefix": 1, "suffix": 2, "middle": 3}
WAYS = {
    **{kind: {"kind": kind} for kind in ("parquet", "arrow", "lance", "jsonl", "mds")},
    "transformed": {"transforms": [FIM, FEW, CLAMP], "pack": {"length": 32}},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_piece_of_a_record_has_what_was_written_of_it(way, tmp_path):
    file = a_mix(tmp_path, **WAYS[way])

    with omniload.open(file, steps=STEPS, arrays="numpy") as loader:
        found = [require_as_written(batch, WAYS[way].get("kind")) for batch in loader]

    letters = set().union(*found)
    assert letters & set(digits)
    assert len(letters) > 20


def test_a_run_goes_on_at_every_position_with_the_same_values_with_a_token_cache_too(tmp_path):
    file, states, whole = a_mix(tmp_path), [], []
    with omniload.open(file, steps=STEPS, arrays="numpy") as loader:
        states.append(loader.state_dict())
        for batch in loader:
            whole.append([values_of(piece.columns) for piece in batch.pieces()])
            states.append(loader.state_dict())
    assert len({json.dumps(each) for step in whole for each in step}) > 20
    cached = json.loads(file.read_text()) | {"loader": {"token_cache": {"path": "cache"}}}
    file.write_text(json.dumps(cached))
    with omniload.open(file, steps=6 * STEPS, arrays="numpy") as loader:  # the cache is whole then
        assert len(list(loader)) == 6 * STEPS
    assert sum(path.is_file() for path in (tmp_path / "cache").rglob("*")) > 3

    for step, state in enumerate(states[:-1]):
        with omniload.open(file, steps=STEPS, arrays="numpy", state=state) as loader:
            batch = next(iter(loader))
        assert [values_of(piece.columns) for piece in batch.pieces()] == whole[step]


LONG = "é" * (LONGEST_TAG // 2) + "!"


@pytest.mark.parametrize(
    ("kind", "said", "value", "reason"),
    [
        ("jsonl", {}, LONG, r"a\.jsonl:5: tag has 4,097 bytes of UTF-8, more than 4,096"),
        ("parquet", {}, LONG, r"a\.parquet.* row 4: tag has 4,097 bytes of UTF-8"),
        ("jsonl", {}, None, r"a\.jsonl:5: 'value' is None, not a string"),
        ("parquet", {}, None, r"a\.parquet.* row 4: tag is null, and no default is given"),
        ("jsonl", {"default": ""}, ["en"], r"a\.jsonl:5: 'value' is \['en'\], not a string"),
        ("jsonl", {"dtype": "int64"}, 1.5, r"a\.jsonl:5: 'value' is 1\.5, not an integer"),
        ("jsonl", {"dtype": "int64"}, 2**63, r"a\.jsonl:5: .*, not an integer of 64 bits"),
        ("jsonl", {"dtype": "bool"}, 2, r"a\.jsonl:5: 'value' is 2, not a boolean, or 0 or 1"),
        ("jsonl", {"dtype": "float32"}, True, r"a\.jsonl:5: 'value' is True, not a number"),
        ("jsonl", {"dtype": "float32"}, 1e39, r"a\.jsonl:5: tag holds 1e\+39, which is more"),
        ("parquet", {"dtype": "float32"}, 1e39, r"a\.parquet.* row 4: tag holds 1e\+39"),
    ],
)
def test_a_record_with_another_value_is_named_or_left_out(kind, said, value, reason, tmp_path):
    usual = {"int64": 1, "bool": 1, "float32": 1.0}.get(said.get("dtype"), "en")
    rows = [{"text": "x" * 9, "value": value if i == 4 else usual} for i in range(40)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    else:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    column = {"column": "value", "dtype": "text", "of": "samples", **said}
    source = {"type": kind, "path": f"a.{kind}", "text": "text", "columns": {"tag": column}}
    source["shuffle"] = {"method": "none"}
    mix = {"version": 1, "seed": 1, "tokenizer": {"type": "bytes"}, "sources": {"a": source}}
    mix |= {"mix": {"stages": [{"weights": {"a": 1}, "from_step": 0}]}, "pack": {"length": 16}}
    mix["batch"] = {"tokens": 32, "micro_tokens": 32, "columns": ["tag"]}
    file = tmp_path / "mix.yaml"
    file.write_text(json.dumps(mix))

    with (
        pytest.raises(omniload.IntegrityError, match=reason),
        omniload.open(file, arrays="numpy") as loader,
    ):
        list(islice(loader, 4))

    source["on_error"] = {"policy": "skip", "limit": 1}
    file.write_text(json.dumps(mix))
    with omniload.open(file, steps=4, arrays="numpy") as loader:
        positions = [piece.key[1] for batch in loader for piece in batch.pieces()]
    assert 4 not in positions
    assert {3, 5} <= set(positions)


def test_audit_tells_the_documents_of_a_step_by_what_their_records_have(tmp_path):
    file, run = a_mix(tmp_path), str(tmp_path / "run")
    with omniload.open(file, steps=2, arrays="numpy", run_dir=run) as loader:
        *_, last = loader
    held = {piece.key: values_of(piece.columns) for piece in last.pieces()}

    shown = json_of("audit", run, "--step", 1)["samples"]
    table = run_mix("audit", run, "--step", 1).output

    names = ["own", "plain"]
    found = {
        (names.index(s["source"]), s["position"], s["sub"], s["first_token"]): s["columns"]
        for s in shown
    }
    assert found == held
    assert all(word in table for word in ("lang", "quality", "日本語"))
