"""A token cache changes no sample: full, empty, half filled, damaged, or shared by runs that differ."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from omniload.mix.runtime import TokenCacheConfig
from omniload.mix.schema.tokenizers import BpeTokenizer, ByteTokenizer
from omniload.mix.sources import SourceConfig
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.token_cache.opening import open_token_cache
from omniload.source.transforms.pipeline import Pipeline
from tests.support.chats import CHATML, conversations, write_model
from tests.support.examples import few

RECORDS = 24
BYTES = ByteTokenizer(type="bytes")
SKIP = {"policy": "skip", "limit": 1000}
LINES = {"type": "jsonl", "path": "*.jsonl", "unit": 300}
CHATS = LINES | {"unit": 900}
SOURCES = {
    "jsonl": LINES,
    "bad lines": {**LINES, "text": "some", "on_error": SKIP},
    "where": {**LINES, "where": {"lang": "en"}},
    "split": {**LINES, "splits": {"held": 0.3}},
    "held out": {**LINES, "splits": {"held": 0.3}, "split": "held"},
    "distinct": {**LINES, "dedupe": "content"},
    "clamped": {
        **LINES,
        "transforms": [
            {"type": "fim", "prefix": 200, "suffix": 201, "middle": 202},
            {"type": "clamp", "tokens": 20},
        ],
    },
    "joined": {
        **LINES,
        "text": "some",
        "on_error": SKIP,
        "transforms": [
            {"type": "fim", "prefix": 200, "suffix": 201, "middle": 202},
            {"type": "concat", "tokens": 32},
        ],
    },
    "joined chat": {
        **CHATS,
        "text": "messages",
        "transforms": [{"type": "chat"}, {"type": "concat", "tokens": 16}],
        "on_error": SKIP,
    },
    "parquet": {
        "type": "parquet",
        "path": "*.parquet",
        "text": "text",
        "columns": {"scores": "score"},
    },
    "chat": {**CHATS, "text": "messages", "transforms": [{"type": "chat"}], "on_error": SKIP},
    "names": {
        **CHATS,
        "text": "conversations",
        "transforms": [{"type": "chat", "messages": {"role": "from", "content": "value"}}],
        "on_error": SKIP,
    },
    "tags": {
        **CHATS,
        "text": "messages",
        "transforms": [{"type": "chat"}],
        "columns": {
            "lang": {"column": "lang", "dtype": "text", "of": "samples"},
            "some": {"column": "some", "dtype": "text", "of": "samples", "default": "-"},
            "none": {"column": "none", "dtype": "int64", "of": "samples", "default": 7},
        },
        "on_error": SKIP,
    },
    "completion": {
        **CHATS,
        "transforms": [{"type": "completion", "prompt": ["lang", "some"]}],
        "on_error": SKIP,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of each format, with records of which some are empty, bad or repeated, and a model."""
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model", CHATML)
    chats = conversations(RECORDS)
    for shard in range(2):
        lines, texts = [], []
        for i in range(RECORDS):
            text = f"{'' if i % 13 == 0 else f'record {shard} {i % 16} é ' * (i % 4)}"
            texts.append(text)
            line = {"text": text, "lang": "en" if i % 3 else "de"}
            line |= {"some": text} if i % 7 else {}
            line |= {"messages": chats[i] if i % 11 else [{"role": "strange"}]}
            line["conversations"] = [
                {"from": each["role"], "value": each["content"]} for each in chats[i]
            ]
            lines.append(json.dumps(line))
        (folder / f"{shard}.jsonl").write_text("\n".join(lines))
        scores = pa.array(np.arange(RECORDS, dtype=np.float32))
        pq.write_table(
            pa.table({"text": texts, "score": scores}),
            folder / f"{shard}.parquet",
            row_group_size=9,
        )
    return folder


