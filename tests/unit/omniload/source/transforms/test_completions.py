"""Prompts with one answer under keys of their own: the answer is trained on, as of the same conversation."""

import csv
from itertools import chain, product

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.config import BpeTokenizer
from omniload.mix.schema.transforms import (
    ChatTransform,
    CompletionTransform,
    ConcatTransform,
    PreferenceTransform,
)
from omniload.mix.sources import ArrowSource, CsvSource, JsonlSource, MdsSource, ParquetSource
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.token_cache.source_tokens import folder_of_source
from omniload.source.transforms.opening import open_pipeline
from tests.support.chats import CHATML, write_model

END = "<eos>"
BPE = BpeTokenizer(type="bpe", path="model", end_of_document=END)
ENDLESS = BpeTokenizer(type="bpe", path="model")
TABLES = {"jsonl": JsonlSource, "parquet": ParquetSource, "arrow": ArrowSource}
KINDS = TABLES | {"csv": CsvSource}
ALPACA = ("instruction", "input")
NAMES = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completions")
    write_model(folder / "model", CHATML)
    return folder


def write(path, rows):
    """Write rows in the format that the path is named after."""
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_bytes(lines_of(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=3)


def lines_of(rows):
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def a_spec(folder, path, *transforms, text="completion", tokenizer=BPE, policy="raise", **said):
    kind = path.suffix[1:]
    config = KINDS[kind](
        type=kind,
        path=str(path),
        text=text,
        transforms=(CompletionTransform(type="completion", **said), *transforms),
        on_error={"policy": policy},
        shuffle={"method": "none"},
    )
    return SourceSpec("sft", config, seed=1, tokenizer=tokenizer, base_dir=folder)


def samples_of(spec, count):
    """Return tokens and mask of each sample of ``count`` records."""
    block = open_source(spec).read(0, count)
    mask = block.others.get("loss_mask")
    return [
        (block.tokens[i].tolist(), None if mask is None else mask[i].tolist())
        for i in range(len(block.tokens))
    ]


def by_hand(folder, asked, said, *, form="chat", end=(END,)):
    """Return tokens and mask of a prompt and its answer, by the tokenizer's own library."""
    library = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    if form == "chat":
        asked = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        said, end = f"{said}<|im_end|>\n", ()
    found = library.encode(asked + said, add_special_tokens=False)
    mask = [stop > len(asked) for _, stop in found.offsets] + [True] * len(end)
    return found.ids + [library.token_to_id(token) for token in end], mask


PAIRS = [(f"how many are {i} and {i}? ", f"{2 * i} " * (1 + i % 3) + "😀") for i in range(7)]
ROWS = [{"prompt": asked, "completion": answer} for asked, answer in PAIRS]


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        *product(["csv"], ["texts", "written"]),
        *product(TABLES, ["texts", "messages", "message", "other names", "written"]),
    ],
)
def test_prompt_and_answer_are_one_conversation_of_which_the_answer_is_trained_on(
    folder, tmp_path, kind, style
):
    rows, said = [], {"messages": NAMES} if style == "other names" else {}
    for asked, answer in PAIRS:
        role, content = ("from", "value") if said else ("role", "content")
        user = {role: "human" if said else "user", content: asked}
        assistant = {role: "gpt" if said else "assistant", content: answer}
        row = {
            "texts": (asked, answer),
            "message": (user, assistant),
            "written": [orjson.dumps([message]).decode() for message in (user, assistant)],
        }.get(style, ([user], [assistant]))
        rows.append(dict(zip(("prompt", "completion"), row, strict=True)))
    write(tmp_path / f"a.{kind}", rows)

    found = samples_of(a_spec(folder, tmp_path / f"a.{kind}", **said), len(rows))

    assert found == [by_hand(folder, *pair) for pair in PAIRS]


