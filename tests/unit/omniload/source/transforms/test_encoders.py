"""Conversations to tokens and masks: answers of the assistant are trained on, the rest is only read."""

import io
import json
import sys
import tarfile

import jinja2
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.columns import LOSS_SPANS
from omniload.mix.config import BpeTokenizer, ByteTokenizer
from omniload.mix.schema.messages import MessageNames
from omniload.mix.schema.transforms import ChatTransform, ClampTransform, FilterTransform
from omniload.mix.sources import (
    ArrowSource,
    JsonlSource,
    OnError,
    ParquetSource,
    WebDatasetSource,
)
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.tokenize import open_tokenizer
from omniload.source.transforms import chat_sandbox
from omniload.source.transforms.chat_template import ChatTemplate, read_template
from omniload.source.transforms.conversations import named
from tests.support.chats import CHATML, MARKED, conversations, write_model

BPE = BpeTokenizer(type="bpe", path="model")
CHAT = ChatTransform(type="chat")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, template in (("plain", CHATML), ("marked", MARKED)):
        write_model(folder / name / "model", template)
    return folder


def a_source(folder, records, *, tokenizer=BPE, transforms=(CHAT,), policy="raise"):
    lines = b"".join(orjson.dumps({"messages": record}) + b"\n" for record in records)
    (folder / "chat.jsonl").write_bytes(lines)
    config = JsonlSource(
        type="jsonl",
        path="chat.jsonl",
        text="messages",
        transforms=transforms,
        on_error=OnError(policy=policy),
        shuffle={"method": "none"},
    )
    return open_source(SourceSpec("sft", config, seed=1, tokenizer=tokenizer, base_dir=folder))


def library_in(folder):
    return Tokenizer.from_file(str(folder / "model/tokenizer.json"))


def trained_on(source, tokenizer, count):
    """Return the text of each sample that is trained on, special tokens too."""
    block = source.read(0, count)
    return [
        tokenizer.decode(
            block.tokens[i][block.others["loss_mask"][i]].tolist(), skip_special_tokens=False
        )
        for i in range(len(block.tokens))
    ]


def said(messages, *, trimmed):
    texts = [m["content"] for m in messages if m["role"] == "assistant"]
    return "".join(f"{t.strip() if trimmed else t}<|im_end|>\n" for t in texts)


@pytest.mark.parametrize("style", ["plain", "marked"])
def test_what_the_assistant_says_is_trained_on_and_nothing_else(models, style):
    folder, chats = models / style, conversations(12)

    found = trained_on(a_source(folder, chats), library_in(folder), 12)

    assert found == [said(chat, trimmed=style == "marked") for chat in chats]


LAST = ChatTransform(type="chat", loss="last")


@pytest.mark.parametrize("style", ["plain", "marked"])
def test_the_last_turn_alone_is_trained_on_with_its_calls_of_tools(models, style):
    folder, chats = models / style, conversations(6)
    used = [
        {"role": "assistant", "content": "I look"},
        {"role": "tool", "content": "nothing"},
        {"role": "assistant", "content": "nothing there"},
    ]
    chats += [[*chats[1], {"role": "user", "content": "and there?"}, *used]]
    chats += [[*chats[1], {"role": "user", "content": "are you there?"}], used]

    found = trained_on(a_source(folder, chats, transforms=(LAST,)), library_in(folder), 9)

    trimmed = style == "marked"
    assert any(chat[-2] != chat[1] for chat in chats[:6]), "one has several turns"
    assert found == [
        *(said(chat[-1:], trimmed=trimmed) for chat in chats[:6]),
        said(used, trimmed=trimmed),
        "",
        said(used, trimmed=trimmed),
    ]


@pytest.mark.parametrize("mark", ["generation", "if true"])
def test_a_last_turn_is_found_where_thoughts_of_earlier_turns_are_left_out(tmp_path, mark):
    end = "endgeneration" if mark == "generation" else "endif"
    write_model(
        tmp_path / "model",
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% MARK %}"
        "{% if loop.last %}{{ m.thinking }}, {% endif %}{{ m.content }}\n{% END %}"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% else %}the end{% endif %}".replace(
            "MARK", mark
        ).replace("END", end),
    )
    turns = [
        [
            {"role": "user", "content": f"{i}?"},
            {"role": "assistant", "thinking": f"hm {i}", "content": f"{i}"},
        ]
        for i in range(2)
    ]

    found = trained_on(
        a_source(tmp_path, [turns[0] + turns[1]], transforms=(LAST,)), library_in(tmp_path), 1
    )

    assert found == ["hm 1, 1\n" + "the end" * (mark != "generation")]


