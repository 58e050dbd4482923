"""``omniload mix drawn``: a run with other rows continues with the records that the previous run had not drawn."""

import json
from collections import Counter
from pathlib import Path

import pytest

import omniload
from omniload.base.errors import ConfigError, StateError
from tests.support.plane.edits.mix_commands import json_of, run_mix

TEXTS = {name: [f"{name}-{i} " + "x" * (i * 11 % 60) for i in range(200)] for name in ("a", "b")}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, texts in TEXTS.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return tmp_path


def write_mix(path="mix.yaml", *, length=64, batch=512, stop="never", drawn=None, weights=(3, 1)):
    sources = {name: {"type": "jsonl", "path": f"{name}.jsonl"} for name in TEXTS}
    for name, file in (drawn or {}).items():
        sources[name]["drawn_before"] = file
    mix = {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": sources,
        "mix": {
            "stages": [{"from_step": 0, "weights": dict(zip("ab", weights, strict=True))}],
            "stop": stop,
        },
        "pack": {"length": length},
        "batch": {"tokens": batch, "micro_tokens": batch},
    }
    Path(path).write_text(json.dumps(mix))
    return path


def whole_documents(batches):
    """Count how often each document came from its beginning, by source and the text of its position."""
    found = Counter()
    for batch in batches:
        for piece in batch.pieces():
            text = bytes(t for t in piece.tokens.tolist() if t < 256).decode()
            if " " in text and text.partition("-")[0] in TEXTS:
                found[text.partition(" ")[0]] += 1
    return found


def files_of(told):
    return {each["source"]: each["file"] for each in told["sources"] if each["file"]}


def test_a_run_of_longer_rows_has_the_rest_of_the_epoch_and_nothing_twice(folder):
    with omniload.open(write_mix(), run_dir="run", arrays="numpy") as loader:
        before = [loader.next_batch() for _ in range(9)]
        state = loader.state_dict()
        loader.next_batch()  # beyond the checkpoint with which the next run begins

    told = json_of("drawn", "run", "--step", 9, "-o", "drawn")
    again = write_mix("long.yaml", length=256, batch=1024, stop="each_once", drawn=files_of(told))
    with omniload.open(again, arrays="numpy") as loader:
        after = list(loader)

    assert json_of("plan", again)["steps"] == len(after)
    had, rest = whole_documents(before), whole_documents(after)
    begun = sum(each["again"] for each in told["sources"])
    assert [each["epoch"] for each in told["sources"]] == [0, 0]
    assert {each["drawn"] > 0 for each in told["sources"]} == {True}
    assert had.keys() | rest.keys() == {f"{name}-{i}" for name in TEXTS for i in range(200)}
    assert set(rest.values()) == {1}
    assert len(had.keys() & rest.keys()) <= begun
    assert told["step"] == state["step"] == 9


def test_a_state_of_a_run_without_a_folder_says_the_same(folder):
    with omniload.open(write_mix(), run_dir="run", arrays="numpy") as loader:
        for _ in range(5):
            loader.next_batch()
        (folder / "state.json").write_text(json.dumps(loader.state_dict()))

    by_run = json_of("drawn", "run", "--step", 5, "-o", "one")
    by_state = json_of("drawn", "mix.yaml", "--state", "state.json", "-o", "other")
    shown = run_mix("drawn", "run", "--step", 5, "-o", "shown").stdout

    counts = [
        [(e["source"], e["drawn"], e["again"]) for e in t["sources"]] for t in (by_run, by_state)
    ]
    assert counts[0] == counts[1]
    for name in TEXTS:
        assert (folder / f"one/{name}.arrow").read_bytes() == (
            folder / f"other/{name}.arrow"
        ).read_bytes()
    assert "shown/a.arrow" in shown
    assert "before step 5; name each file by drawn_before" in shown