def opened(folder, kind, cache, *, seed=3, method="block", key_file="", **changes):
    config = TypeAdapter(SourceConfig).validate_python(
        SOURCES[kind] | {"shuffle": {"method": method, "block_units": 3}} | changes
    )
    talks = kind in ("chat", "tags", "joined chat", "names", "completion")
    tokenizer = BpeTokenizer(type="bpe", path="model") if talks else BYTES
    said = TokenCacheConfig(path=str(cache), key_file=key_file) if cache else None
    return open_source(
        SourceSpec("web", config, seed=seed, tokenizer=tokenizer, base_dir=folder),
        token_cache=open_token_cache(said, tokenizer, folder),
    )


def units_of(folder, kind):
    config = TypeAdapter(SourceConfig).validate_python(SOURCES[kind])
    return len(open_format(SourceSpec("web", config, base_dir=folder)).format.units())


def everything(source, stops):
    """Return everything that is read of a source, one value for each sample."""
    found, skipped = [], 0
    for start, stop in pairwise(stops):
        block = source.read(start, stop)
        skipped += block.skipped
        columns = {"tokens": block.tokens, **block.others}
        found += [
            (*key, *((name, column[i].tolist()) for name, column in sorted(columns.items())))
            for i, key in enumerate(
                zip(block.table.positions_N.tolist(), block.table.subs_N.tolist(), strict=True)
            )
        ]
    return found, skipped


def entries(cache):
    return sorted(path for path in Path(cache).rglob("*") if path.is_file())


END = 2 * RECORDS + 12
"""End of the read: after the first epoch."""
cuts = st.lists(st.integers(0, 2 * RECORDS), max_size=8).map(lambda x: sorted({0, *x, END}))


@few(16, soak=200)
@given(
    st.sampled_from(sorted(SOURCES)),
    st.sampled_from(["none", "shards", "block", "full"]),
    cuts,
    st.integers(0, END - 1),
    st.sampled_from(["kept", "half gone", "cut short", "turned"]),
    st.randoms(use_true_random=False),
)
def test_samples_are_the_same_with_a_cache_without_and_half_filled(
    folder, kind, method, stops, first_stop, fate, chance
):
    expected = everything(opened(folder, kind, None, method=method), stops)
    with tempfile.TemporaryDirectory() as cache:
        filling = opened(folder, kind, cache, method=method, seed=chance.randint(0, 9))
        filling.read(0, first_stop)
        filling.release()
        for path in entries(cache):
            if fate != "kept" and chance.random() < 0.5:
                data = bytearray(path.read_bytes())
                at = chance.randrange(len(data))
                if fate == "half gone":
                    path.unlink()
                elif fate == "cut short":
                    path.write_bytes(data[:at])
                else:
                    data[at] ^= 0xFF
                    path.write_bytes(data)

        assert everything(opened(folder, kind, cache, method=method), stops) == expected
        assert everything(opened(folder, kind, cache, method=method), stops) == expected


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_after_an_epoch_no_text_is_tokenised(folder, kind, tmp_path, monkeypatch):
    stops = [0, 20, 2 * RECORDS]
    expected = everything(opened(folder, kind, None), stops)
    filling = opened(folder, kind, tmp_path)
    filling.read(0, filling.positions_per_epoch)
    later = opened(folder, kind, tmp_path, seed=3)
    monkeypatch.setattr(Pipeline, "encoded", None)

    assert everything(later, stops) == expected


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_of_units_whose_tokens_were_made_ahead_no_text_is_tokenised(
    folder, kind, tmp_path, monkeypatch
):
    stops = [0, 20, 2 * RECORDS]
    expected = everything(opened(folder, kind, None), stops)
    ahead, units = opened(folder, kind, tmp_path, seed=8), range(units_of(folder, kind))

    made = [ahead.make_tokens(unit) for unit in units]
    again = [ahead.make_tokens(unit) for unit in units]

    assert all(is_kept for _, is_kept in made + again)
    assert sum(tokens for tokens, _ in made) > 0
    assert {tokens for tokens, _ in again} == {None}
    later = opened(folder, kind, tmp_path, seed=3)
    monkeypatch.setattr(Pipeline, "encoded", None)
    assert everything(later, stops) == expected


