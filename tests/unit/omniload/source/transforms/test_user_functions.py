"""Functions of users: found by name, limited to what they may do, and part of a run's identity."""

import json
import re
import sys

import numpy as np
import pytest

import omniload
from omniload.base.config import checked
from omniload.base.errors import ConfigError, StateError
from omniload.base.settings import registry
from omniload.mix.config import MixConfig
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.edits.mix_commands import json_of, run_mix
from tests.support.plane.sources.drawn_texts import a_mix_of
from tests.support.plane.sources.drawn_texts import said_behind_d as drawn

FUNCTIONS = """
import random
import pyarrow as pa
import pyarrow.compute as pc

calls = []

def strip(texts, *, marker="--"):
    calls.append(len(texts))
    return pc.replace_substring_regex(texts, f"{marker}.*", "")

def unmarked(texts):
    return pc.replace_substring(texts, "--x", "")

def long_ones(texts, *, least=3):
    return pc.if_else(pc.greater_equal(pc.binary_length(texts), least), texts, pa.scalar(None, texts.type))

def shift(tokens, *, by=1):
    moved = pc.add(tokens.flatten(), by)
    return pa.LargeListArray.from_arrays(tokens.offsets, moved)

def odd_only(tokens):
    return pa.array([[t for t in each if t % 2] for each in tokens.to_pylist()], pa.large_list(pa.int32()))

def neighbours(texts):
    return pa.array([f"{t}{len(texts)}" for t in texts.to_pylist()])

def chance(texts):
    return pa.array([f"{t}{random.random()}" for t in texts.to_pylist()])

def shorter(texts):
    return texts.slice(1)

def numbers(texts):
    return pa.array(range(len(texts)))

def listed(texts):
    return texts.to_pylist()

def broken(texts):
    raise KeyError("no such word")

def leaves(texts):
    raise SystemExit("no such word")

def negative(tokens):
    return pc.negate(tokens.flatten()) and pa.array([[-5]] * len(tokens))
"""


def install(folder, version):
    for old in folder.glob("lab-*.dist-info"):
        old.rename(folder / f"gone-{old.name}.txt")
    meta = folder / f"lab-{version}.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lab\nVersion: {version}\n")
    names = [line[4:].partition("(")[0] for line in FUNCTIONS.splitlines() if line[:4] == "def "]
    lines = "".join(f"{name} = lab_of_maps:{name}\n" for name in names)
    (meta / "entry_points.txt").write_text(f"[omniload.transforms]\n{lines}")
    sys.path_importer_cache.clear()
    registry.registered.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab_of_maps.py").write_text(FUNCTIONS)
    install(tmp_path, "1.2.0")
    lines = "".join(json.dumps({"text": f"d{i}--page {i}"}) + "\n" for i in range(200))
    (tmp_path / "web.jsonl").write_text(lines)
    yield tmp_path
    sys.modules.pop("lab_of_maps", None)
    registry.registered.cache_clear()


def a_mix(*transforms, **source):
    lines = {"type": "jsonl", "path": "web.jsonl", "transforms": list(transforms)}
    return a_mix_of(**lines | source)


def a_map(function, **words):
    return {"type": "map", "function": function, **words}


def numbers(wanted):
    return sorted(str(i) for i in wanted)


def test_a_function_maps_texts_before_they_are_tokenised(folder):
    assert drawn(a_mix(a_map("strip"))) == numbers(range(200))


def test_a_function_is_given_its_options(folder):
    found = drawn(a_mix(a_map("strip", options={"marker": " "})))

    assert found == sorted(f"{i}--page" for i in range(200))


def test_records_are_left_out_by_a_null_where_that_is_declared(folder):
    some = a_map("long_ones", drops=True, options={"least": 4})

    assert drawn(a_mix(a_map("strip"), some)) == numbers(range(100, 200))
    assert drawn(a_mix(a_map("strip"), some, a_map("strip"))) == numbers(range(100, 200))


def test_a_value_of_a_whole_record_stays_with_what_functions_make_of_it(folder):
    some = a_map("long_ones", drops=True, options={"least": 4})
    written = {"column": "text", "dtype": "text", "of": "samples"}
    mix = a_mix(a_map("strip"), some, columns={"written": written})
    mix["batch"]["columns"] = ["written"]

    with omniload.open(mix, arrays="numpy") as loader:
        pieces = [piece for batch in loader for piece in batch.pieces()]

    assert len(pieces) == 100
    for piece in pieces:
        made = bytes(piece.tokens[piece.tokens < 256].tolist()).decode()
        assert bytes(piece.columns["written"]).decode().partition("--")[0] == made


def test_a_text_that_is_empty_is_left_out_by_no_function(folder):
    texts = ["d1--page 1", "", "d2--page 2"]
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

    assert drawn(a_mix(a_map("strip"))) == ["1", "2"]


def test_all_of_a_batch_may_be_left_out(folder):
    with pytest.raises(ConfigError, match="none of its 200 records gives a sample"):
        drawn(a_mix(a_map("long_ones", drops=True, options={"least": 999})))


def test_a_function_maps_token_ids(folder):
    mapped = [a_map("strip"), a_map("shift", of="tokens", options={"by": -1})]

    with omniload.open(a_mix(*mapped), arrays="numpy") as loader:
        found = np.concatenate([batch.tokens.ravel() for batch in loader])
    with omniload.open(a_mix(mapped[0]), arrays="numpy") as loader:
        plain = np.concatenate([batch.tokens.ravel() for batch in loader])

    trained = plain > 0
    assert (found[trained] == plain[trained] - 1).all()