def test_bytes_are_masked_at_the_same_characters(models):
    folder, chats = models / "marked", conversations(6)
    chat = ChatTransform(type="chat", template="model/plain.jinja")
    (folder / "model/plain.jinja").write_text(CHATML)

    source = a_source(folder, chats, tokenizer=ByteTokenizer(type="bytes"), transforms=(chat,))
    block = source.read(0, 6)

    found = [
        bytes(block.tokens[i][block.others["loss_mask"][i]].astype(np.uint8)).decode()
        for i in range(6)
    ]
    assert found == [said(chat, trimmed=False) for chat in chats]


def test_with_loss_all_there_is_no_mask_and_the_text_is_the_templates(models):
    folder, chats = models / "plain", conversations(3)
    everything = ChatTransform(type="chat", loss="all")

    block = a_source(folder, chats, transforms=(everything,)).read(0, 3)

    assert block.others == {}
    text = library_in(folder).decode(block.tokens[0].tolist(), skip_special_tokens=False)
    parts = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chats[0])
    assert text == "".join(parts)


def test_nested_columns_of_a_table_are_conversations_too(models):
    folder, chats = models / "plain", conversations(5)
    pq.write_table(pa.table({"messages": chats}), folder / "chat.parquet")
    config = ParquetSource(
        type="parquet",
        path="chat.parquet",
        text="messages",
        transforms=(CHAT,),
        shuffle={"method": "none"},
    )

    source = open_source(SourceSpec("sft", config, seed=1, tokenizer=BPE, base_dir=folder))

    found = trained_on(source, library_in(folder), 5)
    assert found == [said(chat, trimmed=False) for chat in chats]


NAMES = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}
SHARED = [{"from": "human", "value": "how?"}, {"from": "gpt", "value": "so"}]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (
            [*SHARED, {"from": "tool", "value": "x"}],
            "message 2: from is 'tool', and roles of the transform names human, gpt; say there what",
        ),
        ([{"from": "user", "value": "x"}], "message 0: from is 'user', and roles"),
        (conversations(1)[0], "message 0 is .*, not an object with a from and value; messages of"),
        ([*SHARED, {"from": "gpt"}], "message 2 is .*, not an object with a from and value"),
        ([*SHARED, {"from": None, "value": "x"}], "message 2 is .*, not an object with a from"),
        ("no json", "holds the text 'no json', not a list of messages with from and value"),
    ],
)
def test_a_message_of_names_that_the_mix_does_not_say_makes_a_bad_record(models, record, fault):
    chat = ChatTransform(type="chat", messages=NAMES)
    records = [SHARED, record, SHARED]

    with pytest.raises(IntegrityError, match=f"jsonl:2: .*{fault}.*; fix it, or"):
        a_source(models / "plain", records, transforms=(chat,)).read(0, 3)
    block = a_source(models / "plain", records, transforms=(chat,), policy="skip").read(0, 3)

    assert (len(block.tokens), block.skipped) == (2, 1)


def test_roles_that_are_not_named_are_those_of_the_template(models):
    chats = conversations(4)
    valued = [[{"role": m["role"], "value": m["content"]} for m in chat] for chat in chats]
    chat = ChatTransform(type="chat", messages={"content": "value"})

    found = trained_on(
        a_source(models / "plain", valued, transforms=(chat,)), library_in(models / "plain"), 4
    )

    assert found == [said(chat, trimmed=False) for chat in chats]


def test_a_call_of_a_tool_needs_no_content_by_its_own_name(models):
    folder, call = models / "plain", {"tool_calls": [{"name": "look"}]}
    chat = ChatTransform(type="chat", messages={"role": "from"})
    plain = [[{"role": "user", "content": "when?"}, {"role": "assistant", **call}]]
    named = [[{"from": "user", "content": "when?"}, {"from": "assistant", **call}]]

    expected = a_source(folder, plain).read(0, 1)

    block = a_source(folder, named, transforms=(chat,)).read(0, 1)
    assert block.tokens[0].tolist() == expected.tokens[0].tolist()


