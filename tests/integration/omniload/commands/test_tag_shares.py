"""Shares by tags of samples: ``omniload mix stats`` predicts them, ``omniload mix audit`` finds them in a step."""

import json
from collections import Counter

import pytest
import yaml

import omniload
from tests.support.plane.edits.mix_commands import json_of, run_mix

LANGS = ("de", "en", "")


@pytest.fixture
def records():
    """Records of a source with tags, and of one without."""
    tagged = [
        {
            "text": f"{i} " + "x" * (i % 37),
            "language": LANGS[i % 3],
            "new": i % 4 == 0,
            "score": i / 7,
        }
        for i in range(300)
    ]
    return {"tagged": tagged, "plain": [{"text": f"{i} plain"} for i in range(100)]}


@pytest.fixture
def mix_path(tmp_path, records, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, lines in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    own = {
        "lang": {"column": "language", "dtype": "text", "of": "samples", "default": "en"},
        "new": {"column": "new", "dtype": "bool", "of": "samples", "default": True},
        "score": {"column": "score", "dtype": "float64", "of": "samples", "default": 0},
    }
    mix = {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {
            "plain": {"type": "jsonl", "path": "plain.jsonl"},
            "tagged": {"type": "jsonl", "path": "tagged.jsonl", "columns": own},
        },
        "mix": {"stages": [{"from_step": 0, "weights": {"tagged": 3, "plain": 1}}]},
        "pack": {"length": 128},
        "batch": {"tokens": 2048, "micro_tokens": 512, "columns": ["lang", "new", "score"]},
    }
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(mix), encoding="utf-8")
    return path


def test_stats_tell_documents_tokens_and_the_part_of_the_run_by_each_tag(mix_path, records):
    told = json_of("stats", mix_path, "--all", "--steps", 50, "--measure", 0)["tags"]

    assert set(told) == {
        "lang",
        "new",
    }  # of numbers with a fraction, nearly every value is distinct
    sizes = {name: [len(each["text"]) + 1 for each in lines] for name, lines in records.items()}
    tagged = Counter()
    for each, size in zip(records["tagged"], sizes["tagged"], strict=True):
        tagged[each["language"]] += size
    whole = tagged + Counter(en=sum(sizes["plain"]))
    assert {value: told["lang"][value]["tokens"] for value in LANGS} == whole
    assert told["lang"]["en"]["documents"] == 100 + 100
    assert told["lang"]["de"]["share"] == pytest.approx(
        0.75 * tagged["de"] / sum(sizes["tagged"]), abs=1e-6
    )
    assert sum(each["share"] for each in told["new"].values()) == pytest.approx(1)
    assert told["new"]["true"]["documents"] == 75 + 100


def test_stats_show_a_table_of_each_tag(mix_path):
    shown = run_mix("stats", mix_path, "--measure", 0).output

    assert "by lang" in shown
    assert "(empty)" in shown
    assert "of the run's tokens" in shown


def test_an_audit_tells_the_shares_of_a_step(mix_path, tmp_path):
    run = tmp_path / "run"
    with omniload.open(str(mix_path), run_dir=str(run), steps=2, arrays="numpy") as loader:
        batches = list(loader)
    expected = Counter()
    for piece in batches[1].pieces():
        expected[bytes(piece.columns["lang"]).decode()] += len(piece.tokens)

    told = json_of("audit", run, "--step", 1)["tags"]
    shown = run_mix("audit", run, "--step", 1).output

    assert {value: each["tokens"] for value, each in told["lang"].items()} == expected
    (most, tokens), *_ = expected.most_common()
    assert f"tokens by lang: {most} {tokens / sum(expected.values()):.1%}" in shown
