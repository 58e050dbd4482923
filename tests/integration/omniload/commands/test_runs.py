"""The verbs of ``omniload mix`` on a run: its progress, the samples of a step, and the proof of them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.actors.status_file import STATUS_NAME
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.client import Client
from omniload.front.opening import open_mix
from omniload.machine.messages import ResizeAsked
from omniload.machine.plans import windows as windows_module
from omniload.mix.config import BalanceConfig, load_mix
from omniload.mix.edits.history import History
from omniload.mix.journal.lines import JournalLine
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.journal.reading import read_journal
from omniload.mix.progress import state_json_at
from omniload.mix.run_record import RUN_RECORD_NAME, write_run_record
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.chats import CHATML, conversations, write_model
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.mix_commands import a_mix_file, a_run, json_of, run_mix


@pytest.fixture
def mix_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return a_mix_file(tmp_path)


def keys_of(batch):
    """Return source, position and first token of every piece of a batch, sorted."""
    keys = np.concatenate([microbatch.keys_K4 for microbatch in batch.microbatches])
    return sorted((key[0], key[1], key[3]) for key in keys.tolist())


def audited(samples, names=("ids", "text")):
    return sorted((names.index(s["source"]), s["position"], s["first_token"]) for s in samples)


def rewrite_line(journal, number, change):
    """Change one line of a journal, and give it and all later lines checksums that fit their new contents."""
    texts = [line.rpartition(b"\t")[0] for line in journal.read_bytes().splitlines()]
    texts[number] = change(texts[number])
    lines, before = [], b""
    for text in texts:
        before = xxhash.xxh64_hexdigest(before + text).encode()
        lines.append(text + b"\t" + before + b"\n")
    journal.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "words",
    ["show", "audit --step 1", "top --once", "doctor", "set a=1", "undo", "skip --steps 1:2"],
)
def test_a_run_that_is_not_there_is_told_in_the_same_words_by_every_verb(tmp_path, words):
    verb, *options = words.split()

    with pytest.raises(
        StateError, match=r"gone: no such folder; give the folder of a run: run_dir"
    ):
        json_of(verb, tmp_path / "gone", *options)


def in_plain_locale(*arguments):
    """Run Python with ASCII names of files; it would change this locale itself unless variables prevent it."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False,
        env={**os.environ, **plain},
        capture_output=True,
        encoding="ascii",
        timeout=120,
    )


@pytest.mark.started_for_real
def test_a_run_in_a_folder_of_other_letters_is_told_of_in_a_plain_locale_too(mix_path, tmp_path):
    run = tmp_path / "pr\u00fcfung-\u65e5\u672c"
    with open_mix(mix_path, arrays="numpy", run_dir=run) as batches:
        batches.next_batch()

    for words in ("show", "audit --step 0", "top --once"):
        verb, *options = words.split()
        done = in_plain_locale("-m", "omniload", "mix", verb, run, *options)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout


@pytest.mark.started_for_real
@pytest.mark.parametrize("folder", ["sys.argv[1]", "'/tmp/pr\\u00fcfung'"])
def test_a_python_that_cannot_name_the_folder_of_a_run_says_how_to_start_it(folder, mix_path):
    asked = f"import sys, omniload; omniload.open(sys.argv[2], run_dir={folder})"

    done = in_plain_locale("-c", asked, mix_path.with_name("pr\u00fcfung"), mix_path)

    assert "ConfigError: run_dir is " in done.stderr
    assert "this Python takes names of files as ascii; start it with PYTHONUTF8=1" in done.stderr


def test_a_folder_of_several_runs_is_refused_with_their_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RUN_RECORD_NAME).touch()

    with pytest.raises(StateError, match=f"there are runs in {tmp_path}/a, {tmp_path}/b; give the"):
        json_of("show", tmp_path)


def test_show_tells_how_far_a_run_is(mix_path, tmp_path):
    batches = a_run(tmp_path / "run", mix_path, steps=12)

    shown = json_of("show", tmp_path / "run")

    assert (shown["first_step"], shown["next_step"]) == (0, 12)
    assert shown["sizes"] == {"dp": 2}
    trained = sum(sum(pair[0].tokens_by_source.values()) for pair in batches.values())
    drawn = sum(source["drawn"] for source in shown["sources"])
    assert drawn == trained + shown["carried_tokens"]
    assert [source["target"] for source in shown["sources"]] == pytest.approx([0.5, 0.5])