def test_one_key_is_not_role_and_content():
    with pytest.raises(ValidationError, match="role and content are both 'content'; name two keys"):
        ChatTransform(type="chat", messages={"role": "content"})


def test_samples_do_not_depend_on_how_they_are_read_together(models):
    source = a_source(models / "marked", conversations(10))

    whole = source.read(0, 20)

    for start in range(0, 20, 3):
        part = source.read(start, min(start + 3, 20))
        for i, position in enumerate(part.table.positions_N.tolist()):
            assert np.array_equal(part.tokens[i], whole.tokens[position])
            assert np.array_equal(part.others["loss_mask"][i], whole.others["loss_mask"][position])
    answers = [len(chat) // 2 for chat in conversations(10)] * 2
    assert (whole.table.metadata[LOSS_SPANS].lengths_N // 2).tolist() == answers


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ([], r"holds \[\], not a list of messages with role and content, as it has none; fix it"),
        ({"prompt": "a"}, "not a list of messages"),
        ([{"content": "a"}], "message 0 is .*, not an object with a role"),
        ("no json", "holds the text 'no json', not a list of messages"),
        ([{"role": "user", "content": "\ufdd0"}], "noncharacter"),
        ('[{"role": "user", "content": "a \\ufDD1"}]', "noncharacter"),
        ('{"messages": [{"role": "user", "content": "a", "\\uFDd0": 1}]}', "noncharacter"),
    ],
)
def test_a_record_that_is_no_conversation_is_told_and_may_be_skipped(models, record, fault):
    folder, chats = models / "plain", conversations(2)

    with pytest.raises(IntegrityError, match=f"jsonl:2: .*{fault}"):
        a_source(folder, [chats[0], record, chats[1]]).read(0, 3)
    block = a_source(folder, [chats[0], record, chats[1]], policy="skip").read(0, 3)

    assert block.skipped == 1
    assert block.table.positions_N.tolist() == [0, 2]


def test_a_text_that_tells_of_an_escape_is_read_as_it_is(models):
    chat = [{"role": "user", "content": "\\ufdd0"}, {"role": "assistant", "content": "yes"}]

    found = a_source(models / "marked", [json.dumps(chat)]).read(0, 1)

    shown = library_in(models / "marked").decode(found.tokens[0].tolist())
    assert "\\ufdd0" in shown


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set _ = messages.append(1) %}", "SecurityError"),
        (
            "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}",
            "depends on later messages",
        ),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{{ strftime_now('%Y') }}", "strftime_now"),
    ],
)
def test_a_template_that_refuses_or_breaks_out_is_told(models, template, fault):
    folder = models / "plain"
    (folder / "model/odd.jinja").write_text(template)
    chat = ChatTransform(type="chat", template="model/odd.jinja")

    with pytest.raises(IntegrityError, match=fault):
        a_source(folder, conversations(1, turns=2), transforms=(chat,)).read(0, 1)


