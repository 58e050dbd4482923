"""Images of conversations: in every form in which they are stored, they equal those of a hand-made rendering."""

import tempfile
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import SourceConfig
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.drawn import PLACEHOLDER, an_images_transform, png_of, ramp
from tests.support.examples import few

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{{ '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ ';\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
PICTURES = [png_of(ramp(4 * rows, 4 * columns)) for rows, columns in ((1, 1), (2, 1), (2, 3))]
PLAIN = an_images_transform().model_dump()

# Without the marker, and without the byte that stands for an image.
texts = st.text(
    st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="[<\x07"), max_size=10
)
contents = st.lists(texts | st.sampled_from(range(len(PICTURES))), max_size=5)
chats = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)


WORDS = {"marker": "[IMG]", "before": "\n\n(é", "after": ")\n"}
"""The text that a processor puts around an image."""


def rendered(chat, image="<image>"):
    """Return a conversation's text with ``<image>`` at the images, and the speaker of each letter, made by hand."""
    text, spans = "", []
    for asked, said in chat:
        text += "user\n" + "".join(p if isinstance(p, str) else image for p in asked) + ";\n"
        text += "assistant\n"
        answer = "".join(p if isinstance(p, str) else image for p in said) + ";\n"
        spans.append((len(text), len(text) + len(answer)))
        text += answer
    return text, spans


def trained_of(text, spans, image):
    """Return the bytes of answers without their images."""
    return b"".join(text[a:b].replace(image, "").encode() for a, b in spans)


def as_parts(content):
    return [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in content
    ]


def by_number(content, numbers):
    return [
        {"type": "text", "text": p}
        if isinstance(p, str)
        else {"type": "image", "index": next(numbers)}
        for p in content
    ]


def as_text(content):
    return "".join(p if isinstance(p, str) else "<image>" for p in content)