def test_show_tells_how_far_ranks_are_where_more_is_planned(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path, steps=12)
    assert "each rank has taken step 11\n" in run_mix("show", tmp_path / "run").stdout
    assert json_of("show", tmp_path / "run")["taken"] == {"rank dp=0": 11, "rank dp=1": 11}
    # The last status of a killed run stays.
    place = tmp_path / "run" / STATUS_NAME
    status = json.loads(place.read_text())
    status |= {"has_ended": False, "written_at": status["written_at"] - 3600}
    for role in status["roles"]:
        if role["name"].startswith("rank"):
            role["figures"]["taken_step"] = {"rank dp=0": 3.0, "rank dp=1": 2.0}[role["name"]]
    place.write_text(json.dumps(status))

    said = " ".join(run_mix("show", tmp_path / "run").stdout.split())

    assert "planned up to step 12" in said
    assert "rank dp=1 has taken step 2, rank dp=0 step 3; last heard of 36" in said


def test_show_tells_of_ranks_that_have_taken_none(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path, steps=0)

    assert "no rank has taken a step\n" in run_mix("show", tmp_path / "run").stdout
    assert json_of("show", tmp_path / "run")["taken"] == {"rank dp=0": None, "rank dp=1": None}


def test_show_of_a_run_that_has_just_gone_on_says_of_which_start_no_rank_has_taken_a_step(
    mix_path, tmp_path
):
    a_run(tmp_path / "run", mix_path, steps=4)
    base, records = read_journal(tmp_path / "run" / JOURNAL_NAME)
    state = state_json_at(History(load_mix(mix_path)[0]), base, records, 4)
    a_run(tmp_path / "run", mix_path, steps=4, state=state)

    said = run_mix("show", tmp_path / "run").stdout

    assert "no rank has taken a step since the run went on, from step 4\n" in said
    assert json_of("show", tmp_path / "run")["started_at"] == 4


def test_show_of_a_run_that_has_ended_names_no_record_that_it_drew_as_the_next_one(tmp_path):
    stages = [{"from_step": 0, "weights": {"ids": 1, "text": 1}}]
    path = a_mix_file(tmp_path, mix={"stages": stages, "stop": "all_exhausted"})
    taken = a_run(tmp_path / "run", path, steps=500)

    shown = json_of("show", tmp_path / "run")["sources"]

    last = [0] * len(shown)
    for batch in filter(None, [batch for batches in taken.values() for batch in batches]):
        for source, position, _ in keys_of(batch):
            last[source] = max(last[source], position)
    assert [source["position"] for source in shown] == [position + 1 for position in last]


def test_audit_of_a_step_that_is_planned_ahead_says_that_no_rank_has_taken_it(mix_path, tmp_path):
    with open_mix(mix_path, run_dir=tmp_path / "run", steps=12) as loader:
        next(iter(loader))
    planned = json_of("show", tmp_path / "run")["next_step"] - 1
    assert planned > 0

    ahead, taken = (json_of("audit", tmp_path / "run", "--step", s) for s in (planned, 0))

    said = f"step {planned} is planned ahead, and not taken by any rank as of the run's last status"
    assert (ahead["warnings"], taken["warnings"]) == ([said], [])
    assert f"warning: {said}\n" in run_mix("audit", tmp_path / "run", "--step", planned).stdout


def test_show_of_a_skip_at_rest_says_that_it_waits_for_the_run_to_go_on(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path, steps=4)
    run_mix("skip", tmp_path / "run", "--steps", "1:2")

    assert (
        "takes effect once the run continues from there" in run_mix("show", tmp_path / "run").stdout
    )
    assert json_of("show", tmp_path / "run")["edits_ahead"] == [1]


