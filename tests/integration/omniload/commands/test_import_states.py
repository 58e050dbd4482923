"""Imported states of torchdata's own loader: the drawn samples are left out, and all others come."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from omniload.base.errors import ConfigError, StateError
from omniload.mix.config import load_mix
from omniload.mix.schema.tokenizers import ByteTokenizer
from omniload.source.parsing import compressed
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.edits.mix_commands import run_mix

FILES = {"b.jsonl": 20, "folder/a.jsonl": 3, "a.jsonl": 14}
"""Records of each file, in the order of the dataset."""
TEXTS = [f"{name} {i}" for name, count in FILES.items() for i in range(count)]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, count in FILES.items():
        lines = [json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(count)]
        (tmp_path / name).write_text("".join(lines))
    return tmp_path


def saved(steps, dataset=TEXTS, **keywords):
    """Return the state after some batches, and the remaining records in torchdata's order."""
    loader = StatefulDataLoader(dataset, batch_size=4, **keywords)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    state = loader.state_dict()
    return state, [text for batch in batches for text in batch]


def imported(state, *, files=tuple(FILES), **words):
    """Import a loader with its state; return the result of the command."""
    as_lists = json.dumps(state, default=lambda tensor: tensor.tolist())
    Path("state.json").write_text(as_lists, encoding="utf-8")
    content = {"dataset": list(files), "batch_size": 4} | words
    Path("loader.yaml").write_text(json.dumps(content), encoding="utf-8")
    options = ("--length", "64", "--batch", "64", "--text", "text", "--tokenizer", "tokenizer.json")
    return run_mix(
        *("import", "loader.yaml", "--from", "torchdata", "--state", "state.json"),
        *("-o", "mix.yaml", *options),
    )


def first_epoch(folder):
    """Return the texts of the first epoch of the imported source, in order."""
    mix, base_dir = load_mix(folder / "mix.yaml")
    (name,) = mix.names
    # Instead of the tokenizer that the import names, which does not exist here.
    tokenizer = ByteTokenizer(type="bytes")
    spec = SourceSpec(
        name, mix.sources[name], base_dir=base_dir, tokenizer=tokenizer, seed=mix.seed
    )
    block = open_source(spec).read(0, len(TEXTS))
    return [bytes(tokens.tolist()[:-1]).decode() for tokens in block.tokens]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("keywords", "steps"),
    [
        *(({}, steps) for steps in (0, 1, 5, 9)),
        ({"num_workers": 2}, 5),
        ({"num_workers": 2, "snapshot_every_n_steps": 4}, 7),
        ({"drop_last": True}, 5),
    ],
)
def test_what_a_state_says_was_drawn_is_left_out_and_nothing_else(files, shuffle, keywords, steps):
    state, left = saved(steps, shuffle=shuffle, **keywords)

    result = imported(state, shuffle=shuffle)

    assert result.exception is None, result.output
    found = first_epoch(files)
    # The samples that torchdata drops at the end of an epoch were never drawn.
    dropped = set(found) - set(left) if "drop_last" in keywords else set()
    assert sorted(set(found) - dropped) == sorted(left)
    assert len(found) == len(left) + len(dropped) == len(TEXTS) - 4 * steps
    if not shuffle and not dropped:
        assert found == left  # in the order of the files, as in torchdata


def test_rows_of_tables_are_records_as_lines_are(files):
    for name, count in FILES.items():
        table = pa.table({"text": [f"{name} {i}" for i in range(count)]})
        pq.write_table(table, Path(name).with_suffix(".parquet"), row_group_size=3)
    state, left = saved(3, shuffle=True)
    tables = [str(Path(name).with_suffix(".parquet")) for name in FILES]

    result = imported(state, files=tables, shuffle=True)

    assert result.exception is None, result.output
    assert sorted(first_epoch(files)) == sorted(left)


BLANKS = {
    "first": ("\n", "", 1),
    "in the middle": ("{}\n", " \t\n{}\n", 2),
    "as Windows ends it": ("{}\r\n", "\r\n", 2),
    "last": ('{"text": "long enough for a few chunks"}\n' * 3, "\n", 4),
    "without an end": ("{}\n", "    ", 2),
}


@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 8 << 20])
@pytest.mark.parametrize(("before", "behind", "number"), BLANKS.values(), ids=BLANKS)
def test_a_blank_line_which_a_dataset_passes_over_is_refused(
    files, monkeypatch, chunk_bytes, before, behind, number
):
    monkeypatch.setattr(compressed, "_SCAN_BYTES", chunk_bytes)
    state, _ = saved(3, shuffle=True)
    (files / "a.jsonl").write_bytes((before + behind).encode())

    result = imported(state, shuffle=True)

    assert isinstance(result.exception, ConfigError), result.output
    assert f"a.jsonl:{number}: is blank" in str(result.exception)


