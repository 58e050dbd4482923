"""The verbs of ``omniload mix`` before a run, on small corpora."""

import os
import re
import subprocess
import sys
import tarfile
from itertools import chain

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import omniload
from omniload.base.errors import ConfigError, IntegrityError
from omniload.commands.opening import open_spec
from omniload.mix.config import MixConfig
from omniload.mix.journal.reading import read_journal
from omniload.simulation.rehearsal import Rehearsal
from omniload.source.distinct.drawn_before import write_drawn
from omniload.source.formats import jsonl
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.mix_commands import a_mix_file, a_run, json_of, run_mix


@pytest.fixture
def mix_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return a_mix_file(tmp_path)


def test_a_check_loads_nothing_that_files_of_this_machine_do_without():
    heavy = ("fsspec", "asyncio", "pyarrow.compute", "pyarrow.parquet")
    told = f"import sys, omniload.commands.check; print(*(set({heavy}) & sys.modules.keys()))"

    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.split() == []


def files_under(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "verb", ["audit", "bench", "check", "plan", "preview", "sample", "schema", "show"]
)
def test_every_verb_has_help_with_an_example(verb):
    result = run_mix(verb, "--help")

    assert result.exit_code == 0
    assert "Example:" in result.stdout
    assert f"omniload mix {verb}" in result.stdout


@pytest.mark.parametrize("of", ["tokenizer", "source"])
def test_a_python_that_cannot_name_a_file_says_how_to_start_it(tmp_path, of):
    tokenizer = "{type: bpe, path: ö.json}" if of == "tokenizer" else "{type: bytes}"
    (tmp_path / "mix.yaml").write_text(
        f"version: 1\nseed: 1\ntokenizer: {tokenizer}\nsources: {{a: {{type: jsonl, path: ö.jsonl}}}}\n"
        "mix: {stages: [{weights: {a: 1}}]}\npack: {length: 8}\nbatch: {tokens: 8, micro_tokens: 8}\n",
        encoding="utf-8",
    )
    # Python itself changes this locale to one of UTF-8 unless these variables prevent it.
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    done = subprocess.run(
        [sys.executable, "-m", "omniload", "mix", "check", "mix.yaml"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, **plain},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
    )

    assert done.returncode == 2
    assert "start it with PYTHONUTF8=1" in done.stderr
    assert f"{of}" in done.stderr
    assert "fault of omniload" not in done.stderr


def test_check_prints_sources_and_shares(mix_path):
    result = run_mix("check", mix_path, "--dp", 2)

    assert result.exit_code == 0
    assert "parquet" in result.stdout
    assert "50.00%" in result.stdout
    assert "a step is 4 rows of 32 tokens over 2 data-parallel ranks" in result.stdout


def test_check_as_json_holds_the_same(mix_path):
    shown = json_of("check", mix_path)

    assert shown["rows_per_step"] == 4
    assert [source["records"] for source in shown["sources"]] == [120, 120]
    assert shown["shares"] == [{"step": 0, "shares": {"ids": 0.5, "text": 0.5}}]


def test_check_writes_nothing_but_indexes(mix_path, tmp_path):
    before = files_under(tmp_path)

    run_mix("check", mix_path)

    new = files_under(tmp_path).items() - before.items()
    assert all(path.is_relative_to(tmp_path / "cache") for path, _ in new)


def test_check_reports_every_fault_of_the_file_with_its_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("version: 3\nseed: -1\ncolour: red\n", encoding="utf-8")

    result = run_mix("check", path)

    assert isinstance(result.exception, ConfigError)
    message = str(result.exception)
    for fault in ("bad.yaml:1: version", "bad.yaml:2: seed", "bad.yaml:3: colour", "sources"):
        assert fault in message


def test_check_refuses_more_ranks_than_rows(mix_path):
    result = run_mix("check", mix_path, "--dp", 5)

    assert isinstance(result.exception, ConfigError)
    assert "raise batch.tokens to 160 or more" in str(result.exception)


