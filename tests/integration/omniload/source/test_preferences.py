"""Preference pairs from files to a loss: each side is the result of its tokenizer and template alone."""

import csv
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jinja2 import Environment
from tokenizers import Tokenizer

import omniload
from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged
from omniload.batch.microbatch import CpSlice
from omniload.batch.rows import documents_of
from tests.support.chats import CHATML, write_model
from tests.support.plane.edits.mix_commands import json_of, run_mix

COUNT = 60
MIX = {
    "version": 2,
    "seed": 3,
    "tokenizer": {"type": "bpe", "path": "model", "end_of_document": "<eos>"},
    "mix": {"stages": [{"weights": {"pairs": 1}}], "stop": "each_once"},
    "pack": {"length": 256, "overlong": "drop"},
    "batch": {"tokens": 1024, "micro_tokens": 512},
}
STYLES = ("messages", "prompt text", "whole conversations", "texts", "shared", "shared whole")
NAMES = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}
"""Names of ShareGPT, and of data sets that copied them."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", CHATML)
    return tmp_path


def records(style):
    """Return pairs as their publishers write them."""
    for i in range(COUNT):
        prompt = f"how many are {i} and {i}? " + "think " * (i % 7)
        # A text that ends with a character of several tokens is trained on to the last of them.
        chosen, rejected = (
            f"{2 * i}{' 😀' * (i % 3)}",
            f"{i} und {i} sind {2 * i + 1} " + "oder " * (i % 5),
        )
        asked = [{"role": "user", "content": prompt}]
        sides = [[{"role": "assistant", "content": said}] for said in (chosen, rejected)]
        if style == "texts":
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        elif style == "prompt text":
            yield {"prompt": prompt, "chosen": sides[0][0], "rejected": rejected}
        elif style == "messages":
            yield {"prompt": asked, "chosen": sides[0], "rejected": sides[1]}
        elif style.startswith("shared"):
            human = {"from": "human", "value": prompt}
            chosen, rejected = ({"from": "gpt", "value": said} for said in (chosen, rejected))
            if style == "shared":
                yield {"prompt": [human], "chosen": chosen, "rejected": rejected}
            else:
                yield {"chosen": [human, chosen], "rejected": [human, rejected]}
        else:
            yield {"chosen": asked + sides[0], "rejected": asked + sides[1]}


def alone(style):
    """Return tokens and mask of both sides of each pair, by libraries that are not ours."""
    library = Tokenizer.from_file("model/tokenizer.json")
    template = Environment().from_string(CHATML)
    found = {}
    for plain in records("texts"):
        sides = []
        for said in (plain["chosen"], plain["rejected"]):
            if style == "texts":
                ids = library.encode(plain["prompt"] + said, add_special_tokens=False)
                text, asked, end = (
                    plain["prompt"] + said,
                    plain["prompt"],
                    [library.token_to_id("<eos>")],
                )
            else:
                messages = [{"role": "user", "content": plain["prompt"]}]
                asked = template.render(messages=messages, add_generation_prompt=True)
                text = template.render(messages=[*messages, {"role": "assistant", "content": said}])
                ids, end = library.encode(text, add_special_tokens=False), []
            mask = [stop > len(asked) for _, stop in ids.offsets] + [True] * len(end)
            sides.append((tuple(ids.ids + end), tuple(mask)))
        found[tuple(sides[0][0])] = sides
    return found


def write(kind, style):
    rows = list(records(style))
    if kind == "jsonl":
        lines = (json.dumps({"id": i, **row}) + "\n" for i, row in enumerate(rows))
        Path("pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    elif kind == "csv":
        with Path("pairs.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet", row_group_size=7)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file("pairs.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=9)


def a_mix(kind="jsonl", style="messages", transform=(), **changes):
    pairs = {"type": "preference", **dict(transform)}
    if style == "texts":
        pairs["form"] = "text"
    if "whole" in style:
        pairs["prompt"] = None
    if style.startswith("shared"):
        pairs["messages"] = NAMES
    source = {"type": kind, "path": f"pairs.{kind}", "text": "chosen", "transforms": [pairs]}
    return {**MIX, "sources": {"pairs": source}, **changes}


def sides_of(rows):
    """Return tokens and labels of the documents of each pair, and check that there are no others."""
    bounds, tokens = rows.cu_seqlens, rows.tokens.reshape(-1)
    labels, places = rows.labels.reshape(-1), rows.position_ids.reshape(-1)
    for pair in rows.pairs.tolist():
        found = []
        for document in pair:
            inside = slice(bounds[document], bounds[document + 1])
            assert places[inside].tolist() == list(range(inside.stop - inside.start))
            found.append((tuple(tokens[inside].tolist()), labels[inside].tolist()))
        yield found


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        *(("jsonl", style) for style in STYLES),
        ("csv", "texts"),
        *(("parquet", style) for style in STYLES if style != "prompt text"),
        *(("arrow", style) for style in STYLES if style != "prompt text"),
    ],
)
def test_sides_are_what_other_libraries_make_of_each_alone(folder, kind, style):
    write(kind, style)
    wanted = alone(style)

    with omniload.open(a_mix(kind, style), arrays="numpy") as loader:
        batches = list(loader)

    seen = 0
    for batch in batches:
        whole = list(sides_of(batch))
        assert whole == [pair for part in batch.microbatches for pair in sides_of(part)]
        for sides in whole:
            for (tokens, labels), (ids, mask) in zip(sides, wanted.pop(sides[0][0]), strict=True):
                shifted = [t if m else -100 for t, m in zip(ids[1:], mask[1:], strict=True)]
                assert (tokens, labels) == (ids, [*shifted, -100])
            seen += 1
    assert (seen, wanted) == (COUNT, {})


def test_a_run_goes_on_with_the_same_pairs(folder):
    write("jsonl", "messages")
    with omniload.open(a_mix(), arrays="numpy") as loader:
        taken = [list(sides_of(batch)) for batch in islice(loader, 2)]
        state = loader.state_dict()
        taken += [list(sides_of(batch)) for batch in loader]
    with omniload.open(a_mix(), arrays="numpy", state=state) as loader:
        assert [list(sides_of(batch)) for batch in loader] == taken[2:]
    assert len(taken) > 3


def test_a_loss_of_pairs_is_that_of_sequences_that_nobody_packed(folder):
    write("jsonl", "texts")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(400, 16), torch.nn.Linear(16, 400)).double()
    head = torch.nn.Embedding(
        256, 400
    ).double()  # by place, so positions must begin anew on each side

    def logp(tokens, places, labels):
        scores = torch.log_softmax(model(tokens) + head(places), -1)
        kept = labels != -100
        return torch.where(kept, scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0], 0.0)

    found = []
    with omniload.open(a_mix(style="texts")) as loader:
        for batch in loader:
            each = logp(batch.tokens, batch.position_ids, batch.labels).flatten()
            lengths = batch.cu_seqlens.diff()
            documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            sums = torch.zeros(len(lengths), dtype=each.dtype).index_add(0, documents, each)
            found += [tuple(row) for row in sums[batch.pairs].tolist()]

    wanted = []
    for sides in alone("texts").values():
        pair = []
        for ids, mask in sides:
            labels = torch.tensor(
                [t if m else -100 for t, m in zip(ids[1:], mask[1:], strict=True)]
            )
            pair.append(
                logp(torch.tensor(ids[:-1]), torch.arange(len(ids) - 1), labels).sum().item()
            )
        wanted.append(tuple(pair))
    np.testing.assert_allclose(sorted(found), sorted(wanted), rtol=1e-9)


def test_no_side_predicts_the_first_token_of_the_other(folder):
    # A token that begins with the prompt's last letter also belongs to the answer.
    library = Tokenizer.from_file("model/tokenizer.json")
    word = max(t for t in library.get_vocab() if t.isalpha() and t.isascii() and len(t) > 1)
    assert len(library.encode(word).ids) == 1
    sides = {key: f"{word[1:]} {key}" for key in ("chosen", "rejected")}
    line = json.dumps({"prompt": word[0], **sides})
    Path("pairs.jsonl").write_text(line, encoding="utf-8")

    with omniload.open(a_mix(style="texts"), arrays="numpy") as loader:
        ((chosen, rejected),) = sides_of(next(iter(loader)))

    assert [side[1][-1] for side in (chosen, rejected)] == [-100, -100]
    assert min(chosen[1][:-1] + rejected[1][:-1]) >= 0


def test_losses_are_noted_by_pair(folder):
    write("jsonl", "messages")
    with omniload.open(a_mix(), arrays="numpy") as loader:
        batch = next(iter(loader))
        losses = batch.losses_by_document(np.ones(batch.labels.shape))

    assert len(losses.keys_K4) == len(batch.pairs)
    assert losses.sums_K.tolist() == losses.labels_K.tolist()
    assert losses.labels_K.sum() == (batch.labels != -100).sum()


def test_show_has_the_mean_of_pairs_each_of_which_counts_once(folder):
    """As the loss of DPO is the loss of a pair, whatever the length of its answers."""
    write("jsonl", "messages")
    with omniload.open(a_mix(), arrays="numpy", run_dir="run") as loader:
        batch = next(iter(loader))
        losses = np.arange(len(batch.pairs), dtype=float)
        loader.observe(batch, document_losses=losses)
    lengths = batch.losses_by_document(document_losses=losses).labels_K
    assert losses.mean() != pytest.approx((losses * lengths).sum() / lengths.sum())

    shown = json_of("show", "run")["losses"]["sources"]["pairs"]

    assert shown == {"loss": losses.mean(), "labels": lengths.sum(), "pairs": len(losses)}
    said = run_mix("show", "run").stdout
    assert "losses are means of a pair of step 0" in said
    assert f" {losses.mean():.3f} " in said


def test_a_source_of_pairs_drops_long_ones_beside_text_that_is_split(folder):
    write("jsonl", "messages")
    mix = a_mix(pack={"length": 256, "overlong": "split"})
    pairs = {**mix["sources"]["pairs"], "overlong": "drop"}

    with omniload.open(mix | {"sources": {"pairs": pairs}}, arrays="numpy") as loader:
        assert len(next(iter(loader)).pairs)
    with pytest.raises(ConfigError, match=r"sources\.pairs\.overlong: overlong is truncate, which"):
        omniload.open(mix | {"sources": {"pairs": pairs | {"overlong": "truncate"}}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"pack": {"length": 64, "overlong": "split"}},
            "pack.overlong: overlong is split, which cuts a pair of sources.pairs",
        ),
        (
            {"pack": {"length": 64, "overlong": "drop", "method": "concat_and_split"}},
            "pack.method: method is concat_and_split, which cuts documents anywhere",
        ),
    ],
)
def test_packing_that_cuts_pairs_is_refused(folder, changes, said):
    with pytest.raises(ConfigError, match=said):
        omniload.open(a_mix(**changes))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            {"type": "mds", "text": "chosen"},
            "is of type mds; use jsonl, csv, parquet, arrow or lance",
        ),
        (
            {"transforms": [{"type": "preference"}, {"type": "clamp", "tokens": 9}]},
            "clamp would cut a pair",
        ),
        (
            {"transforms": [{"type": "filter"}, {"type": "preference"}]},
            "preference comes after another",
        ),
        (
            {"transforms": [{"type": "preference", "form": "text", "prompt": None}]},
            "name the key of the prompt",
        ),
    ],
)
def test_sources_that_hold_no_pairs_are_refused(folder, source, said):
    mix = a_mix()
    mix["sources"]["pairs"].update(source)

    with pytest.raises(ConfigError, match=said):
        omniload.open(mix)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no key 'rejected'; it has chosen, prompt"),
        (
            {"prompt": "a", "chosen": "b", "rejected": []},
            "rejected has 0 messages behind a prompt of 1",
        ),
        (
            {"prompt": "a", "chosen": 3, "rejected": "c"},
            "chosen is 3, not a list of messages with role",
        ),
        (
            {"prompt": None, "chosen": "b", "rejected": "c"},
            "prompt is null, not a list of messages",
        ),
        # As JSON escapes it, and as the plain character.
        ({"prompt": "a", "chosen": "b", "rejected": "c\ufdd1"}, "holds a noncharacter"),
        (  # in the format of UltraFeedback
            {
                "prompt": "a",
                "chosen": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ],
                "rejected": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "c"},
                ],
            },
            "chosen begins with what prompt does: it is a whole conversation; write prompt: null",
        ),
    ],
)
def test_a_record_that_is_no_pair_is_told_or_left_out(folder, record, said):
    rows = [*islice(records("messages"), 8), record]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("pairs.jsonl").write_text(lines, encoding="utf-8")
    with (
        pytest.raises(IntegrityError, match=said),
        omniload.open(a_mix(), arrays="numpy") as loader,
    ):
        list(loader)

    mix = a_mix()
    mix["sources"]["pairs"]["on_error"] = {"policy": "skip", "limit": 1}
    with omniload.open(mix, arrays="numpy") as loader:
        assert sum(len(batch.pairs) for batch in loader) == 8


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"role": "assistant", "content": "b"}, "chosen is .*, not a list of messages with from"),
        ({"from": "gpt", "content": "b"}, "chosen: message 0 is .*, not an object with a from"),
        ({"from": "bot", "value": "b"}, "chosen: message 0: from is 'bot', and roles"),
    ],
)
def test_an_answer_of_names_that_the_mix_does_not_say_is_told(folder, chosen, said):
    pair = {"prompt": "a", "chosen": chosen, "rejected": "c"}
    Path("pairs.jsonl").write_text(json.dumps(pair), encoding="utf-8")

    with (
        pytest.raises(IntegrityError, match=said),
        omniload.open(a_mix(style="shared"), arrays="numpy") as loader,
    ):
        list(loader)


def test_names_of_messages_are_refused_beside_texts_which_have_none(folder):
    with pytest.raises(ConfigError, match="messages names keys, and form is text"):
        omniload.open(a_mix(style="texts", transform={"messages": NAMES}))


def test_an_answer_that_a_template_leaves_out_is_told(folder):
    Path("quiet.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [
        *islice(records("messages"), 4),
        {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": ""}]},
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mix = a_mix(transform={"template": "quiet.jinja"})
    with (
        pytest.raises(IntegrityError, match="an answer has no token; both sides of a pair"),
        omniload.open(mix) as loader,
    ):
        list(loader)

    mix["sources"]["pairs"]["on_error"] = {"policy": "skip"}
    with omniload.open(mix, arrays="numpy") as loader:
        assert sum(len(batch.pairs) for batch in loader) == 4


def test_pairs_are_not_shared_among_cp_peers():
    ones, pair = np.ones((1, 4), np.int32), Ragged.of([[2]], np.int32)
    part = CpSlice(
        tokens_RC=ones,
        labels_RC=ones,
        positions_RC=ones,
        indices_C=np.arange(4),
        cu_seqlens=np.array([0, 8], np.int32),
        sources_D=np.zeros(1, np.int16),
        keys_K4=np.zeros((1, 4), np.int64),
        columns_K={"rejected_at": pair},
    )

    with pytest.raises(ConfigError, match=r"shared among cp peers, .*; set cp to 1"):
        documents_of(part)


def test_a_tie_of_whole_conversations_is_told_as_one(folder):
    user = {"role": "user", "content": "a"}
    sides = {key: [user, {"role": "assistant", "content": key}] for key in ("chosen", "rejected")}
    rows = [sides] * 8 + [{"chosen": sides["chosen"], "rejected": sides["chosen"]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("pairs.jsonl").write_text(lines, encoding="utf-8")
    mix = a_mix()
    mix["sources"]["pairs"]["transforms"] = [{"type": "preference", "prompt": None}]

    with (
        pytest.raises(IntegrityError, match="alike to their end, a tie, which prefers nothing"),
        omniload.open(mix, arrays="numpy") as loader,
    ):
        list(loader)
