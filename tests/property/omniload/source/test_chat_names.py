"""A conversation with other names is the same sample as one with ``role`` and ``content``, in every format."""

import tempfile
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from omniload.mix.schema.tokenizers import BpeTokenizer
from omniload.mix.sources import SourceConfig
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.chats import CHATML, MARKED, write_model

SHOWN = "{% for m in messages %}{{ m | tojson }}{{ m.content }}{% endfor %}"
"""Shows every key of a message, in their order."""
TEMPLATES = {"chatml.jinja": CHATML, "marked.jinja": MARKED, "shown.jinja": SHOWN}
ROLES = ("system", "user", "assistant", "tool")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "model"
    write_model(folder, CHATML)
    for name, template in TEMPLATES.items():
        (folder / name).write_text(template)
    return folder


texts = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=12)
keys = st.sampled_from(["role", "content", "from", "value", "weight", "zażółć", "a.b"])


@st.composite
def corpora(draw):
    """Return names, conversations with those names, and the same conversations in the form that templates know."""
    role, content, *further = draw(st.lists(keys, min_size=2, max_size=5, unique=True))
    called = draw(st.none() | st.lists(texts.filter(len), min_size=4, max_size=4, unique=True))
    of = dict(zip(ROLES, called or ROLES, strict=True))
    messages = st.tuples(st.sampled_from(ROLES), texts, st.lists(texts, min_size=3, max_size=3))
    # Among the keys that templates know, those that the mix does not name are not read.
    kept = [key for key in further if key not in ("role", "content")]
    order = draw(st.permutations([role, content, *further]))
    theirs, plain = [], []
    for chat in draw(st.lists(st.lists(messages, min_size=1, max_size=4), min_size=1, max_size=4)):
        both = [], []
        for speaker, text, others in chat:
            values = dict(zip(further, others, strict=False))
            held = values | {role: of[speaker], content: text}
            both[0].append({key: held[key] for key in order})
            renamed = {role: ("role", speaker), content: ("content", text)}
            renamed |= {key: (key, values[key]) for key in kept}
            both[1].append(dict(renamed[key] for key in order if key in renamed))
        theirs.append(both[0])
        plain.append(both[1])
    names = {"role": role, "content": content}
    if called is not None:
        names["roles"] = {name: speaker for speaker, name in of.items()}
    return names, theirs, plain


def samples(folder, kind, chats, names, template, model):
    """Return tokens and mask of each conversation."""
    if kind == "jsonl":
        lines = b"".join(orjson.dumps({"turns": chat}) + b"\n" for chat in chats)
        (folder / "a.jsonl").write_bytes(lines)
    else:
        pq.write_table(pa.table({"turns": chats}), folder / "a.parquet")
    chat = {"type": "chat", "template": str(model / template)}
    config = TypeAdapter(SourceConfig).validate_python(
        {
            "type": kind,
            "path": f"a.{kind}",
            "text": "turns",
            "shuffle": {"method": "none"},
            "transforms": [chat | ({} if names is None else {"messages": names})],
        }
    )
    tokenizer = BpeTokenizer(type="bpe", path=str(model))
    source = open_source(SourceSpec("sft", config, seed=0, tokenizer=tokenizer, base_dir=folder))
    block = source.read(0, len(chats))
    return [
        (block.tokens[i].tolist(), block.others["loss_mask"][i].tolist())
        for i in range(len(block.tokens))
    ]


@given(corpora(), st.sampled_from(sorted(TEMPLATES)))
def test_names_change_neither_tokens_nor_masks(model, drawn, template):
    names, theirs, plain = drawn
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        expected = samples(folder, "jsonl", plain, None, template, model)

        for kind in ("jsonl", "parquet"):
            assert samples(folder, kind, theirs, names, template, model) == expected

    assert len(expected) == len(plain)