def test_check_refuses_a_shard_that_is_cut_short(mix_path, tmp_path):
    shard = tmp_path / "ids" / "0.parquet"
    os.truncate(shard, shard.stat().st_size // 2)

    result = run_mix("check", mix_path)

    assert isinstance(result.exception, IntegrityError)


def test_plan_expects_the_shares_of_the_file(mix_path):
    shown = json_of("plan", mix_path, "--steps", 10, "--dp", 2)

    assert shown["steps"] == 10
    total = shown["total"]
    assert total["ids"]["share"] == pytest.approx(0.5, abs=0.01), "to the document"
    drawn = sum(source["tokens"] for source in total.values())
    assert drawn == pytest.approx(10 * 128 * (1 - shown["rehearsed"]["waste"]))


def test_plan_without_a_number_of_steps_says_what_it_needs_them_for_and_what_does_without(mix_path):
    result = run_mix("plan", mix_path)

    assert result.exit_code == 2
    assert "does not end by itself: give its length, such as --steps 1000" in result.output
    assert f"omniload mix check {mix_path} checks the file" in result.output


def test_plan_measures_the_first_steps_for_real(mix_path, tmp_path):
    batches = a_run(tmp_path / "run", mix_path, dp=2, steps=6)

    shown = json_of("plan", mix_path, "--steps", 6, "--dp", 2)["rehearsed"]["steps"]

    assert [step["imbalance"] for step in shown] == [batches[k][0].imbalance for k in range(6)]
    assert [step["tokens"] for step in shown] == [
        sum(batches[k][0].tokens_by_source.values()) for k in range(6)
    ]
    assert all(step["bound"] <= step["imbalance"] + 1e-9 for step in shown)


def test_plan_of_resources_names_the_loaders_and_what_each_source_costs(mix_path):
    shown = json_of("plan", mix_path, "--resources")

    (loader,) = shown["loaders"]
    assert loader["sources"] == ["ids", "text"]
    assert loader["why"] == "light enough to share a process"
    costs = shown["sources"]
    assert all(cost["is_measured"] for cost in costs.values())
    assert all(cost["preprocess_s"] > 0 for cost in costs.values())
    assert all(cost["memory_bytes"] > 1 << 20 for cost in costs.values())


def test_plan_of_resources_says_how_many_read_a_source_and_why(tmp_path):
    path = a_mix_file(tmp_path, loader={"readers": {"text": 3}}, runtime={"loaders": 2})
    shown = json_of("plan", path, "--steps", 10, "--resources")
    words = run_mix("plan", path, "--steps", 10, "--resources").stdout

    assert {name: cost["readers"] for name, cost in shown["sources"].items()} == {
        "ids": 1,
        "text": 3,
    }
    (loader,) = (each for each in shown["loaders"] if each["sources"] == ["text"])
    assert loader["readers"] == 2
    assert "which 3 read, each its units of every block" in loader["why"]
    assert "+2" in words
    assert "readers to begin with" in words


def test_plan_of_resources_says_why_in_words(mix_path):
    result = run_mix("plan", mix_path, "--steps", 10, "--resources")

    assert result.exit_code == 0
    assert "loader-0" in result.stdout
    assert "light enough" in result.stdout


def test_plan_says_how_many_epochs_a_run_really_takes(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path, dp=1, steps=60)
    done = {source["name"]: source for source in json_of("show", tmp_path / "run")["sources"]}

    expected = json_of("plan", mix_path, "--steps", 60)["total"]

    for name, source in done.items():
        assert expected[name]["epochs"] == pytest.approx(source["epochs"], rel=0.1)


def test_plan_warns_of_sources_that_are_repeated_often(mix_path):
    result = run_mix("plan", mix_path, "--steps", 500, "--rehearse", 3)

    assert result.exit_code == 0
    assert "warning: ids is gone through" in result.stdout
    assert "the first 3 steps, planned" in result.stdout


@pytest.mark.parametrize(
    ("is_sorted", "shuffle", "warned"),
    [(True, "", True), (False, "", False), (True, ", shuffle: {method: units}", False)],
)
def test_plan_warns_of_sorted_files_that_the_shuffle_hardly_mixes(
    tmp_path, is_sorted, shuffle, warned
):
    lengths = [10 + i * 7919 % 3000 for i in range(3000)]
    write_texts(
        tmp_path / "web.jsonl", ["x" * n for n in (sorted(lengths) if is_sorted else lengths)]
    )
    path = tmp_path / "mix.yaml"
    path.write_text(
        f"""
version: 1
seed: 1
tokenizer: {{type: bytes}}
sources: {{web: {{type: jsonl, path: web.jsonl, unit: 65536{shuffle}}}}}
mix: {{stages: [{{weights: {{web: 1}}}}]}}
pack: {{length: 4096}}
batch: {{tokens: 16384, micro_tokens: 4096}}
"""
    )

    found = json_of("plan", path, "--steps", 8, "--rehearse", 2, "--cache-dir", tmp_path / "cache")

    (source,) = found["sources"]
    assert source["tokens"] == pytest.approx(sum(lengths) + len(lengths), rel=0.1)
    assert any("look sorted" in said for said in found["warnings"]) == warned


def test_plan_counts_what_a_policy_for_overlong_documents_leaves_out(tmp_path):
    path = a_mix_file(tmp_path, pack={"overlong": "drop"})
    kept = json_of("plan", path, "--steps", 40, "--cache-dir", tmp_path / "cache")

    whole = a_mix_file(tmp_path / "whole", pack={"overlong": "split"})
    split = json_of("plan", whole, "--steps", 40, "--cache-dir", tmp_path / "cache")

    # An epoch has fewer tokens, so the same budget goes through it more often.
    assert kept["total"]["ids"]["epochs"] > 1.1 * split["total"]["ids"]["epochs"]


def test_plan_refuses_a_source_that_gives_no_tokens(tmp_path):
    path = a_mix_file(tmp_path)
    write_texts(tmp_path / "text" / "0.jsonl", [""] * 30)

    result = run_mix("plan", path, "--steps", 5, "--cache-dir", tmp_path / "cache")

    assert isinstance(result.exception, ConfigError)
    assert "text" in str(result.exception)


def test_preview_shows_the_very_tokens_that_a_rank_gets(mix_path, tmp_path):
    batches = a_run(tmp_path / "run", mix_path, dp=1, steps=4)

    rows = json_of("preview", mix_path, "--step", 3, "--rows", 99)["rows"]

    assert len(rows) == 4
    keys = [
        [document["position"] for document in row["documents"] if document["source"] == "ids"]
        for row in rows
    ]
    trained = [microbatch.keys_K4 for microbatch in batches[3][0].microbatches]
    expected = [key[1] for keys_K4 in trained for key in keys_K4.tolist() if key[0] == 0]
    assert list(chain.from_iterable(keys)) == expected


def test_preview_bounds_cover_every_row(mix_path):
    for row in json_of("preview", mix_path, "--rows", 4)["rows"]:
        assert row["cu_seqlens"][0] == 0
        assert row["cu_seqlens"][-1] == 32
        assert sum(document["length"] for document in row["documents"]) == 32 - row["padding"]


def test_preview_decodes_text_and_draws_rows(mix_path):
    result = run_mix("preview", mix_path, "--rows", 4, "--dp", 2)

    assert result.exit_code == 0
    assert "xxxx" in result.stdout
    assert re.search("^[A-Ba-b]+·*$", result.stdout, re.MULTILINE)
    assert "sources: A ids  B text" in result.stdout
    assert "cu_seqlens 0, " in result.stdout
    assert "rank 1, microbatch 0, row" in result.stdout


def test_preview_draws_each_row_on_one_line_of_a_narrow_terminal(mix_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")

    result = run_mix("preview", mix_path, "--rows", 4)

    assert result.stdout.count("cu_seqlens") == 4
    lines = re.findall("^[A-Ba-b·]+$", re.sub(r"\x1b\[[0-9;]*m", "", result.stdout), re.MULTILINE)
    assert [len(line) for line in lines] == [60] * 4


def test_preview_past_the_end_of_the_data_is_refused(tmp_path):
    stages = [{"from_step": 0, "weights": {"ids": 1, "text": 1}}]
    path = a_mix_file(tmp_path, mix={"stages": stages, "stop": "first_exhausted"})

    result = run_mix("preview", path, "--step", 500, "--cache-dir", tmp_path / "cache")

    assert isinstance(result.exception, ConfigError)
    assert "ends the run before step 500; show an earlier one" in str(result.exception)


def test_bench_counts_the_tokens_of_the_steps_it_timed(mix_path, tmp_path):
    batches = a_run(tmp_path / "run", mix_path, dp=2, steps=9)

    measured = json_of("bench", mix_path, "--steps", 9, "--dp", 2, "--runtime", "local")["measured"]

    assert measured["steps"] == len(measured["waits_s"]) == 8
    assert measured["tokens"] == sum(
        sum(batches[step][0].tokens_by_source.values()) for step in range(1, 9)
    )
    assert measured["imbalances"] == [batches[step][0].imbalance for step in range(1, 9)]


def test_bench_prints_a_table(mix_path):
    result = run_mix("bench", mix_path, "--steps", 4, "--runtime", "local")

    assert result.exit_code == 0
    assert "tokens/s" in result.stdout
    assert "runtime local, 1 rank" in result.stdout


def test_bench_ends_with_the_data(tmp_path):
    stages = [{"from_step": 0, "weights": {"ids": 1, "text": 1}}]
    path = a_mix_file(tmp_path, mix={"stages": stages, "stop": "first_exhausted"})

    arguments = ("--runtime", "local", "--cache-dir", tmp_path / "cache")
    measured = json_of("bench", path, "--steps", 500, *arguments)["measured"]

    assert 2 < measured["steps"] < 499


def test_a_plan_of_a_single_pass_forecasts_what_its_run_trains_on(tmp_path):
    stages = [{"from_step": 0, "weights": {"ids": 3, "text": 1}}]
    path = a_mix_file(tmp_path, mix={"stages": stages, "stop": "each_once"})

    expected = json_of("plan", path, "--steps", 500, "--dp", 2, "--cache-dir", tmp_path / "cache")
    taken = a_run(tmp_path / "run", path, dp=2, steps=500)
    steps = [batches for batches in taken.values() if batches[0] is not None]

    assert expected["ends_early"]
    assert expected["steps"] == pytest.approx(len(steps), abs=1)
    for name, source in expected["total"].items():
        drawn = sum(batches[0].tokens_by_source[name] for batches in steps)
        assert source["tokens"] == pytest.approx(drawn, rel=0.05)
        assert source["epochs"] == pytest.approx(1, rel=1e-6)


def test_a_plan_of_amounts_shows_wanted_against_drawn_and_a_run_draws_just_that(tmp_path):
    amounts = {"ids": {"tokens": 3000}, "text": {"epochs": 1.5}}
    path = a_mix_file(tmp_path, version=2, mix={"amounts": amounts})

    expected = json_of("plan", path, "--steps", 500, "--dp", 2, "--cache-dir", tmp_path / "cache")
    taken = a_run(tmp_path / "run", path, dp=2, steps=500)
    shown = json_of("show", tmp_path / "run")
    steps = [batches for batches in taken.values() if batches[0] is not None]

    assert (expected["steps"], expected["steps_error"]) == (len(steps), 0.0)
    assert expected["amounts"]["ids"] == {"tokens": 3000, "expected_tokens": 3000.0}
    drawn = sum(batches[0].tokens_by_source["ids"] for batches in steps)
    assert 3000 <= drawn < 3000 + 64
    epochs = {source["name"]: source["epochs"] for source in shown["sources"]}
    assert epochs["text"] == 1.5
    assert {n: s["epochs"] for n, s in expected["total"].items()} == pytest.approx(epochs, rel=1e-6)
    assert [source["share"] for source in shown["sources"]] == pytest.approx([1, 1], abs=0.03)
    assert not any("mix.stop" in warning for warning in expected["warnings"])
    to_the_end = json_of("plan", path, "--dp", 2, "--cache-dir", tmp_path / "cache")
    assert (to_the_end["ends_early"], expected["ends_early"]) == (False, True)
    for key in ("steps", "total", "amounts", "rehearsed", "warnings"):
        assert to_the_end[key] == expected[key]


JOINED = [{"type": "concat", "tokens": 64}, {"type": "filter", "min_tokens": 64}]
FEW = {"type": "jsonl", "path": "web.jsonl", "where": {"lang": "en"}}


@pytest.mark.parametrize(
    ("source", "amount"),
    [
        (FEW, {"samples": 40}),
        (FEW, {"epochs": 0.3}),
        (FEW | {"dedupe": "content"}, {"epochs": 1}),
        ({"type": "jsonl", "path": "web.jsonl", "transforms": JOINED}, {"samples": 40}),
        ({"type": "jsonl", "path": "web.jsonl", "transforms": JOINED[:1]}, {"epochs": 0.01}),
    ],
)
def test_a_plan_of_a_short_run_with_amounts_has_the_steps_tokens_and_samples_that_it_draws(
    tmp_path, monkeypatch, source, amount
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [
        {"text": f"{i // 2} " * (i % 9 + 1), "lang": "de" if i % 4 else "en"} for i in range(400)
    ]
    (tmp_path / "web.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))
    content = {"version": 2, "seed": 1, "tokenizer": {"type": "bytes"}, "pack": {"length": 64}}
    content |= {"sources": {"web": source}, "mix": {"amounts": {"web": amount}}}
    content |= {"batch": {"tokens": 128, "micro_tokens": 64}}
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(content))
    with omniload.open(path, arrays="numpy") as loader:
        pieces = [batch.pieces() for batch in loader]

    plan = json_of("plan", path)

    samples = {piece.key[:3] for step in pieces for piece in step}
    tokens = sum(len(piece.tokens) for step in pieces for piece in step)
    assert (plan["steps"], plan["steps_error"]) == (len(pieces), 0.0)
    assert plan["total"]["web"]["tokens"] == tokens
    assert plan["total"]["web"]["samples"] == pytest.approx(len(samples))
    assert plan["amounts"]["web"]["expected_tokens"] == pytest.approx(tokens)
    assert run_mix("check", path).exit_code == 0
    if len(pieces) > 1:
        with pytest.raises(ConfigError, match=f"{len(pieces) - 1} steps? draws? "):
            json_of("plan", path, "--steps", len(pieces) - 1)


def test_a_plan_of_weights_by_samples_counts_records_that_give_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [{"text": f"{i:03}", "lang": "de" if i % 4 else "en"} for i in range(400)]
    (tmp_path / "web.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))
    content = {"version": 1, "seed": 1, "tokenizer": {"type": "bytes"}, "pack": {"length": 64}}
    content |= {"sources": {"all": {"type": "jsonl", "path": "web.jsonl"}, "few": FEW}}
    content["mix"] = {"level": "sample", "stages": [{"weights": {"all": 1, "few": 1}}]}
    content["batch"] = {"tokens": 128, "micro_tokens": 64}
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(content))

    total = json_of("plan", path, "--steps", 500)["total"]
    stats = json_of("stats", path, "--steps", 500, "--measure", 0)["sources"]

    # As many samples of each, of the same length: of few, of which each epoch has a quarter, four times the epochs.
    assert [total[name]["share"] for name in ("all", "few")] == pytest.approx([0.5, 0.5])
    assert total["few"]["epochs"] == pytest.approx(4 * total["all"]["epochs"])
    assert stats[1]["epochs"] == pytest.approx(4 * stats[0]["epochs"])


def a_mix_of_very_different_documents(tmp_path, pack, **source):
    """Return a mix file of some 300 steps of two rows: one and three quarters of an epoch of 480 documents."""
    rng = np.random.default_rng(5)
    documents = [[1] * length for length in (rng.lognormal(3.5, 0.8, 480) + 1).astype(int)]
    ids = pa.array(documents, pa.list_(pa.int32()))
    pq.write_table(pa.table({"ids": ids}), tmp_path / "ids.parquet", row_group_size=20)
    ids = {"type": "parquet", "path": "ids.parquet", "tokens": "ids"} | source
    content = {"version": 2, "seed": 1, "sources": {"ids": ids}, "pack": pack}
    content["mix"] = {"amounts": {"ids": {"epochs": 1.75}}}
    content["batch"] = {"tokens": 2 * pack["length"], "micro_tokens": pack["length"]}
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def steps_of(path):
    rehearsal = Rehearsal(open_spec(path, dp=1, cache_dir=None, ahead=1))
    try:
        return sum(1 for _ in rehearsal.plans())
    finally:
        rehearsal.close()


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
@pytest.mark.parametrize("method", ["best_fit", "none"])
def test_a_plan_of_a_short_run_knows_its_steps_and_a_longer_one_says_within_what(
    tmp_path, monkeypatch, method, overlong
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_drawn(tmp_path / "before.arrow", [("ids.parquet", np.arange(0, 480, 3))])
    pack = {"length": 128, "method": method, "overlong": overlong}
    path = a_mix_of_very_different_documents(tmp_path, pack, drawn_before="before.arrow")

    whole, part = json_of("plan", path), json_of("plan", path, "--rehearse", 48)
    told = run_mix("plan", path, "--rehearse", 48).stdout

    steps = steps_of(path)
    assert (whole["steps"], whole["steps_error"], part["ends_early"]) == (steps, 0.0, False)
    assert len(whole["rehearsed"]["steps"]) == steps
    assert 0 < part["steps_error"] < 0.4
    assert abs(part["steps"] / steps - 1) <= 2 * part["steps_error"]
    assert f"expected after {part['steps']:,} steps ±{2 * part['steps_error']:.0%}" in told


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_a_plan_of_a_run_that_is_planned_whole_says_what_was_planned(tmp_path, monkeypatch, stop):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = a_mix_of_very_different_documents(tmp_path, {"length": 128})
    content = yaml.safe_load(path.read_text())
    content["mix"] = {"stages": [{"from_step": 0, "weights": {"ids": 1}}], "stop": stop}
    path.write_text(yaml.safe_dump(content))
    steps = steps_of(path)

    whole, part = json_of("plan", path), json_of("plan", path, "--rehearse", 48)
    longer = json_of("plan", path, "--steps", steps + 9, "--rehearse", steps + 9)
    shorter = run_mix("plan", path, "--steps", 40).stdout

    assert part["steps"] != steps, "lengths of the first documents would say it"
    for each in (longer, json_of("plan", path, "--rehearse", steps + 1)):
        drawn = sum(step["tokens"] for step in each["rehearsed"]["steps"])
        assert (each["steps"], each["steps_error"]) == (steps, 0.0)
        assert len(each["rehearsed"]["steps"]) == steps
        assert each["total"]["ids"]["tokens"] == pytest.approx(drawn, rel=0.01)
        assert each["total"]["ids"]["epochs"] == pytest.approx(1, rel=0.01)
    assert (whole["ends_early"], longer["ends_early"]) == (False, True)
    assert "expected after 40 steps  " in shorter
    assert "all 40 steps, planned" in shorter


def test_a_plan_of_too_few_steps_to_tell_says_that_nobody_knows_within_what_the_run_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = a_mix_of_very_different_documents(tmp_path, {"length": 128})

    expected = json_of("plan", path, "--rehearse", 3)

    assert expected["steps_error"] is None
    told = run_mix("plan", path, "--rehearse", 3).stdout
    assert f"expected after {expected['steps']:,} steps (nobody knows within what)" in told


def test_a_plan_to_the_end_of_a_mix_that_comes_to_none_says_how_far_it_looked(tmp_path):
    stages = [{"from_step": 0, "weights": {"ids": 1, "text": 0}}]
    stages.append({"from_step": 10**9, "weights": {"ids": 1, "text": 1}})
    path = a_mix_file(tmp_path, mix={"stages": stages, "stop": "all_exhausted"})

    result = run_mix("plan", path, "--rehearse", 2, "--cache-dir", tmp_path / "cache")

    assert isinstance(result.exception, ConfigError)
    assert "'all_exhausted' does not end this mix within 1,000,000,000 steps" in str(
        result.exception
    )


def test_a_plan_that_comes_to_more_than_a_group_allows_is_refused_with_the_line(tmp_path):
    path = a_mix_file(tmp_path, version=2)
    content = yaml.safe_load(path.read_text())
    group = {"weight": 1, "max_repetition": 3, "of": {"ids": 1}}
    content["mix"]["stages"][0]["weights"] = {"text": 1, "both": group}
    path.write_text(yaml.safe_dump(content))

    result = run_mix("plan", path, "--steps", 500, "--cache-dir", tmp_path / "cache")

    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "max_rep" in text)
    assert isinstance(result.exception, ConfigError)
    said = f"{path}:{line}: mix.stages.0.weights.both.max_repetition: 500 steps want the records of ids "
    assert said in str(result.exception)


def a_capped_mix(folder, **source):
    path = a_mix_file(folder)
    content = yaml.safe_load(path.read_text())
    content["sources"]["ids"] |= source
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("rehearsed", [2, 500])
def test_a_plan_of_a_run_that_a_cap_ends_is_of_the_steps_before_and_ends_with_the_step(
    tmp_path, rehearsed
):
    path = a_capped_mix(tmp_path, max_repetition=2)
    asked = ("plan", path, "--steps", 500, "--rehearse", rehearsed, "--cache-dir", tmp_path / "c")

    shown, as_json = run_mix(*asked), run_mix(*asked, "--json")

    content = orjson.loads(as_json.stdout)
    step = content["refused"]["step"]
    assert 0 < step < 500
    assert content["steps"] == step
    assert content["total"]["ids"]["epochs"] == pytest.approx(2, rel=0.1)
    # For steps that were not planned, the time within which the fault ends them is unknown.
    within, said = (0.0, "") if rehearsed == 500 else (None, " (nobody knows within what)")
    assert (content["steps_error"], content["refused"]["estimated"]) == (within, rehearsed == 2)
    assert f"expected after {step:,} steps{said}" in shown.stdout
    for result in (shown, as_json):
        assert isinstance(result.exception, ConfigError)
        about = "" if rehearsed == 500 else "about "
        assert re.match(
            rf"the run ends at {about}step {step} of 500: sources\.ids: .* raise max_repetition",
            str(result.exception),
        )
    # Planned to this step, with the same message as in a run.
    if rehearsed == 500:
        assert len(content["rehearsed"]["steps"]) == step
        assert f"step {step} asks for more than 2 times" in content["refused"]["why"]


def test_a_plan_ends_with_the_document_that_a_step_refuses(tmp_path):
    path = a_mix_file(tmp_path)
    content = yaml.safe_load(path.read_text())
    write_texts(tmp_path / "text" / "0.jsonl", ["x" * (900 if i == 90 else 5) for i in range(120)])
    content["sources"]["text"] |= {"overlong": "refuse", "shuffle": {"method": "none"}}
    path.write_text(yaml.safe_dump(content))

    result = run_mix("plan", path, "--steps", 50, "--json", "--cache-dir", tmp_path / "cache")

    content = orjson.loads(result.stdout)
    step = content["refused"]["step"]
    assert step == content["steps"] == len(content["rehearsed"]["steps"]) > 0
    assert isinstance(result.exception, ConfigError)
    assert re.match(
        rf"the run ends at step {step} of 50: sources\.text: step {step} draws .* record 90, 901 tokens",
        str(result.exception),
    )


def test_a_plan_that_is_refused_at_its_first_step_has_no_table(tmp_path):
    path = a_capped_mix(tmp_path, max_repetition=1)
    content = yaml.safe_load(path.read_text())
    content["batch"]["tokens"] = 1 << 20
    path.write_text(yaml.safe_dump(content))

    result = run_mix("plan", path, "--steps", 3, "--cache-dir", tmp_path / "cache")

    assert isinstance(result.exception, ConfigError)
    assert "expected after" not in result.stdout


def test_a_plan_of_too_few_steps_for_its_amounts_is_refused_with_the_line(tmp_path):
    amounts = {"ids": {"tokens": 3000}, "text": {"epochs": 1.5}}
    path = a_mix_file(tmp_path, version=2, mix={"amounts": amounts})

    result = run_mix("plan", path, "--steps", 2, "--cache-dir", tmp_path / "cache")

    lines = path.read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "amounts:" in text)
    assert isinstance(result.exception, ConfigError)
    assert f"{path}:{line}: mix.amounts: 2 steps draw" in str(result.exception)
    assert "ids 3,000 tokens and gets" in str(result.exception)


def test_the_schema_names_every_key():
    schema = orjson.loads(run_mix("schema").stdout)

    assert schema["properties"].keys() == {"include", *MixConfig.model_fields}
    assert schema["$defs"]["PackConfig"]["properties"]["length"]["description"]


def test_a_rehearsal_plans_what_a_run_journals(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path, dp=2, steps=10)
    _, records = read_journal(tmp_path / "run" / "journal.jsonl")
    rehearsal = Rehearsal(open_spec(mix_path, dp=1, cache_dir=None, ahead=1))
    plans = rehearsal.plans()

    found = [next(plans).membership_digest() for _ in records]

    assert found == [record["digest"] for record in records]


def checked(folder, config, *, tokens=None):
    """Check a mix of one source with steps of ``tokens`` tokens."""
    batch = {} if tokens is None else {"batch": {"tokens": tokens, "micro_tokens": 32}}
    path = a_mix_file(folder, **batch)
    mix = yaml.safe_load(path.read_text())
    mix["sources"] = {"web": config}
    mix["mix"]["stages"] = [{"from_step": 0, "weights": {"web": 1}}]
    path.write_text(yaml.safe_dump(mix))
    return run_mix("check", path, "--cache-dir", folder / "cache")


def test_check_decodes_the_first_records_and_names_the_keys_there_are(tmp_path):
    write_texts(tmp_path / "web.jsonl", ["some text"] * 9)

    result = checked(tmp_path, {"type": "jsonl", "path": "web.jsonl", "text": "body"})

    assert isinstance(result.exception, ConfigError)
    message = str(result.exception)
    assert "sources.web: " in message
    assert "web.jsonl:1: has no key 'body'; it has text; correct the type or the key" in message


def test_check_says_of_how_many_files_it_looked_at_records(tmp_path):
    for number in range(12):
        write_texts(tmp_path / f"{number:02}.jsonl", ["some text"] * 9)

    result = checked(tmp_path, {"type": "jsonl", "path": "*.jsonl"})

    assert "looked at the first records of 8 of 12 files" in result.output


def test_check_bears_bad_records_that_are_skipped_unless_all_are(tmp_path):
    lines = {"some.jsonl": ["x", None, "y"], "none.jsonl": [None] * 3}
    results = {}
    for name, texts in lines.items():
        write_texts(tmp_path / name, texts)
        config = {"type": "jsonl", "path": name, "on_error": {"policy": "skip"}}
        results[name] = checked(tmp_path, config)

    assert results["some.jsonl"].exit_code == 0
    told = "".join(results["some.jsonl"].output.split())  # whatever the line breaks
    assert "sources.web:1ofitsfirst3recordsareleftout,ason_errorsays;thefirst:" in told
    assert "some.jsonl:2:hasnokey'text';ithastitle" in told
    assert isinstance(results["none.jsonl"].exception, ConfigError)


@pytest.mark.parametrize(("limit", "is_told"), [("33%", True), ("34%", False), (0, False)])
def test_check_warns_of_a_percentage_of_bad_records_that_is_less_than_one(tmp_path, limit, is_told):
    write_texts(tmp_path / "web.jsonl", ["x", "y", "z"])
    config = {"type": "jsonl", "path": "web.jsonl", "on_error": {"policy": "skip", "limit": limit}}

    result = checked(tmp_path, config)

    assert result.exit_code == 0
    assert ("0 of 3 records) bears none" in " ".join(result.output.split())) is is_told


def test_check_finds_an_archive_that_is_given_as_text(tmp_path):
    with tarfile.open(tmp_path / "docs.tar", "w") as tar:
        tar.add(__file__, "a.py")

    result = checked(tmp_path, {"type": "text", "path": "docs.tar"})

    assert isinstance(result.exception, ConfigError)
    assert "docs.tar: is a tar archive, not text; unpack it" in str(result.exception)


def test_check_says_what_a_glob_takes_that_is_no_data(tmp_path):
    write_texts(tmp_path / "out" / "part-0.jsonl", ["x"] * 9)
    (tmp_path / "out" / "_SUCCESS").touch()
    assert checked(tmp_path, {"type": "jsonl", "path": "out/*"}).exit_code == 0
    (tmp_path / "out" / "x.tmp").touch()

    result = checked(tmp_path, {"type": "jsonl", "path": "out/*"})

    assert isinstance(result.exception, ConfigError)
    assert "takes x.tmp, which this type does not read; end the pattern in a suffix" in str(
        result.exception
    )


def test_check_looks_at_a_bounded_part_of_a_source(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "FIRST_BYTES", 1000)
    (tmp_path / "web.jsonl").write_bytes(b'{"text": "good"}\n' * 500 + b"bad\n")

    result = checked(tmp_path, {"type": "jsonl", "path": "web.jsonl"})

    assert result.exit_code == 0
    (tmp_path / "web.jsonl").write_bytes(b'{"text": "good"}\n' * 50 + b"bad\n" * 500)
    assert ":51: is not JSON" in str(
        checked(tmp_path, {"type": "jsonl", "path": "web.jsonl"}).exception
    )


def test_check_does_not_take_a_source_for_small_whose_first_record_is_longer_than_it_reads(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(jsonl, "FIRST_BYTES", 1000)
    write_texts(tmp_path / "web.jsonl", ["a long word " * 10_000])

    result = checked(tmp_path, {"type": "jsonl", "path": "web.jsonl"}, tokens=32 * 100)

    assert result.exit_code == 0
    assert "a single step goes through" not in result.stdout


def test_check_warns_of_a_step_that_goes_through_a_source_many_times(tmp_path):
    path = a_mix_file(tmp_path, batch={"tokens": 32 * 10_000, "micro_tokens": 32})

    result = run_mix("check", path, "--cache-dir", tmp_path / "cache")

    assert result.exit_code == 0
    assert "warning: a single step goes through text " in result.stdout
    assert "it holds 120 records of about" in result.stdout


def test_check_warns_of_the_memory_that_waiting_rows_take(tmp_path):
    path = a_mix_file(tmp_path, pack={"length": 32, "lookahead_rows": 1 << 20})
    warnings = json_of("check", path, "--cache-dir", tmp_path / "cache")["warnings"]
    assert not any("held ahead" in warning for warning in warnings)
    mix = yaml.safe_load(path.read_text())
    mix["pack"] = {"length": 16_384, "lookahead_rows": 1 << 18}
    mix["batch"] = {"tokens": 16_384, "micro_tokens": 16_384}
    path.write_text(yaml.safe_dump(mix))

    warnings = json_of("check", path, "--cache-dir", tmp_path / "cache")["warnings"]

    assert any("262,148 rows are held ahead, 16 GiB" in warning for warning in warnings)