def test_a_day_is_the_files_and_never_today(models):
    folder = models / "plain"
    (folder / "model/day.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    chat = ChatTransform(type="chat", template="model/day.jinja", date="2026-02-03", loss="all")

    block = a_source(folder, conversations(1), transforms=(chat,)).read(0, 1)

    assert open_tokenizer(BPE, folder).decode(block.tokens[0]) == "03 Feb 2026"


def test_a_missing_or_broken_template_is_refused_when_the_source_is_opened(models, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for %}")
    broken = ChatTransform(type="chat", template="broken.jinja")
    bytes_alone = ByteTokenizer(type="bytes")

    with pytest.raises(ConfigError, match="is no chat template"):
        a_source(tmp_path, conversations(1), tokenizer=bytes_alone, transforms=(broken,))
    with pytest.raises(ConfigError, match=r"has no chat_template\.jinja"):
        a_source(tmp_path, conversations(1), tokenizer=bytes_alone)


def test_without_jinja_the_extra_is_named(models, monkeypatch):
    monkeypatch.delitem(sys.modules, "omniload.source.transforms.chat_sandbox", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(ConfigError, match=r"pip install 'omniload-data\[chat\]'"):
        a_source(models / "plain", conversations(1))


@pytest.mark.parametrize(
    ("found", "is_sound"),
    [("3.1.5", False), ("3.0", False), ("3.1.6", True), ("3.10rc1", True), ("4.0.dev0", True)],
)
def test_a_sandbox_that_templates_get_out_of_runs_none(models, monkeypatch, found, is_sound):
    monkeypatch.setattr(chat_sandbox, "version", lambda _: found)

    if is_sound:
        assert len(a_source(models / "plain", conversations(1)).read(0, 1).tokens) == 1
    else:
        with pytest.raises(ConfigError, match=rf"jinja2 {found}, .* 3\.1\.6 .*\[chat\]' --upgrade"):
            a_source(models / "plain", conversations(1))


def test_another_template_is_another_digest(models):
    digests = {
        a_source(models / style, conversations(1)).facts.transforms_digest
        for style in ("plain", "marked")
    }

    assert len(digests) == 2
    assert "" not in digests


def test_samples_are_cut_and_left_out_by_their_lengths_with_their_masks(models):
    folder, chats = models / "plain", conversations(6)
    whole = a_source(folder, chats).read(0, 6)
    lengths = whole.tokens.lengths_N
    longest = int(lengths.max())
    transforms = (
        CHAT,
        FilterTransform(type="filter", max_tokens=longest - 1),
        ClampTransform(type="clamp", tokens=20),
    )

    block = a_source(folder, chats, transforms=transforms).read(0, 6)

    kept = np.flatnonzero(lengths < longest)
    assert block.table.positions_N.tolist() == kept.tolist()
    for i, position in enumerate(kept.tolist()):
        assert np.array_equal(block.tokens[i], whole.tokens[position][:20])
        assert np.array_equal(
            block.others["loss_mask"][i], whole.others["loss_mask"][position][:20]
        )


def test_a_conversation_without_an_answer_may_be_left_out(models):
    chats = [conversations(1)[0], [{"role": "user", "content": "hello?"}]]
    some = FilterTransform(type="filter", min_trained_tokens=1)

    block = a_source(models / "plain", chats, transforms=(CHAT, some)).read(0, 2)

    assert block.table.positions_N.tolist() == [0]


def test_chat_is_the_first_transform_of_text():
    keys = {"type": "parquet", "path": "x"}
    with pytest.raises(ValueError, match="comes after another"):
        ParquetSource(**keys, text="t", transforms=(ClampTransform(type="clamp", tokens=4), CHAT))
    with pytest.raises(ValueError, match="holds token ids"):
        ParquetSource(**keys, tokens="t", transforms=(CHAT,))


def test_a_generation_block_within_a_macro_is_found_where_it_stands(models):
    folder, chats = models / "plain", conversations(4)
    (folder / "model/macro.jinja").write_text(
        "{% macro turn(m) %}{{ m.role }}<bos>{% generation %}{{ m.content }}{% endgeneration %}<eos>{% endmacro %}"
        "{% for m in messages %}{{ turn(m) if m.role == 'assistant' else m.content }}{% endfor %}"
    )
    chat = ChatTransform(type="chat", template="model/macro.jinja")

    found = trained_on(a_source(folder, chats, transforms=(chat,)), library_in(folder), 4)

    assert found == [said(chat, trimmed=False).replace("<|im_end|>\n", "") for chat in chats]


def test_tools_reach_the_template(models):
    folder = models / "marked"
    record = {"messages": conversations(1)[0], "tools": [{"name": "look <up>"}]}

    block = a_source(folder, [record]).read(0, 1)

    text = open_tokenizer(BPE, folder).decode(block.tokens[0])
    assert text.startswith(json.dumps(record["tools"]))


def test_a_template_may_leave_out_turns_that_a_key_of_theirs_tells_of(models, tmp_path):
    write_model(
        tmp_path / "model",
        "{% for m in messages %}{% if m.role == 'assistant' and m.weight != 0 %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    )
    turns = [{"weight": 0}, {"weight": 1}, {}]
    chat = [
        {"role": "assistant", "content": f"answer {i}\n"} | turn for i, turn in enumerate(turns)
    ]

    found = trained_on(a_source(tmp_path, [chat]), library_in(tmp_path), 1)

    assert found == ["answer 1\nanswer 2\n"]


def test_conversations_lie_in_the_members_of_archives_too(models, tmp_path):
    folder, chats = models / "marked", conversations(4)
    with tarfile.open(tmp_path / "chats.tar", "w") as archive:
        for i, chat in enumerate(chats):
            held = orjson.dumps({"messages": chat})
            member = tarfile.TarInfo(f"{i}.json")
            member.size = len(held)
            archive.addfile(member, io.BytesIO(held))
    config = WebDatasetSource(
        type="webdataset",
        path=str(tmp_path / "chats.tar"),
        text="json",
        key="messages",
        transforms=(CHAT,),
        shuffle={"method": "none"},
    )

    source = open_source(SourceSpec("sft", config, seed=1, tokenizer=BPE, base_dir=folder))

    assert trained_on(source, library_in(folder), 4) == [said(chat, trimmed=True) for chat in chats]


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ({"content": None, "tool_calls": None, "weight": 0}, {"weight": 0}),
        ({"reasoning": "so"}, {"thinking": "so", "reasoning": "so", "reasoning_content": "so"}),
        (
            {"thinking": "", "reasoning": "so"},
            {"thinking": "", "reasoning": "so", "reasoning_content": ""},
        ),
        (
            {"reasoning_content": None, "thinking": "so", "tool_calls": [{"x": None}]},
            {"thinking": "so", "tool_calls": [{"x": None}], "reasoning_content": "so"},
        ),
    ],
)
def test_a_null_of_a_message_is_no_key_and_what_was_thought_has_both_names(message, given):
    spoken = {"role": "assistant"}
    renamed = MessageNames(roles={"assistant": "model"})

    assert named(0, message | spoken, MessageNames()) == given | spoken
    assert named(0, message | spoken, renamed) == given | {"role": "model"}


TOOLS = [{"name": "look <up>"}]


@pytest.mark.parametrize("written", ["list", "text", "table", "texts"])
def test_tools_beside_the_messages_reach_the_template(models, tmp_path, written):
    folder, chats = models / "marked", conversations(3)
    # The second line of JSON has no such key; a table can only have a null there.
    rows = [{"messages": chats[0], "tools": TOOLS}, {"messages": chats[1]}]
    rows.append({"messages": chats[2], "tools": [] if written == "list" else None})
    if written in ("text", "texts"):
        rows[0]["tools"] = json.dumps(TOOLS)
    if written == "texts":
        rows = [row | {"messages": json.dumps(row["messages"])} for row in rows]
    path, kind = tmp_path / "chats.jsonl", JsonlSource
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    if written == "table":
        path, kind = tmp_path / "chats.parquet", ParquetSource
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = kind(
        type=path.suffix[1:],
        path=str(path),
        text="messages",
        transforms=(ChatTransform(type="chat", tools="tools"),),
        shuffle={"method": "none"},
    )

    block = open_source(SourceSpec("sft", config, seed=1, tokenizer=BPE, base_dir=folder)).read(
        0, 3
    )

    as_one = [{"messages": chats[0], "tools": TOOLS}, *chats[1:]]
    expected = a_source(folder, as_one).read(0, 3)
    assert [block.tokens[i].tolist() for i in range(3)] == [
        expected.tokens[i].tolist() for i in range(3)
    ]
    assert block.others["loss_mask"].values_V.tolist() == (
        expected.others["loss_mask"].values_V.tolist()
    )


def beside(folder, models, rows, kind="jsonl", **chat):
    """Open a source of conversations with the columns next to them."""
    path = folder / f"chats.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    config = {"jsonl": JsonlSource, "parquet": ParquetSource}[kind](
        type=kind,
        path=str(path),
        text="chat",
        transforms=(ChatTransform(type="chat", **chat),),
        shuffle={"method": "none"},
    )
    return SourceSpec("sft", config, seed=1, tokenizer=BPE, base_dir=models / "marked")


