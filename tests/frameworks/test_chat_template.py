"""Chat data against ``transformers``: the same token ids and the same mask as ``apply_chat_template``.

Blocks within macros are left out here: it counts their text from where the macro is called.
"""

import json

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from omniload.mix.config import BpeTokenizer
from omniload.mix.schema.transforms import ChatTransform, CompletionTransform, PreferenceTransform
from omniload.mix.sources import JsonlSource, ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.chats import MARKED, conversations, write_model
from tests.support.examples import few

LLAMA = (
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'assistant' %}"
    "{{- '<|im_start|>assistant\n\n' }}{%- generation %}{{- message['content'] }}{{- '<|im_end|>' }}"
    "{%- endgeneration %}{%- else %}"
    "{{- '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
)
CONTROLS = (
    "{% for m in messages %}{% if loop.index0 > 5 %}{% break %}{% endif %}<|im_start|>{{ m.role }}: "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}[{{ m | tojson }}]{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [MARKED, LLAMA, CONTROLS], ids=["marked", "llama", "controls"])
def test_tokens_and_masks_are_those_of_apply_chat_template(tmp_path, template):
    chats = conversations(60, turns=4)
    write_model(tmp_path / "model", template)
    (tmp_path / "a.jsonl").write_bytes(
        b"".join(orjson.dumps({"messages": chat}) + b"\n" for chat in chats)
    )
    config = JsonlSource(
        type="jsonl",
        path="a.jsonl",
        text="messages",
        transforms=(ChatTransform(type="chat"),),
        shuffle={"method": "none"},
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")
    source = open_source(SourceSpec("sft", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path))

    block = source.read(0, len(chats))

    require_theirs(block, chats, tmp_path / "model")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_conversation_of_other_names_is_one_that_was_renamed_by_hand(tmp_path, kind):
    chats = conversations(60, turns=4)
    write_model(tmp_path / "model", LLAMA)
    said = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [
        [{"from": said[each["role"]], "value": each["content"]} for each in chat] for chat in chats
    ]
    lines = b"".join(orjson.dumps({"conversations": chat}) + b"\n" for chat in shared)
    (tmp_path / "a.jsonl").write_bytes(lines)
    pq.write_table(pa.table({"conversations": shared}), tmp_path / "a.parquet")
    names = {"role": "from", "content": "value", "roles": {of: role for role, of in said.items()}}
    config = (JsonlSource if kind == "jsonl" else ParquetSource)(
        type=kind,
        path=f"a.{kind}",
        text="conversations",
        transforms=(ChatTransform(type="chat", messages=names),),
        shuffle={"method": "none"},
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")
    source = open_source(SourceSpec("sft", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path))

    block = source.read(0, len(chats))

    require_theirs(block, chats, tmp_path / "model")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tools_beside_the_messages_are_those_of_apply_chat_template(tmp_path, kind):
    chats = conversations(20, turns=4)
    write_model(tmp_path / "model", MARKED)
    tools = [
        {"type": "function", "function": {"name": "<zażółć>", "parameters": {"type": "object"}}}
    ]
    rows = [{"messages": chat, "functions": json.dumps(tools)} for chat in chats]
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = (JsonlSource if kind == "jsonl" else ParquetSource)(
        type=kind,
        path=f"a.{kind}",
        text="messages",
        transforms=(ChatTransform(type="chat", tools="functions"),),
        shuffle={"method": "none"},
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")

    source = open_source(SourceSpec("sft", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path))

    require_theirs(source.read(0, len(chats)), chats, tmp_path / "model", tools=tools)


def test_pairs_of_other_names_are_two_conversations_that_were_renamed_by_hand(tmp_path):
    write_model(tmp_path / "model", LLAMA)
    asked = [{"role": "user", "content": f"why {'so ' * (i % 5)}{i}?"} for i in range(40)]
    answers = [[f"since {i}", f"who knows {i}"] for i in range(40)]
    human = [{"from": "human", "value": each["content"]} for each in asked]
    lines = [
        orjson.dumps(
            {
                "conversations": [prompt],
                "chosen": {"from": "gpt", "value": chosen},
                "rejected": [{"from": "gpt", "value": rejected}],
            }
        )
        for prompt, (chosen, rejected) in zip(human, answers, strict=True)
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    names = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}
    pairs = PreferenceTransform(type="preference", prompt="conversations", messages=names)
    config = JsonlSource(
        type="jsonl",
        path="a.jsonl",
        text="chosen",
        transforms=(pairs,),
        shuffle={"method": "none"},
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")

    block = open_source(
        SourceSpec("sft", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path)
    ).read(0, 40)

    theirs = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(
        [
            [prompt, {"role": "assistant", "content": said}]
            for prompt, both in zip(asked, answers, strict=True)
            for said in both
        ],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    for i in range(40):
        ids, masks = (theirs[key][2 * i : 2 * i + 2] for key in ("input_ids", "assistant_masks"))
        assert block.tokens[i].tolist() == ids[0] + ids[1]
        assert block.others["loss_mask"][i].astype(int).tolist() == masks[0] + masks[1]
        assert block.others["rejected_at"][i].tolist() == [len(ids[0])]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("style", ["messages", "alpaca"])
def test_prompts_with_an_answer_are_conversations_of_which_theirs_is_that_of_the_last_turn(
    tmp_path, kind, style
):
    write_model(tmp_path / "model", LLAMA)
    chats = [
        [
            {"role": "system", "content": f"be {i}"},
            {"role": "user", "content": f"why {'so ' * (i % 5)}{i}?"},
            {"role": "assistant", "content": f"since {i}"},
        ]
        for i in range(40)
    ]
    rows = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]
    said, text = {}, "completion"
    if style == "alpaca":
        said, text = {"prompt": ("instruction", "input")}, "output"
        chats = [chat[1:] for chat in chats]
        rows = [
            {"instruction": asked["content"], "input": None, "output": answer["content"]}
            for asked, answer in chats
        ]
        for i in range(0, 40, 2):
            rows[i]["input"] = f"of {i}"
            chats[i][0]["content"] += f"\n\nof {i}"
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = (JsonlSource if kind == "jsonl" else ParquetSource)(
        type=kind,
        path=f"a.{kind}",
        text=text,
        transforms=(CompletionTransform(type="completion", **said),),
        shuffle={"method": "none"},
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")

    source = open_source(SourceSpec("sft", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path))

    block = source.read(0, 40)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    for i, chat in enumerate(chats):
        # As TRL masks what it calls prompt and completion: what a prompt for an answer comes to is read.
        asked = theirs.apply_chat_template(chat[:-1], add_generation_prompt=True)["input_ids"]
        whole = theirs.apply_chat_template(chat)["input_ids"]
        assert whole[: len(asked)] == asked
        assert block.tokens[i].tolist() == whole
        assert block.others["loss_mask"][i].tolist() == [
            place >= len(asked) for place in range(len(whole))
        ]


def require_theirs(block, chats, model, tools=None):
    """Hold samples against what ``transformers`` makes of conversations in the form that it knows."""
    theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(
        chats, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for i, (ids, mask) in enumerate(
        zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
    ):
        assert block.tokens[i].tolist() == ids
        assert block.others["loss_mask"][i].astype(int).tolist() == mask
    assert np.any([any(mask) for mask in theirs["assistant_masks"]])


letters = st.sampled_from(
    ["a", "b", " ", "\n", "é", "e\u0301", "漢", "\U0001f600", "<|im_end|>", "{{", "<b>"]
)
texts = st.lists(letters, max_size=6).map("".join)
arguments = st.dictionaries(st.sampled_from(["x", "é", "n"]), texts | st.none(), min_size=1)
calls = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": texts, "arguments": arguments}),
    }
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"])},
    optional={
        "content": texts | st.none(),
        "reasoning_content": texts | st.none(),
        "reasoning": texts | st.none(),
        "thinking": texts | st.none(),
        "tool_calls": st.lists(calls, max_size=2) | st.none(),
        "id": st.integers(-(1 << 63), (1 << 63) - 1) | st.none(),
        "weight": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
    },
)
tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": texts})}
    ),
    min_size=1,
    max_size=2,
)
rows = st.fixed_dictionaries(
    {"messages": st.lists(messages, min_size=1, max_size=5), "tools": tools | st.none()}
)
SAID = [
    "{{ m.content }}",
    "{{- m['content'] | trim -}}",
    "{{ m | tojson }}",
    "{{ m.content or 'none' }}",
]
THOUGHT = [
    "",
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}",
    "{%- if m.thinking %}\n<think>\n{{ m.thinking }}\n{% endif -%}",
]
CALLED = [
    "",
    "{% for call in m.tool_calls %}<tool>{{ call | tojson }}</tool>\n{% endfor %}",
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}",
]