@pytest.mark.parametrize("read_units", [1, 9])
@pytest.mark.parametrize("kind", ["chat", "joined chat", "tags"])
@pytest.mark.parametrize("seed", range(3))
def test_masks_stay_with_their_tokens_beside_units_of_which_nothing_is_drawn(
    folder, kind, read_units, seed, tmp_path
):
    """Such a unit is kept without a column, and another run has it in one block with units that have a column."""
    (tmp_path / "model").symlink_to(folder / "model")
    for shard, lang in enumerate(("en", "de", "en")):
        lines = [json.dumps({"messages": each, "lang": lang}) for each in conversations(9)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))

    def of_units(count, cache, seed=seed):
        shuffle = {"method": "units", "block_units": count}
        changes = {"where": {"lang": "de"}, "shuffle": shuffle, "unit": 1 << 20}
        return opened(tmp_path, kind, cache, seed=seed, **changes)

    filling = of_units(1, tmp_path / "cache")
    everything(filling, range(0, 28, 9))  # one unit at a time
    filling.release()

    stops = [0, 27, 54]
    expected = everything(of_units(read_units, None), stops)
    assert len(expected[0]) >= 18
    assert everything(of_units(read_units, tmp_path / "cache"), stops) == expected


def test_runs_of_another_seed_name_and_folder_share_entries(folder, tmp_path):
    source = opened(folder, "jsonl", tmp_path / "cache")
    source.read(0, source.positions_per_epoch)
    before = entries(tmp_path / "cache")
    (tmp_path / "copy").mkdir()
    for path in folder.glob("*.jsonl"):
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())

    copied = opened(tmp_path / "copy", "jsonl", tmp_path / "cache", seed=8)
    copied.read(0, copied.positions_per_epoch)

    assert len(before) > 10
    assert entries(tmp_path / "cache") == before


@pytest.mark.parametrize("fate", ["text", "time"])
def test_a_parquet_file_that_was_written_anew_is_tokenised_anew(folder, tmp_path, fate):
    (tmp_path / "data").mkdir()
    for shard in range(2):
        name = f"{shard}.parquet"
        (tmp_path / "data" / name).write_bytes((folder / name).read_bytes())
    source = opened(tmp_path / "data", "parquet", tmp_path / "cache")
    source.read(0, source.positions_per_epoch)
    changed = tmp_path / "data/0.parquet"
    if fate == "text":
        table = pq.read_table(changed).to_pydict()
        table["text"] = [text.replace("record", "RECORD") for text in table["text"]]
        pq.write_table(pa.table(table), changed, row_group_size=9)
    else:
        changed.write_bytes(changed.read_bytes())
    before = len(entries(tmp_path / "cache"))

    now = everything(opened(tmp_path / "data", "parquet", tmp_path / "cache"), [0, 2 * RECORDS])

    assert now == everything(opened(tmp_path / "data", "parquet", None), [0, 2 * RECORDS])
    assert len(entries(tmp_path / "cache")) == before + -(-RECORDS // 9)


def test_another_tokenizer_uses_no_entry(folder, tmp_path):
    source = opened(folder, "chat", tmp_path / "cache")
    source.read(0, source.positions_per_epoch)
    (tmp_path / "model").mkdir()
    for path in (folder / "model").iterdir():
        (tmp_path / "model" / path.name).write_text(path.read_text() + "\n")
    for path in folder.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = len(entries(tmp_path / "cache"))

    other = opened(tmp_path, "chat", tmp_path / "cache")
    other.read(0, other.positions_per_epoch)

    assert len(entries(tmp_path / "cache")) == 2 * before


def test_other_names_of_roles_use_no_entry(folder, tmp_path):
    source = opened(folder, "names", tmp_path)
    source.read(0, source.positions_per_epoch)
    before = len(entries(tmp_path))
    roles = {"system": "system", "user": "assistant", "assistant": "user"}
    names = {"role": "from", "content": "value", "roles": roles}

    turned = {"transforms": [{"type": "chat", "messages": names}]}
    other = everything(opened(folder, "names", tmp_path, **turned), [0, 2 * RECORDS])

    assert other == everything(opened(folder, "names", None, **turned), [0, 2 * RECORDS])
    assert len(entries(tmp_path)) == 2 * before