def samples_in(block):
    mask = block.others["loss_mask"]
    return [(block.tokens[i].tolist(), mask[i].tolist()) for i in range(len(block.tokens))]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("names", [None, {"system": "system", "human": "user", "gpt": "assistant"}])
def test_what_the_system_says_beside_the_messages_comes_before_them(models, tmp_path, kind, names):
    first = {"role": "system", "content": "be brief"}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    own = {"role": "system", "content": "be long"}
    wanted = [[first, *chat], chat, chat, [own, *chat]]
    said, called = {}, {"system": "system", "user": "human", "assistant": "gpt"}
    turn = dict
    if names:
        said = {"messages": {"role": "from", "content": "value", "roles": names}}

        def turn(each):
            return {"from": called[each["role"]], "value": each["content"]}

    rows = [
        {"chat": [turn(each) for each in chat], "system": "be brief"},
        {"chat": [turn(each) for each in chat], "system": ""},
        {"chat": [turn(each) for each in chat]} | ({} if kind == "jsonl" else {"system": None}),
        {"chat": [turn(own), *map(turn, chat)], "system": "be brief"},
    ]

    found = open_source(beside(tmp_path, models, rows, kind, system="system", **said)).read(0, 4)

    assert samples_in(found) == samples_in(a_source(models / "marked", wanted).read(0, 4))