def test_a_second_change_of_rows_leaves_out_what_both_runs_had_drawn(folder):
    with omniload.open(write_mix(), run_dir="one", arrays="numpy") as loader:
        for _ in range(6):
            loader.next_batch()
    first = json_of("drawn", "one", "--step", 6, "-o", "drawn-1")
    longer = write_mix("two.yaml", length=128, drawn=files_of(first))
    with omniload.open(longer, run_dir="two", arrays="numpy") as loader:
        for _ in range(6):
            loader.next_batch()

    second = json_of("drawn", "two", "--step", 6, "-o", "drawn-2")

    sums = [sum(each["drawn"] for each in told["sources"]) for told in (first, second)]
    assert sums[1] > sums[0] * 1.5
    last = write_mix("three.yaml", length=256, batch=1024, stop="each_once", drawn=files_of(second))
    with omniload.open(last, arrays="numpy") as loader:
        rest = whole_documents(loader)
    assert len(rest) == 400 - sums[1]


def test_of_joined_documents_no_token_is_lost(folder):
    marks = [f"<{i:03}>" for i in range(300)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": mark}) + "\n" for mark in marks))

    def mix_of(tokens, drawn=None, **changes):
        path = write_mix(length=tokens, batch=4 * tokens, weights=(1, 1), **changes)
        mix = json.loads(Path(path).read_text())
        joined = {"transforms": [{"type": "concat", "tokens": tokens}], "unit": 500}
        mix["sources"] = {
            "a": mix["sources"]["a"] | joined | ({"drawn_before": drawn} if drawn else {})
        }
        mix["mix"]["stages"][0]["weights"] = {"a": 1}
        return mix

    def told_in(batches):
        tokens = b"".join(bytes(batch.tokens[batch.tokens < 256].tolist()) for batch in batches)
        return {mark for mark in marks if mark.encode() in tokens}

    Path("joined.yaml").write_text(json.dumps(mix_of(60)))
    with omniload.open("joined.yaml", run_dir="run", arrays="numpy") as loader:
        before = [loader.next_batch() for _ in range(4)]

    told = json_of("drawn", "run", "--step", 4, "-o", "drawn")
    after = mix_of(120, files_of(told).get("a"), stop="each_once")
    with omniload.open(after, arrays="numpy") as loader:
        rest = told_in(loader)

    (of_a,) = told["sources"]
    assert (of_a["drawn"] > 0, of_a["again"] > 0) == (True, True)
    assert len(rest) == 300 - of_a["drawn"]
    assert told_in(before) | rest == set(marks)


def test_before_the_first_step_every_epoch_is_whole(folder):
    with omniload.open(write_mix(), run_dir="run", arrays="numpy") as loader:
        loader.next_batch()

    told = json_of("drawn", "run", "--step", 0, "-o", "drawn")

    assert {each["file"] for each in told["sources"]} == {None}
    assert "a whole epoch is next" in run_mix("drawn", "run", "--step", 0, "-o", "again").stdout


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("run -o new", ConfigError, "the folder of a run and --step, or its mix file and --state"),
        ("run --state s.json -o new", ConfigError, "the folder of a run and --step"),
        ("mix.yaml --step 1 -o new", ConfigError, "its mix file and --state"),
        ("run --step 1 -o there", ConfigError, "there: is there already; give a folder that is"),
        ("run --step 99 -o new", StateError, "99"),
        ("mix.yaml --state torn.json -o new", StateError, r"torn\.json: is no JSON .*json\.dump"),
        ("mix.yaml --state other.json -o new", StateError, "seed: 2 saved, 1 now"),
        ("mix.yaml --state none.json -o new", ConfigError, r"none\.json: no such file"),
    ],
)
def test_what_cannot_be_told_is_refused_and_writes_nothing(folder, words, error, said):
    with omniload.open(write_mix(), run_dir="run", arrays="numpy") as loader:
        loader.next_batch()
    with omniload.open("mix.yaml", seed=2, arrays="numpy") as loader:
        loader.next_batch()
        (folder / "other.json").write_text(json.dumps(loader.state_dict()))
    (folder / "torn.json").write_text('{"version": 2, "st')
    (folder / "there").mkdir()

    with pytest.raises(error, match=said):
        json_of("drawn", *words.split())

    assert not (folder / "new").exists()
    assert not list((folder / "there").iterdir())