@pytest.mark.parametrize("said", ["[1, 2]", "[]", "[torn", '[{"role": 1}]', '{"role": "user"}'])
def test_a_text_that_looks_like_a_list_and_is_none_of_messages_is_what_somebody_says(
    folder, tmp_path, said
):
    write(tmp_path / "a.csv", [{"prompt": said, "completion": said}])

    assert samples_of(a_spec(folder, tmp_path / "a.csv"), 1) == [by_hand(folder, said, said)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["chat", "text"])
def test_parts_of_a_prompt_that_say_nothing_are_left_out_and_a_blank_line_joins_the_others(
    folder, tmp_path, kind, form
):
    rows = [
        {"instruction": "add", "input": "1 and 2", "output": "3"},
        {"instruction": "greet", "input": "", "output": "hello"},
        {"instruction": "greet", "input": None, "output": "hello you"},
        {"instruction": None, "input": "alone", "output": "yes"},
    ]
    if kind == "csv":
        # Another row is no valid row, so rows are handled as bytes: letters beyond ASCII must stay unchanged.
        rows.append({"instruction": "grüße", "input": 'a "quoted", \n漢 text', "output": "é"})
    if kind == "jsonl":
        rows.append({"instruction": "greet", "output": "a key is missing"})
    write(tmp_path / f"a.{kind}", rows)
    spec = a_spec(folder, tmp_path / f"a.{kind}", text="output", prompt=ALPACA, form=form)

    found = samples_of(spec, len(rows))

    last = 'grüße\n\na "quoted", \n漢 text' if kind == "csv" else "greet"
    prompts = ["add\n\n1 and 2", "greet", "greet", "alone", last]
    assert found == [
        by_hand(folder, asked, row["output"], form=form)
        for asked, row in zip(prompts, rows, strict=False)
    ]


