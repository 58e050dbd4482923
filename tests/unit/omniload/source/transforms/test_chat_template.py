"""The answers in the text of a template without generation blocks: those that blocks in the same template mark."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.source.transforms.chat_template import ChatTemplate, TemplateFiles
from omniload.source.transforms.conversations import BadConversationError

LOOP = "{%% for m in messages %%}%s{%% endfor %%}%s"
ASKED = "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
CALLED = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"


def answering(head, answer, prompt):
    """Return a template that writes ``answer`` behind ``head`` in a block, and a prompt for the next answer."""
    block = f"{head}{{% generation %}}{answer}{{% endgeneration %}}"
    turn = f"{{% if m.role == 'assistant' %}}{block}{{% else %}}{ASKED}{{% endif %}}"
    return LOOP % (turn, f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}")


TEMPLATES = {
    "each turn after its prompt": answering(
        "<|assistant|>\n", "{{ m.content | trim }}<|end|>\n", "<|assistant|>\n"
    ),
    "a prompt begins a thought, as of DeepSeek": answering(
        "<A>", "{{ m.content }}" + CALLED + "{{ eos_token }}", "<A><think>\n"
    ),
    "only the last turn has its thought, as of Qwen": answering(
        "<|assistant|>\n",
        "{% if loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content | trim if m.content }}" + CALLED + "<|end|>\n",
        "<|assistant|>\n",
    ),
    "both": answering(
        "<A>", "{% if loop.last %}</think>{% endif %}{{ m.content }}" + CALLED + "<E>", "<A><think>"
    ),
    "a token ends the text, as of Phi": answering(
        "<|assistant|>\n",
        "{{ m.content }}<|end|>\n{% if loop.last %}{{ eos_token }}{% endif %}",
        "<|assistant|>\n",
    ),
}
WORDS = st.lists(
    st.sampled_from(["a", "<", "<A>", " ", "\n", "é", "漢", "🙂", "{{", "<|end|>", "</think>"]),
    min_size=1,
    max_size=5,
).map(lambda words: "".join([*words, "z"]))
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "<A>"}}}


@st.composite
def conversations(draw, calls):
    messages = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        content = draw(WORDS | st.lists(WORDS, min_size=1, max_size=1).map(lambda w: f" {w[0]}\n"))
        answer = {"role": "assistant", "content": content, "reasoning_content": draw(WORDS)}
        if calls and draw(st.booleans()):
            answer |= {"content": draw(st.sampled_from([None, "", "z"])), "tool_calls": [CALL]}
        messages.append(answer)
    return messages


def template_of(source):
    tokens = {"eos_token": "<|eos|>"}
    return ChatTemplate(TemplateFiles(path=Path("chat.jinja"), source=source, tokens=tokens))


def without_blocks(source):
    return re.sub(r"\{% (end)?generation %\}", "", source)


def rendered(source, messages):
    return template_of(source).render(json.dumps(messages), loss="assistant")


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_answers_are_those_that_blocks_mark(name, data):
    source = TEMPLATES[name]
    messages = data.draw(conversations(calls=CALLED in source))

    found, wanted = rendered(without_blocks(source), messages), rendered(source, messages)

    assert found.text == wanted.text
    assert [*found.spans] == [*wanted.spans]


@pytest.mark.parametrize(
    "source",
    [
        # Another end behind the last turn than behind earlier ones, as of gpt-oss.
        answering("<A>", "{{ m.content }}{{ '<R>' if loop.last else '<E>' }}", "<A>"),
        # Earlier questions change with later ones, as where the system text moves to the last question.
        LOOP % ("{{ 'S' if loop.revindex == 2 }}<{{ m.role }}>{{ m.content }}", "{{ ask }}"),
        # The prompt has nothing that an answer has.
        answering("", "{{ m.content }}<E>", "<A>"),
    ],
)
def test_answers_that_are_not_clear_are_refused_with_what_to_do(source):
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]

    with pytest.raises(BadConversationError, match=r"message \d: .* put \{% generation %\} blocks"):
        rendered(without_blocks(source), messages)


def test_an_answer_whose_words_the_template_changes_is_refused():
    # It counts the words that it writes, so that a mark behind them changes the text.
    answer = "{{ 'T' if loop.last }}{{ m.content }}{{ m.content | length }}<E>"
    messages = [{"role": role, "content": "say"} for role in ("user", "assistant") * 2]

    with pytest.raises(BadConversationError, match="message 1: "):
        rendered(without_blocks(answering("<A>", answer, "<A>")), messages)


def test_a_prompt_that_begins_a_thought_is_separated_from_an_answer_without_one():
    template = template_of(TEMPLATES["a prompt begins a thought, as of DeepSeek"])
    question = {"role": "user", "content": "why?"}

    found = template.render_answer([question], [{"role": "assistant", "content": "<since>"}])

    assert [found.text[slice(*span)] for span in found.spans] == ["<since><|eos|>"]
    assert found.text.startswith("<|user|>\nwhy?<|end|>\n<A><since>")