def test_lines_without_a_blank_one_are_counted_however_the_file_is_cut(files, monkeypatch):
    monkeypatch.setattr(compressed, "_SCAN_BYTES", 3)
    lines = (files / "a.jsonl").read_bytes()
    (files / "a.jsonl").write_bytes(lines.replace(b"\n", b" \r\n").removesuffix(b"\r\n"))
    state, left = saved(3, shuffle=True)

    result = imported(state, shuffle=True)

    assert result.exception is None, result.output
    assert sorted(first_epoch(files)) == sorted(left)


def test_a_state_of_an_epoch_that_ended_leaves_nothing_out(files):
    loader = StatefulDataLoader(TEXTS, batch_size=4, shuffle=True)
    list(loader)

    result = imported(loader.state_dict(), shuffle=True)

    assert "the state is of an epoch that had ended: no record is left out" in result.output
    assert sorted(first_epoch(files)) == sorted(TEXTS)
    assert not Path("mix.drawn").exists()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(TEXTS)


class Counting(list):
    def state_dict(self):
        return {"read": 1}

    def load_state_dict(self, state):
        pass


class Dealt(torch.utils.data.RandomSampler):
    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("state", "words", "said"),
    [
        (lambda: saved(1, Endless()), {}, "of an iterable dataset, whose place lies in iterators"),
        (lambda: saved(1, Endless(), num_workers=1), {}, "of an iterable dataset"),
        (lambda: saved(1, Counting(TEXTS)), {}, "holds one of the dataset's own"),
        (lambda: saved(1, sampler=Dealt(TEXTS)), {}, "one of a sampler's own, whose order it does"),
        (lambda: saved(1, shuffle=True), {}, "the dataset was shuffled, and shuffle is False"),
        (lambda: saved(1), {"shuffle": True}, "was not shuffled, or by a sampler that keeps no st"),
        (
            lambda: saved(2),
            {"batch_size": 3},
            "8 records in 2 batches; the files hold 37 records, and batch_size is 3",
        ),
        (
            lambda: saved(9),
            {"files": ["b.jsonl"]},
            "the state had drawn 36 records, and the files hold 20",
        ),
    ],
)
def test_what_a_state_does_not_hold_exactly_is_refused_with_the_reason(state, words, said):
    result = imported(state()[0], **words)

    assert isinstance(result.exception, StateError), result.exception
    assert said in str(result.exception)
    assert not Path("mix.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_sampler_iter_state": {"sampler_iter_state": {}}}, "has no 'samples_yielded'"),
        ({"_num_yielded": 2}, "is damaged: 2 batches were handed out, and 3 drawn"),
        ({"_num_yielded": -1}, "is damaged: -1 is not a whole number"),
        ({"_num_yielded": True}, "is damaged"),
        ({"dataset_state": 5}, "holds one of the dataset's own"),
        ({"_sampler_iter_state": 5}, "is damaged"),
        ({"_snapshot": 5}, "is damaged"),
    ],
)
def test_a_damaged_state_is_refused(changes, said):
    state, _ = saved(3, shuffle=True)

    result = imported(state | changes, shuffle=True)

    assert isinstance(result.exception, StateError), result.exception
    assert said in str(result.exception)


@pytest.mark.parametrize("generator", [[], [1] * 5056, [256] * 5056, ["a"] * 5056, 7, [[0]] * 5056])
def test_what_is_no_generator_is_refused(generator):
    state, _ = saved(3, shuffle=True)
    state["_sampler_iter_state"]["sampler_iter_state"]["generator"] = generator

    result = imported(state, shuffle=True)

    assert isinstance(result.exception, StateError), result.exception
    assert "the state is damaged" in str(result.exception)


def test_a_pickle_is_never_loaded():
    imported({})
    torch.save(saved(3)[0], "state.pt")

    result = run_mix(
        *("import", "loader.yaml", "--from", "torchdata", "--state", "state.pt", "-o", "mix.yaml")
    )

    assert isinstance(result.exception, StateError)
    assert "is a pickle, as torch.save writes it, which is never loaded; write it as JSON" in str(
        result.exception
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"files": ["none.jsonl"]}, "'none.jsonl' is no file in"),
        ({"files": ["*.jsonl"]}, "name files one by one, in the order of the dataset's indices"),
        ({"files": []}, "names no file"),
        ({"batch_size": 0}, "batch_size: is 0"),
        ({"sampler": "mine"}, "its order is its own, and no state says it"),
        ({"collate_fn": "mine"}, "declare what it does as transforms"),
        ({"surprise": 1}, "surprise: this key is not known"),
    ],
)
def test_words_of_a_call_that_decide_another_order_are_refused(words, said):
    result = imported(saved(1)[0], **words)

    assert isinstance(result.exception, ConfigError), result.exception
    assert said in str(result.exception)