def in_form(chat, form):
    numbers = iter(range(len(PICTURES) * 100))
    lay = {"parts": as_parts, "text": as_text, "numbers": lambda c: by_number(c, numbers)}[form]
    return [
        {"role": role, "content": lay(content)}
        for pair in chat
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def read(folder, column, images, transforms, row_length, policy="raise"):
    pq.write_table(
        pa.table({"text": column, "images": pa.array(images, pa.list_(pa.binary()))}),
        folder / "a.parquet",
    )
    config = {
        "type": "parquet",
        "path": "a.parquet",
        "text": "text",
        "images": "images",
        "shuffle": {"method": "none"},
        "on_error": {"policy": policy},
        "transforms": transforms,
    }
    source = open_source(
        SourceSpec(
            "see",
            TypeAdapter(SourceConfig).validate_python(config),
            seed=0,
            tokenizer=ByteTokenizer(type="bytes"),
            base_dir=folder,
            row_length=row_length,
        )
    )
    whole = source.read(0, len(column))
    # Records give the same samples wherever a read is cut, as a resumed run requires.
    cuts = (0, len(column) // 2, len(column))
    parts = [source.read(a, b) for a, b in pairwise(cuts) if a < b]
    for name, column_of in whole.others.items():
        joined = np.concatenate([part.others[name].values_V for part in parts])
        assert np.array_equal(joined, column_of.values_V)
    joined = np.concatenate([part.tokens.values_V for part in parts])
    assert np.array_equal(joined, whole.tokens.values_V)
    return whole


@few(16, soak=300)
@given(
    st.lists(chats, min_size=1, max_size=3),
    st.sampled_from(["parts", "text", "numbers"]),
    st.sampled_from([None, 16]),
    st.sampled_from(["[IMG]", WORDS]),
)
def test_samples_are_those_of_a_text_with_images_that_was_rendered_by_hand(
    drawn, form, length, words
):
    images = [
        [PICTURES[p] for c in chat for s in c for p in s if isinstance(p, int)] for chat in drawn
    ]
    image = "\n\n(é<image>)\n" if words is WORDS else "<image>"
    by_hand = [rendered(chat, image) for chat in drawn]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "t.jinja").write_text(TEMPLATE)
        chat = {"type": "chat", "template": "t.jinja", "image": words}
        column = [orjson.dumps(in_form(chat, form)).decode() for chat in drawn]
        ours = read(folder, column, images, [chat, PLAIN], length)
        whole = read(folder, column, images, [chat, PLAIN], None)
        expected = read(folder, [text for text, _ in by_hand], images, [PLAIN], None)

    for i, (text, spans) in enumerate(by_hand):
        # A document of text gets an end token; a conversation has only the tokens of its template.
        assert whole.tokens[i].tolist() == expected.tokens[i][:-1].tolist()
        for name in ("images", "grids", "image_places"):
            assert np.array_equal(whole.others[name][i], expected.others[name][i])
        mask = whole.others["loss_mask"][i]
        assert not (whole.tokens[i][mask] == PLACEHOLDER).any()
        assert bytes(whole.tokens[i][mask].astype(np.uint8)) == trained_of(text, spans, image)
    # When samples are cut to rows, nothing is lost, and no image is cut.
    for name in ("loss_mask", "images", "grids"):
        assert np.array_equal(ours.others[name].values_V, whole.others[name].values_V)
    assert np.array_equal(ours.tokens.values_V, whole.tokens.values_V)
    for i in range(len(ours.tokens)):
        marked = np.zeros(len(ours.tokens[i]), np.bool_)
        for first, count in ours.others["image_places"][i].reshape(-1, 2).tolist():
            marked[first : first + count] = True
        assert np.array_equal(marked, ours.tokens[i] == PLACEHOLDER)
    # The text that a processor puts around it is not cut either.
    around = image.encode().split(b"<image>")
    for i in range(len(ours.tokens)):
        shown = bytes(ours.tokens[i].astype(np.uint8))
        for first, count in ours.others["image_places"][i].reshape(-1, 2).tolist():
            assert shown[:first].endswith(around[0])
            assert shown[first + count :].startswith(around[1])


def nodes(value):
    """Yield every list and object in a value of JSON."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from nodes(inner)


spoils = st.sampled_from(
    [
        *(None, True, 0, -1, 10**9, 0.5, "", "<image>", "[IMG]", "\x07", "[IMG", "data:", [], {}),
        *("data:image/png;base64,", "data:image/png;base64,!", "data:image/png;base64,aGk="),
        *({"type": "image"}, {"type": "image", "index": 0}, {"url": "data:;base64,"}, [[]]),
    ]
)


@few(16, soak=300)
@given(chats, st.sampled_from(["parts", "text", "numbers"]), st.data())
def test_a_spoilt_conversation_is_a_sample_or_a_bad_record_and_others_stay(chat, form, data):
    images = [PICTURES[p] for c in chat for s in c for p in s if isinstance(p, int)]
    good = [{"role": "user", "content": "<image>!"}]
    spoilt = in_form(chat, form)
    for _ in range(data.draw(st.integers(1, 3))):
        node = data.draw(st.sampled_from([each for each in nodes(spoilt) if each] or [spoilt]))
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(list(keys) or [None]))
        if key is None:
            break
        if data.draw(st.booleans()):
            # A copy, because a later spoil may change it, and every example draws from the same list.
            node[key] = deepcopy(data.draw(spoils))
        else:
            del node[key]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "t.jinja").write_text(TEMPLATE)
        transform = {"type": "chat", "template": "t.jinja", "image": "[IMG]"}
        column = [orjson.dumps(each).decode() for each in (good, spoilt, good)]
        held = [PICTURES[:1], images, PICTURES[:1]]
        block = read(folder, column, held, [transform, PLAIN], None, policy="skip")

    kept = block.table.positions_N.tolist()
    assert [position for position in kept if position != 1] == [0, 2]
    assert block.skipped + kept.count(1) <= 1
    for i in range(len(kept)):
        marked = np.zeros(len(block.tokens[i]), np.bool_)
        for first, count in block.others["image_places"][i].reshape(-1, 2).tolist():
            marked[first : first + count] = True
        # Whatever a text contains, no placeholder is without an image, and none is trained on.
        assert np.array_equal(marked, block.tokens[i] == PLACEHOLDER)
        assert not (marked & block.others["loss_mask"][i]).any()