def test_samples_without_tokens_are_left_out_of_them(folder):
    (folder / "web.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["bb", "", "ab", "cd", "dbd"] * 4)
    )
    mapped = [a_map("odd_only", of="tokens", drops=True)]
    mix = a_mix(*mapped, shuffle={"method": "none"})

    with omniload.open(mix, arrays="numpy") as loader:
        found = np.concatenate([batch.tokens.ravel() for batch in loader])

    assert found[found > 0].tolist() == [ord("a"), ord("c")] * 4


def test_samples_keep_the_positions_of_their_records(folder):
    texts = ["d" * (i % 7) for i in range(60)]
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    maps = [a_map("long_ones", drops=True, options={"least": n}) for n in (3, 5)]
    maps.append(a_map("shift", of="tokens"))
    config = checked(a_mix(*maps, shuffle={"method": "none"}), MixConfig, name="mix")
    source = open_source(
        SourceSpec(
            "web", config.sources["web"], seed=1, tokenizer=config.tokenizer, base_dir=folder
        )
    )

    block = source.read(0, 60)

    left = [i for i, text in enumerate(texts) if len(text) >= 5]
    assert block.table.positions_N.tolist() == left
    assert [len(block.tokens[i]) for i in range(len(left))] == [len(texts[i]) + 1 for i in left]


def test_the_samples_are_the_same_however_they_are_read(folder):
    mix = a_mix(a_map("strip"), a_map("long_ones", drops=True, options={"least": 4}))
    mix["mix"]["stop"] = "never"
    with omniload.open(mix, arrays="numpy", steps=30) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(batch.tokens.copy())
            states.append(loader.state_dict())

    with omniload.open(mix, arrays="numpy", steps=30, state=states[10]) as loader:
        rest = [batch.tokens.copy() for batch in loader]

    assert all(map(np.array_equal, whole[11:], rest))
    assert len(rest) == 19


def test_another_version_of_the_distribution_is_another_run(folder):
    mix = a_mix(a_map("strip"))
    with omniload.open(mix, arrays="numpy") as loader:
        loader.next_batch()
        state = loader.state_dict()
    install(folder, "1.3.0")

    said = r"sources\.web\.transforms: strip of lab 1\.2\.0 saved, strip of lab 1\.3\.0 now"
    with pytest.raises(StateError, match=said):
        omniload.open(mix, arrays="numpy", state=state)


def test_a_conversation_is_mapped_as_the_json_that_it_is(folder):
    pytest.importorskip("jinja2")
    lines = [
        {"m": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"d{i}--x"}]}
        for i in range(20)
    ]
    (folder / "web.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    template = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    (folder / "chat.jinja").write_text(template)
    chat = {"type": "chat", "template": "chat.jinja", "loss": "all"}

    found = drawn(a_mix(a_map("unmarked"), chat, text="m"))

    assert found == numbers(range(20))


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (a_map("gone"), r"no installed distributions register 'gone' .* registered: \['broken'"),
        (a_map("neighbours"), "in another batch; let it decide from that record"),
        (a_map("chance"), "and without chance"),
        (a_map("shorter"), "gives 63 records for 64; leave one out by a null"),
        (a_map("numbers", options={"a": 1}), "fails on 64 records: TypeError"),
        (a_map("listed"), "gives a list, not an array of Arrow"),
        (a_map("broken"), r"map 'broken' \(lab 1.2.0\): fails on 64 records: KeyError: 'no such"),
        (a_map("leaves"), "fails on 64 records: SystemExit: no such word"),
        (a_map("long_ones", options={"least": 11}), "leaves 10 of 64 records out, but drops is"),
        (a_map("negative", of="tokens"), "gives the token id -5; ids are 0 or more"),
        (a_map("shift", of="text"), "fails on 64 records"),
    ],
)
def test_check_tells_what_a_function_may_not_do(folder, transform, said):
    (folder / "mix.yaml").write_text(json.dumps(a_mix(transform, shuffle={"method": "none"})))
    result = run_mix("check", folder / "mix.yaml")

    assert isinstance(result.exception, ConfigError)
    assert re.search(said, str(result.exception))


def test_check_counts_the_tokens_of_what_is_left(folder):
    (folder / "mix.yaml").write_text(json.dumps(a_mix(a_map("strip"))))

    (source,) = json_of("check", folder / "mix.yaml")["sources"]

    assert source["tokens_per_record"] == pytest.approx((10 * 3 + 54 * 4) / 64)


@pytest.mark.parametrize(
    ("transforms", "source", "said"),
    [
        (
            [{"type": "clamp", "tokens": 4}, a_map("strip")],
            {},
            "comes after the transform that makes tokens",
        ),
        ([a_map("strip")], {"type": "numpy", "path": "a"}, "say of: tokens"),
        ([{"type": "chat"}, a_map("shift", of="tokens")], {}, "map gives other tokens, and the"),
        ([a_map("lab_of_maps:strip")], {}, "function"),
        ([a_map("os.system()")], {}, "function"),
        ([a_map("strip", options={"a b": 1})], {}, "options"),
    ],
)
def test_what_does_not_fit_is_refused(transforms, source, said):
    with pytest.raises(ConfigError, match=said):
        checked(a_mix(*transforms, **source), MixConfig, name="mix")