@pytest.mark.parametrize("tokenizer", [BPE, ENDLESS], ids=["with an end", "without"])
def test_texts_are_joined_as_they_are_and_the_end_of_a_document_is_trained_on(
    folder, tmp_path, tokenizer
):
    write(tmp_path / "a.jsonl", ROWS)
    spec = a_spec(folder, tmp_path / "a.jsonl", form="text", tokenizer=tokenizer)

    found = samples_of(spec, len(PAIRS))

    end = (END,) if tokenizer is BPE else ()
    assert found == [by_hand(folder, *pair, form="text", end=end) for pair in PAIRS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_title_and_its_page_are_one_document_and_a_page_without_a_title_is_one(
    folder, tmp_path, kind
):
    rows = [{"title": "Ada", "text": "a page"}, {"title": "", "text": "without"}]
    write(tmp_path / f"a.{kind}", rows)
    said = {"prompt": ("title",), "form": "text", "loss": "all", "between": "\n\n"}

    found = samples_of(a_spec(folder, tmp_path / f"a.{kind}", text="text", **said), 2)

    documents = ["Ada\n\na page", "without"]
    assert found == [(by_hand(folder, "", each, form="text")[0], None) for each in documents]


def test_what_stands_between_is_of_the_prompt(folder, tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    spec = a_spec(folder, tmp_path / "a.jsonl", form="text", between=" -> ")

    assert samples_of(spec, len(PAIRS)) == [
        by_hand(folder, f"{asked} -> ", answer, form="text") for asked, answer in PAIRS
    ]


def test_what_begins_a_document_stands_before_texts_and_is_not_trained_on(folder, tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    library = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    begun = BPE.model_copy(update={"begin_of_document": "<bos>"})

    texts = samples_of(a_spec(folder, tmp_path / "a.jsonl", form="text", tokenizer=begun), 7)
    chats = samples_of(a_spec(folder, tmp_path / "a.jsonl", tokenizer=begun), 7)

    first = library.token_to_id("<bos>")
    plain = [by_hand(folder, *pair, form="text") for pair in PAIRS]
    assert texts == [([first, *tokens], [False, *mask]) for tokens, mask in plain]
    # A template writes its own.
    assert chats == [by_hand(folder, *pair) for pair in PAIRS]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_system_says_comes_before_prompt_and_answer(folder, tmp_path, kind):
    rows = [{**row, "system": "be brief" if i % 2 else ""} for i, row in enumerate(ROWS)]
    if kind == "jsonl":
        del rows[0]["system"]
    write(tmp_path / f"a.{kind}", rows)

    found = samples_of(a_spec(folder, tmp_path / f"a.{kind}", system="system"), len(rows))

    begun = [
        [{"role": "system", "content": "be brief"}] * (i % 2) + [{"role": "user", "content": asked}]
        for i, (asked, _) in enumerate(PAIRS)
    ]
    messages = [
        {"prompt": asked, "completion": answer}
        for asked, (_, answer) in zip(begun, PAIRS, strict=True)
    ]
    write(tmp_path / "b.jsonl", messages)
    assert found == samples_of(a_spec(folder, tmp_path / "b.jsonl"), len(rows))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("prompt", ["prompt", None])
def test_what_the_system_says_comes_before_both_sides_of_a_pair(folder, tmp_path, kind, prompt):
    asked, system = {"role": "user", "content": "?"}, {"role": "system", "content": "be brief"}
    answers = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    ahead = [] if prompt else [asked]
    rows = [{"c": ahead + answers[0], "r": ahead + answers[1], "system": "be brief"}]
    whole = [{"c": [system, *ahead, *answers[0]], "r": [system, *ahead, *answers[1]]}]
    if prompt:
        rows[0]["prompt"] = [asked]
        whole = [{"c": answers[0], "r": answers[1], "prompt": [system, asked]}]
    write(tmp_path / f"a.{kind}", rows)
    write(tmp_path / f"b.{kind}", whole)

    def pair(name, **said):
        config = KINDS[kind](
            type=kind,
            path=f"{tmp_path}/{name}.{kind}",
            text="c",
            transforms=(
                PreferenceTransform(type="preference", rejected="r", prompt=prompt, **said),
            ),
        )
        return samples_of(SourceSpec("p", config, seed=1, tokenizer=BPE, base_dir=folder), 1)

    assert pair("a", system="system") == pair("b")


@pytest.mark.parametrize("form", ["chat", "text"])
def test_with_loss_all_there_is_no_mask_and_the_tokens_stay(folder, tmp_path, form):
    write(tmp_path / "a.jsonl", ROWS)

    found = samples_of(a_spec(folder, tmp_path / "a.jsonl", form=form, loss="all"), len(PAIRS))

    assert found == [(by_hand(folder, *pair, form=form)[0], None) for pair in PAIRS]


@pytest.mark.parametrize(
    ("record", "said", "fault"),
    [
        ({"completion": "b"}, {}, "has no key 'prompt'; it has completion"),
        ({"prompt": "a"}, {}, "has no key 'completion'; it has prompt"),
        ({"prompt": None, "completion": "b"}, {}, "prompt is null, not a list of messages with"),
        ({"prompt": "", "completion": "b"}, {"form": "text"}, 'prompt is "", not a text that says'),
        ({"prompt": "a", "completion": ""}, {"form": "text"}, 'completion is "", not a text that'),
        (
            {"prompt": "a", "completion": ""},
            {},
            'completion is "", not a list of messages with role and content, nor a text that says',
        ),
        ({"prompt": "a", "completion": []}, {}, "completion has 0 messages behind a prompt of 1"),
        ({"prompt": [], "completion": "b"}, {}, "completion has 1 messages behind a prompt of 0"),
        (
            {"completion": "b"},
            {"prompt": ALPACA},
            "instruction and input say nothing; a prompt has",
        ),
        (
            {"input": [3], "completion": "b"},
            {"prompt": ALPACA},
            r"input is \[3\], not a text that says something",
        ),
        ({"prompt": "a", "completion": "b\ufdd1"}, {}, "holds a noncharacter"),
        (
            {
                "prompt": "a",
                "completion": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ],
            },
            {},
            "completion begins with what prompt does: it is a whole conversation; use the transform chat",
        ),
    ],
)
def test_a_record_without_a_prompt_or_an_answer_is_told_or_left_out(
    folder, tmp_path, record, said, fault
):
    good = {"prompt": "a", "instruction": "a", "completion": "b"}
    (tmp_path / "a.jsonl").write_bytes(lines_of([good, record, good]))
    with pytest.raises(IntegrityError, match=fault):
        open_source(a_spec(folder, tmp_path / "a.jsonl", **said)).read(0, 3)

    skipping = open_source(a_spec(folder, tmp_path / "a.jsonl", policy="skip", **said))

    assert len(skipping.read(0, 3).tokens) == 2


@pytest.mark.parametrize("loss", ["answer", "all"])
def test_an_answer_that_the_template_leaves_out_is_told(folder, tmp_path, loss):
    (tmp_path / "quiet.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    silent = {"prompt": "a", "completion": [{"role": "assistant", "content": ""}]}
    write(tmp_path / "a.jsonl", [silent])
    spec = a_spec(folder, tmp_path / "a.jsonl", template=str(tmp_path / "quiet.jinja"), loss=loss)

    with pytest.raises(
        IntegrityError, match="its answer has no token; use a template that writes it"
    ):
        open_source(spec).read(0, 1)


@pytest.mark.parametrize(
    ("source", "said", "fault"),
    [
        ({}, {"prompt": ("a", "b", "a")}, r"prompt is \['a', 'b', 'a'\]; name each key once"),
        ({}, {"prompt": ()}, "at least 1 item"),
        ({}, {"prompt": ""}, "at least 1 character"),
        ({}, {"form": "text", "messages": NAMES}, "messages names keys, and form is text"),
        ({}, {"form": "text", "system": "s"}, "system is 's' and form is text, which has no"),
        ({}, {"system": "prompt"}, r"prompt and system are \['prompt', 'prompt'\]; name each"),
        ({}, {"between": " "}, "between is ' ' and form is chat, where the template says"),
        (
            {"text": "prompt"},
            {},
            "completion reads 'prompt' in addition to the text, but text of the",
        ),
        (
            {"text": "b"},
            {"prompt": ("a", "b")},
            "completion reads 'b' in addition to the text, but text of the source names the same key",
        ),
    ],
)
def test_keys_that_say_no_prompt_beside_an_answer_are_refused(source, said, fault):
    with pytest.raises(ValidationError, match=fault):
        JsonlSource(
            type="jsonl",
            path="a",
            transforms=(CompletionTransform(type="completion", **said),),
            **source,
        )


IMAGES = {"type": "images", "placeholder": 3}


@pytest.mark.parametrize(
    "transforms", [[{"type": "completion"}, IMAGES], [IMAGES, {"type": "completion"}]]
)
def test_images_are_of_chats_alone(transforms):
    said = "completion reads no images; write messages, and use chat with images behind it"

    with pytest.raises(ValidationError, match=said):
        ParquetSource(type="parquet", path="a", text="b", images="c", transforms=transforms)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"a,b,c,d", "has 4 fields, not 3"),
        (b"a,\xff,c", "column 'completion' or 'prompt' is not UTF-8"),
        (b"\xff,a,c", None),
        (b"a,,c", 'prompt is "", not a list of messages with role'),
    ],
)
def test_a_row_of_csv_is_told_by_what_is_wrong_with_either_column(folder, tmp_path, row, said):
    lines = [b"other,prompt,completion", "x,ä,ö".encode(), row, "y,漢,é".encode()]
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines))

    if said is not None:
        with pytest.raises(IntegrityError, match=said):
            open_source(a_spec(folder, tmp_path / "a.csv")).read(0, 3)
    found = samples_of(a_spec(folder, tmp_path / "a.csv", policy="skip"), 3)

    whole = [("ä", "ö"), ("漢", "é")] if said else [("ä", "ö"), ("a", "c"), ("漢", "é")]
    assert found == [by_hand(folder, *pair) for pair in whole]