def test_system_and_tools_may_both_stand_beside_the_messages(models, tmp_path):
    chat = conversations(1)[0]
    system = {"role": "system", "content": "be brief"}
    rows = [{"chat": chat, "tools": TOOLS, "meta": {"said": "be brief"}}]
    spec = beside(tmp_path, models, rows, tools="tools", system="meta.said")

    found = open_source(spec).read(0, 1)

    wanted = a_source(models / "marked", [{"messages": [system, *chat], "tools": TOOLS}])
    assert samples_in(found) == samples_in(wanted.read(0, 1))


@pytest.mark.parametrize("value", [5, ["a"], {"role": "system"}])
def test_what_the_system_says_is_a_text(models, tmp_path, value):
    spec = beside(tmp_path, models, [{"chat": conversations(1)[0], "s": value}], system="s")

    with pytest.raises(IntegrityError, match=r"chats.jsonl.*: s is .*, not a text"):
        open_source(spec).read(0, 1)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_messages_that_begin_with_how_to_behave_keep_that(models, tmp_path, role):
    chat = [{"role": role, "content": "be long"}, *conversations(1)[0]]

    found = open_source(beside(tmp_path, models, [{"chat": chat, "s": "be brief"}], system="s"))

    wanted = a_source(models / "marked", [chat]).read(0, 1)
    assert samples_in(found.read(0, 1)) == samples_in(wanted)


def test_the_key_of_the_messages_is_not_that_of_the_system():
    chat = ChatTransform(type="chat", system="messages")

    with pytest.raises(
        ValidationError, match="chat reads 'messages' in addition to the text, but text"
    ):
        JsonlSource(type="jsonl", path="a", text="messages", transforms=(chat,))


def test_one_key_is_not_both_tools_and_system():
    with pytest.raises(ValidationError, match="tools and system are both 'a'; name two keys"):
        ChatTransform(type="chat", tools="a", system="a")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("more", "chat", "said"),
    [
        (
            {"system": "be brief"},
            {},
            "have 'system' beside their messages, which is not read: say system: system",
        ),
        ({"system_prompt": "be brief"}, {}, "say system: system_prompt in the transform chat"),
        (
            {"tools": TOOLS},
            {},
            "have 'tools' beside their messages, which are not read: say tools: tools",
        ),
        ({"system": "", "tools": []}, {}, ""),
        ({"system": "be brief"}, {"system": "system"}, ""),
        ({"system": "be brief", "tools": TOOLS}, {"system": "system"}, "say tools: tools"),
        ({"system": "be brief", "tools": TOOLS}, {"tools": "tools"}, "say system: system"),
    ],
)
def test_what_stands_beside_messages_and_is_not_read_is_a_doubt(
    models, tmp_path, kind, more, chat, said
):
    if kind == "parquet":
        more = {key: value or None for key, value in more.items()}
    spec = beside(tmp_path, models, [{"chat": conversations(1)[0], **more}], kind, **chat)

    found = open_format(spec).format.doubt()

    assert said in found
    assert bool(found) == bool(said)


def test_a_key_of_the_system_that_no_line_has_is_a_doubt(models, tmp_path):
    spec = beside(tmp_path, models, [{"chat": conversations(1)[0]}], system="sytem")

    assert "none of the first records has system under 'sytem'" in open_format(spec).format.doubt()


@pytest.mark.parametrize("kind", [ArrowSource, ParquetSource])
def test_a_table_without_a_tool_in_any_row_has_none(models, tmp_path, kind):
    folder, chats = models / "marked", conversations(3)
    table = pa.table({"messages": chats, "tools": pa.nulls(3), "nothing": pa.nulls(3)})
    pq.write_table(table, tmp_path / "chats.parquet")
    with pa.ipc.new_file(str(tmp_path / "chats.arrow"), table.schema) as writer:
        writer.write_table(table)

    def opened(text):
        name = kind.model_fields["type"].annotation.__args__[0]
        config = kind(
            type=name,
            path=str(tmp_path / f"chats.{name}"),
            text=text,
            transforms=(ChatTransform(type="chat", tools="tools"),),
            shuffle={"method": "none"},
        )
        return open_source(SourceSpec("sft", config, seed=1, tokenizer=BPE, base_dir=folder))

    expected = a_source(folder, chats).read(0, 3)
    assert (
        opened("messages").read(0, 3).tokens.values_V.tolist() == expected.tokens.values_V.tolist()
    )
    with pytest.raises(ConfigError, match="column 'nothing' is null, not text"):
        opened("nothing")