def test_show_keeps_every_source_within_one_sample_of_its_target(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path, steps=30)

    for source in json_of("show", tmp_path / "run")["sources"]:
        assert abs(source["drawn"] - source["due"]) <= 90


def test_show_needs_no_source_any_more(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)
    for folder in ("ids", "text"):
        shutil.rmtree(tmp_path / folder)

    result = run_mix("show", tmp_path / "run")

    assert result.exit_code == 0
    assert "planned up to step 12" in result.stdout
    assert "50.000%" in result.stdout


def test_show_of_a_run_whose_journal_is_gone_from_its_store_says_so_and_makes_no_folder(tmp_path):
    path = a_mix_file(tmp_path, runtime={"journal": f"file://{tmp_path}/journals"})
    a_run(tmp_path / "run", path, steps=2)
    shutil.rmtree(tmp_path / "journals")

    with pytest.raises(StateError, match=r"journals/run: no journal where runtime\.journal of the"):
        json_of("show", tmp_path / "run")

    assert not (tmp_path / "journals").exists()


def test_show_of_a_folder_that_is_no_run_is_refused(tmp_path):
    result = run_mix("show", tmp_path)

    assert isinstance(result.exception, StateError)
    assert "give the folder of a run" in str(result.exception)


@pytest.mark.parametrize("step", [0, 5, 11])
def test_audit_names_the_samples_that_each_rank_trained_on(mix_path, tmp_path, step):
    batches = a_run(tmp_path / "run", mix_path, dp=2)

    for rank in (0, 1):
        shown = json_of("audit", tmp_path / "run", "--step", step, "--rank", rank)["samples"]
        assert audited(shown) == keys_of(batches[step][rank])
        assert {sample["dp_rank"] for sample in shown} == {rank}


def test_audit_says_at_which_line_of_its_file_a_document_stands(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)

    shown = json_of("audit", tmp_path / "run", "--step", 3)["samples"]

    texts = [sample for sample in shown if sample["source"] == "text" and not sample["first_token"]]
    for sample in texts:
        line = int(sample["place"].removeprefix("line "))
        record = json.loads(Path(sample["shard"]).read_text().splitlines()[line - 1])
        assert record["text"].startswith(sample["text"].removesuffix("…"))
    assert len({sample["place"] for sample in texts}) > 1
    of_ids = {sample["place"] for sample in shown if sample["source"] == "ids"}
    assert all(re.fullmatch(r"record \d+, counted from 0", place) for place in of_ids)
    table = run_mix("audit", tmp_path / "run", "--step", 3).stdout
    assert "counted from" not in table.partition("records of files are counted from 0, those of")[0]
    assert "of CSV behind the header; lines from 1" in table


def test_audit_of_all_ranks_holds_what_the_ranks_hold(mix_path, tmp_path):
    batches = a_run(tmp_path / "run", mix_path, dp=2)

    shown = json_of("audit", tmp_path / "run", "--step", 7)["samples"]

    assert audited(shown) == sorted(keys_of(batches[7][0]) + keys_of(batches[7][1]))


def test_audit_finds_text(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)
    everything = json_of("audit", tmp_path / "run", "--step", 3)["samples"]
    wanted = next(sample for sample in everything if sample["source"] == "text")
    words = wanted["text"].split(" ")[0] + " x"

    found = json_of("audit", tmp_path / "run", "--step", 3, "--grep", words)["samples"]

    assert wanted in found
    assert len(found) < len(everything)
    assert all(words in sample["text"] for sample in found)