def test_a_table_or_a_csv_without_the_column_of_the_prompt_is_refused(folder, tmp_path):
    rows = [{"question": "a", "completion": "b"}]
    for kind in ("csv", "parquet", "arrow"):
        write(tmp_path / f"a.{kind}", rows)
        with pytest.raises(ConfigError, match=r"has no column 'prompt'; .*question"):
            open_source(a_spec(folder, tmp_path / f"a.{kind}"))


def test_several_keys_are_read_of_formats_that_have_them():
    with pytest.raises(ValidationError, match="completion reads several keys of a record, and the"):
        MdsSource(
            type="mds", path="a", text="b", transforms=(CompletionTransform(type="completion"),)
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"prompt": "question"}),
        ({"prompt": ALPACA}, {"prompt": ALPACA[::-1]}),
        ({}, {"form": "text"}),
        ({}, {"loss": "all"}),
        ({"form": "text"}, {"form": "text", "between": " "}),
        ({}, {"system": "system"}),
    ],
)
def test_what_is_said_of_prompts_is_a_part_of_the_key_of_a_token_cache(one, other):
    of_run = {"tokenizer": None, "tokenizer_digest": "", "pipeline_digest": "", "seal": "s"}

    def folder(kind, **said):
        config = JsonlSource(type="jsonl", path="a", transforms=(kind(**said),))
        return folder_of_source(config, **of_run)

    names = {
        folder(CompletionTransform, type="completion", **one),
        folder(CompletionTransform, type="completion", **other),
        folder(ChatTransform, type="chat"),
        folder(PreferenceTransform, type="preference"),
    }

    assert len(names) == 4