def with_tools(models, folder, chat, tools):
    """Open a source of one conversation and its tools."""
    path = folder / "chats.jsonl"
    path.write_bytes(orjson.dumps({"chat": chat, "tools": tools}) + b"\n")
    chats = ChatTransform(type="chat", tools="tools")
    config = JsonlSource(type="jsonl", path=str(path), text="chat", transforms=(chats,))
    return open_source(SourceSpec("sft", config, seed=1, tokenizer=BPE, base_dir=models / "marked"))


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("look it up", "tools is the text 'look it up', not a list"),
        ({"a": 1}, "not a list of"),
        ("[" * 300 + "]" * 300, "cannot be written as JSON: Recursion limit"),
    ],
)
def test_tools_that_are_no_list_make_a_bad_record(models, tmp_path, tools, said):
    source = with_tools(models, tmp_path, conversations(1)[0], tools)

    with pytest.raises(IntegrityError, match=said):
        source.read(0, 1)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("chat", "held"), [([], r"\[\]"), ("[]", r"\[\]"), (5, "5"), (None, "null"), ({}, "{}")]
)
def test_what_is_no_conversation_is_told_as_its_record_has_it_beside_tools_too(
    models, tmp_path, chat, held, tools
):
    source = with_tools(models, tmp_path, chat, tools)

    with pytest.raises(IntegrityError, match=f": holds {held}, not a list of messages with role"):
        source.read(0, 1)


def test_tools_are_read_where_a_record_has_several_keys():
    chat = ChatTransform(type="chat", tools="tools")

    with pytest.raises(ValidationError, match="chat with tools reads several keys"):
        WebDatasetSource(type="webdataset", path="a.tar", text="json", transforms=(chat,))


def test_a_chat_without_tools_is_written_as_before_there_were_any():
    assert ChatTransform(type="chat").model_dump().keys() == {"type", "template", "loss", "date"}


def test_a_conversation_that_ends_with_an_answer_is_not_rendered_whole_twice(models, monkeypatch):
    template = ChatTemplate(read_template(None, models / "plain" / "model"))
    rendered, render = [], jinja2.Template.render

    def noted(self, context, **asked):
        rendered.append(len(context["messages"]))
        return render(self, context, **asked)

    monkeypatch.setattr(jinja2.Template, "render", noted)
    chat = [{"role": role, "content": role} for role in ("user", "assistant") * 2]

    found = template.render(json.dumps(chat), loss="assistant")

    assert [found.text[a:b] for a, b in found.spans] == ["assistant<|im_end|>\n"] * 2
    assert sorted(rendered) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"eos_token": {}, "bos_token": "<s>"}, {"bos_token": "<s>"}),
        ({"eos_token": {"content": "</s>"}, "pad_token": None}, {"eos_token": "</s>"}),
    ],
)
def test_special_tokens_are_those_that_are_texts(tmp_path, settings, tokens):
    held = settings | {"chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(held))

    assert read_template(None, tmp_path).tokens == tokens


@pytest.mark.parametrize("listed", [["text"], [None, 3], [{"name": "tools", "template": "x"}], []])
def test_a_list_of_templates_without_a_default_is_no_template(tmp_path, listed):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))

    with pytest.raises(ConfigError, match="no chat_template in tokenizer_config"):
        read_template(None, tmp_path)


def test_a_template_that_calls_itself_without_an_end_is_a_fault_of_it(tmp_path):
    endless = "{% macro again(m) %}{{ again(m) }}{% endmacro %}{{ again(messages) }}"
    (tmp_path / "chat_template.jinja").write_text(endless)
    template = ChatTemplate(read_template(None, tmp_path))

    with pytest.raises(IntegrityError, match="refuses it: RecursionError"):
        template.render('[{"role": "user", "content": "?"}]', loss="all")