def test_audit_finds_the_special_tokens_of_conversations(tmp_path):
    write_model(tmp_path, CHATML)
    lines = [json.dumps({"messages": messages}) for messages in conversations(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    path = tmp_path / "mix.yaml"
    path.write_text("""
version: 1
seed: 1
tokenizer: {type: bpe, path: tokenizer.json}
sources: {sft: {type: jsonl, path: chats.jsonl, text: messages, transforms: [{type: chat}]}}
mix: {stages: [{weights: {sft: 1}}]}
pack: {length: 256}
batch: {tokens: 2048, micro_tokens: 1024}
""")
    a_run(tmp_path / "run", path)

    def found(words):
        samples = json_of("audit", tmp_path / "run", "--step", 3, "--grep", words)["samples"]
        return {(sample["position"], sample["first_token"]) for sample in samples}

    assert found("<|im_start|>system") == found("be brief")
    assert 0 < len(found("be brief")) < len(found("<|im_end|>"))


def test_audit_that_finds_nothing_says_so(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)

    result = run_mix("audit", tmp_path / "run", "--step", 3, "--grep", "no such words")

    assert result.exit_code == 0
    looked_at = len(json_of("audit", tmp_path / "run", "--step", 3)["samples"])
    said = f"as journaled: 0 of {looked_at} samples or pieces of samples contain 'no such words'"
    assert said in " ".join(result.stdout.split())
    assert "microbatch" not in result.stdout  # no empty table


def test_audit_answers_for_the_mix_as_it_was_though_the_file_was_edited(mix_path, tmp_path):
    batches = a_run(tmp_path / "run", mix_path, dp=2)
    mix_path.write_text("version: 1\n", encoding="utf-8")

    shown = json_of("audit", tmp_path / "run", "--step", 4, "--rank", 1)["samples"]

    assert audited(shown) == keys_of(batches[4][1])


def test_audit_warns_of_ranks_where_an_earlier_release_dealt_the_step(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path, dp=2)
    asked = ("audit", tmp_path / "run", "--step", 4)
    assert json_of(*asked)["warnings"] == []
    assert "warning:" not in run_mix(*asked).output

    path = tmp_path / "run" / RUN_RECORD_NAME
    record = json.loads(path.read_bytes())
    del record["lives"][0]["placement"]
    path.write_text(json.dumps(record), encoding="utf-8")

    (warning,) = json_of(*asked)["warnings"]
    assert "placed rows in another way" in warning
    assert "warning: the release that dealt this step" in run_mix(*asked).output


def test_audit_answers_with_the_ranks_that_trained_the_step(mix_path, tmp_path):
    batches = a_run(tmp_path / "run", mix_path, dp=2)
    write_run_record(tmp_path / "run", mix_path, {"dp": 4}, from_step=12)

    shown = json_of("audit", tmp_path / "run", "--step", 11)["samples"]

    assert {sample["dp_rank"] for sample in shown} == {0, 1}
    assert audited(shown) == sorted(keys_of(batches[11][0]) + keys_of(batches[11][1]))


def test_audit_answers_with_the_ranks_of_a_step_though_they_changed_in_the_run(mix_path, tmp_path):
    mix, base_dir = load_mix(mix_path)
    elastic = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"elastic": True})})
    run, tree = tmp_path / "run", ClientPlaceTree.of(dp=1)
    write_run_record(run, mix_path, {"dp": 1})
    with LocalPlane(PlaneSpec(mix=elastic, base_dir=base_dir, tree=tree, run_dir=run)) as plane:
        first = Client(plane.handle(0))
        as_run = [[keys_of(first.next_batch())] for _ in range(3)]
        first.resize(0, 2)
        both = [first, Client(plane.handle(1, 0, ResizeAsked(dp=2, step=3)))]
        as_run += [[keys_of(client.next_batch()) for client in both] for _ in range(3)]

    for step, of_ranks in enumerate(as_run):
        for rank, keys in enumerate(of_ranks):
            shown = json_of("audit", run, "--step", step, "--rank", rank)["samples"]
            assert audited(shown) == keys


def test_audit_deals_rows_as_the_run_did_though_its_file_does_not_say_how(mix_path, tmp_path):
    mix, base_dir = load_mix(mix_path)
    balance = BalanceConfig(method="none" if mix.balance.method != "none" else "greedy_swap")
    write_run_record(tmp_path / "run", mix_path, {"dp": 2}, balance=balance)
    spec = PlaneSpec(
        mix=mix.model_copy(update={"balance": balance}),
        base_dir=base_dir,
        tree=ClientPlaceTree.of(dp=2),
        run_dir=tmp_path / "run",
        num_steps=8,
    )
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in (0, 1)]
        as_run = [[keys_of(client.next_batch()) for client in clients] for _ in range(8)]

    def audited_ranks():
        asked = [[("--step", step, "--rank", rank) for rank in (0, 1)] for step in range(8)]
        return [
            [audited(json_of("audit", tmp_path / "run", *each)["samples"]) for each in pair]
            for pair in asked
        ]

    assert audited_ranks() == as_run
    write_run_record(tmp_path / "run", mix_path, {"dp": 2})
    assert audited_ranks() != as_run