def test_a_mask_is_joined_and_cut_with_the_tokens(folder, tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    concat = ConcatTransform(type="concat", tokens=16)

    block = open_source(a_spec(folder, tmp_path / "a.jsonl", concat)).read(0, len(PAIRS))

    wanted = [by_hand(folder, *pair) for pair in PAIRS]
    assert block.tokens.values_V.tolist() == [*chain.from_iterable(ids for ids, _ in wanted)]
    assert block.others["loss_mask"].values_V.tolist() == [
        *chain.from_iterable(mask for _, mask in wanted)
    ]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (("instruction", "input"), ""),
        (
            ("instruction", "imput"),
            "none of the first lines has a key 'imput', which prompt of the",
        ),
        ("instruction", ""),
    ],
)
def test_a_part_of_a_prompt_that_no_line_has_is_told_of(tmp_path, prompt, said):
    write(tmp_path / "a.jsonl", [{"instruction": "a", "input": "", "completion": "b"}] * 2)
    spec = a_spec(tmp_path, tmp_path / "a.jsonl", prompt=prompt)

    doubt = open_format(spec).format.doubt()

    assert doubt.startswith(said)
    assert bool(doubt) == bool(said)


@pytest.mark.parametrize(
    ("form", "tokenizer", "warned"),
    [("text", ENDLESS, True), ("text", BPE, False), ("chat", ENDLESS, False)],
)
def test_texts_that_no_token_ends_are_told_of(folder, tmp_path, form, tokenizer, warned):
    write(tmp_path / "a.jsonl", ROWS)
    spec = a_spec(folder, tmp_path / "a.jsonl", form=form, tokenizer=tokenizer)
    records = open_format(spec).format.first_records()

    doubt = open_pipeline(spec).doubt(records, np.arange(2))

    assert doubt.startswith("no token ends its answers, so a model" if warned else "")
    assert bool(doubt) == warned