@st.composite
def templates(draw):
    """Return a template with a block for all that the assistant does, or one for each thing."""

    def tag(word):
        return "{%" + draw(dashes) + f" {word} " + draw(dashes) + "%}" + draw(blanks)

    def block(inside):
        # Never empty: of such the library marks a token that lies across both of its ends.
        return tag("generation") + inside + draw(ends) + tag("endgeneration")

    dashes, blanks = st.sampled_from(["", "", "-"]), st.sampled_from(["", "\n", " \n  "])
    ends = st.sampled_from([".", "<|im_end|>", "é<eos>"])
    done = [draw(st.sampled_from(each)) for each in (THOUGHT, SAID, CALLED)]
    answer = block("".join(done)) if draw(st.booleans()) else "".join(map(block, done))
    return (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        + tag("if m.role == 'assistant'")
        + answer
        + tag("else")
        + "<|im_start|>{{ m.role }}"
        + draw(blanks)
        + draw(st.sampled_from(SAID))
        + tag("endif")
        + tag("endfor")
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model", MARKED)
    return folder, AutoTokenizer.from_pretrained(folder / "model")


@given(
    drawn=st.lists(rows, min_size=1, max_size=4),
    template=templates(),
    kind=st.sampled_from(["jsonl", "parquet"]),
)
@settings(few(40, soak=1000), suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_said_and_however_it_is_written_tokens_and_masks_are_theirs(
    model, drawn, template, kind
):
    folder, theirs = model
    (folder / "any.jinja").write_text(template)
    if kind == "jsonl":
        (folder / "any.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    else:
        # What one message lacks and another has, a table fills with nulls.
        table = pa.Table.from_pylist(drawn)
        pq.write_table(table, folder / "any.parquet")
        drawn = table.to_pylist()
    config = (JsonlSource if kind == "jsonl" else ParquetSource)(
        type=kind,
        path=f"any.{kind}",
        text="messages",
        transforms=(ChatTransform(type="chat", template="any.jinja", tools="tools"),),
        shuffle={"method": "none"},
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")

    source = open_source(SourceSpec("sft", config, seed=0, tokenizer=tokenizer, base_dir=folder))

    block = source.read(0, len(drawn))
    for i, row in enumerate(drawn):
        expected = theirs.apply_chat_template(
            row["messages"],
            tools=row["tools"],
            chat_template=template,
            return_assistant_tokens_mask=True,
        )
        assert block.tokens[i].tolist() == expected["input_ids"]
        assert block.others["loss_mask"][i].astype(int).tolist() == expected["assistant_masks"]