def test_audit_refuses_a_plan_that_is_not_the_journaled_one(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)
    rewrite_line(
        tmp_path / "run" / JOURNAL_NAME,
        5,
        lambda text: text.replace(b'"digest":"', b'"digest":"0000'),
    )

    result = run_mix("audit", tmp_path / "run", "--step", 4)

    assert isinstance(result.exception, IntegrityError)
    assert "not the samples that were trained on" in str(result.exception)


def test_audit_refuses_text_that_changed_in_length(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)
    write_texts(tmp_path / "text" / "0.jsonl", [f"{i} other" for i in range(120)])

    result = run_mix("audit", tmp_path / "run", "--step", 4)

    assert isinstance(result.exception, IntegrityError | StateError)


def test_audit_refuses_data_with_other_records(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)
    write_texts(tmp_path / "text" / "0.jsonl", ["one more"] * 121)

    result = run_mix("audit", tmp_path / "run", "--step", 4)

    assert isinstance(result.exception, StateError)
    assert "sources.text.records" in str(result.exception)


@pytest.mark.parametrize(
    "arguments", [("show",), ("audit", "--step", 10), ("drawn", "--step", 10, "-o", "drawn")]
)
def test_a_verb_takes_in_no_record_of_a_step_before_the_last_base(
    mix_path, tmp_path, monkeypatch, arguments
):
    monkeypatch.setattr(windows_module, "_BASE_EVERY", 4)
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run", mix_path, dp=1)
    taken, parse = [], JournalLine.parsed
    monkeypatch.setattr(
        JournalLine, "parsed", lambda line: taken.append(line.text[:9]) or parse(line)
    )
    verb, *options = arguments

    result = run_mix(verb, tmp_path / "run", *options)

    assert result.exit_code == 0, result.output
    steps = [int(text[8:]) for text in taken if text.startswith(b'{"step":')]
    # Steps 10 and 11 begin with the same nine bytes.
    assert steps == ([8, 9, 1, 1] if verb == "show" else [8, 9, 1])


def test_audit_refuses_a_damaged_journal(mix_path, tmp_path):
    a_run(tmp_path / "run", mix_path)
    journal = tmp_path / "run" / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes().replace(b'"step":3', b'"step":4', 1))

    result = run_mix("audit", tmp_path / "run", "--step", 2)

    assert isinstance(result.exception, IntegrityError)
    assert "checksum" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "kind", "reason"),
    [
        (("--step", 12), StateError, "holds 12 steps from step 0, step 12 is not among them"),
        (
            ("--step", 3, "--rank", 2),
            ConfigError,
            "--rank 2: step 3 had data-parallel ranks 0 to 1; give one of them",
        ),
    ],
)
def test_audit_outside_the_run_is_refused(mix_path, tmp_path, arguments, kind, reason):
    a_run(tmp_path / "run", mix_path, dp=2)

    result = run_mix("audit", tmp_path / "run", *arguments)

    assert isinstance(result.exception, kind)
    assert reason in str(result.exception)


def test_a_run_of_a_mix_in_no_file_is_audited_wherever_its_folder_is_moved(
    mix_path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mix, _ = load_mix(mix_path)
    mix_path.unlink()
    with open_mix(mix.model_dump(mode="json"), run_dir="run", steps=3, arrays="numpy") as loader:
        for _ in loader:
            pass
    told = json_of("audit", tmp_path / "run", "--step", 2)["samples"]
    (tmp_path / "archive").mkdir()
    monkeypatch.chdir(tmp_path / "archive")

    alone = (tmp_path / "run").rename(tmp_path / "archive" / "run")

    assert json_of("audit", alone, "--step", 2)["samples"] == told
    assert json_of("show", alone)["next_step"] == 3
