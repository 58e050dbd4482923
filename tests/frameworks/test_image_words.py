"""Processors that put words around an image, against ``transformers``: Gemma 3, InternVL, and Idefics 3 for SmolVLM."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import (
    AutoTokenizer,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLProcessor,
)

from omniload.mix.config import BpeTokenizer
from omniload.mix.schema.transforms import ChatTransform, ImagesTransform, PreferenceTransform
from omniload.mix.sources import ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.chats import GEMMA, SMOLVLM, write_model
from tests.support.drawn import png_of, ramp

SIDE, TOKENS = 56, 4
"""Pixels of an image, and tokens that it gives: 2 x 2 of 28 pixels each."""
COUNT = 24
LINES = "a\n\nb\n\n\nc\n\n\n\n" * 200
"""Lines that stand together become one token: those of a processor with those of a text."""


def gemma(model):
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>"}
    tokenizer = AutoTokenizer.from_pretrained(
        model, extra_special_tokens=named | {"eoi_token": "<end_of_image>"}
    )
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Gemma3Processor(images, tokenizer, chat_template=GEMMA, image_seq_length=TOKENS)


def smolvlm(model):
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False,
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": SIDE},
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    return Idefics3Processor(images, tokenizer, image_seq_len=TOKENS, chat_template=SMOLVLM)


def internvl(model):
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    named |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = AutoTokenizer.from_pretrained(model, extra_special_tokens=named)
    images = GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=False, max_patches=1
    )

    class Alone(InternVLProcessor):
        """Without videos, which ask for torchvision."""

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    return Alone(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=INTERNVL,
        image_seq_length=TOKENS,
    )


INTERNVL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As InternVL 3 has it, where content is a list of parts."""
MODELS = {
    "internvl": (
        internvl,
        INTERNVL,
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        {"marker": "<IMG_CONTEXT>", "before": "<img>", "after": "</img>"},
        "<IMG_CONTEXT>",
    ),
    "gemma": (
        gemma,
        GEMMA,
        (
            *("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"),
            "<image_soft_token>",
        ),
        {
            "marker": "<start_of_image>",
            "before": "\n\n<start_of_image>",
            "after": "<end_of_image>\n\n",
        },
        "<image_soft_token>",
    ),
    "smolvlm": (
        smolvlm,
        SMOLVLM,
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        {
            "marker": "<image>",
            "before": "<fake_token_around_image><global-img>",
            "after": "<fake_token_around_image>",
        },
        "<image>",
    ),
}


def chats():
    """Return conversations of parts, with new lines where a processor writes some too; and how many images."""
    made = []
    for i in range(COUNT):
        messages, images = [], 0
        for turn in range(1 + i % 3):
            parts = [{"type": "text", "text": f"Look {i}:\n" if i % 2 else f"{i}. "}]
            for k in range((i + turn) % 3):
                images += 1
                parts += [{"type": "image"}, {"type": "text", "text": f"\n zażółć 漢字 {k}\n\n"}]
            parts.append({"type": "text", "text": "What is it?"})
            said = [{"type": "text", "text": f"a ramp {turn} <b>"}]
            messages.append({"role": "user", "content": parts})
            messages.append({"role": "assistant", "content": said})
        made.append((messages, images))
    return made


def read(folder, model, rows, transform):
    _, _, _, words, placeholder = MODELS[model]
    held = [[png_of(ramp(SIDE, SIDE))] * transform["images"](row) for row in rows]
    table = pa.Table.from_pylist(rows)
    table = table.append_column("images", pa.array(held, pa.list_(pa.binary())))
    pq.write_table(table, folder / "a.parquet")
    config = ParquetSource(
        type="parquet",
        path="a.parquet",
        text=transform["text"],
        images="images",
        shuffle={"method": "none"},
        transforms=(
            transform["of"](image=words),
            ImagesTransform(type="images", patch=14, merge=2, placeholder=placeholder),
        ),
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")
    return open_source(
        SourceSpec("see", config, seed=0, tokenizer=tokenizer, base_dir=folder)
    ).read(0, len(rows))


def images_in(messages):
    return sum(part["type"] == "image" for m in messages for part in m["content"])


def theirs(processor, messages):
    """Return the tokens that a processor of ``transformers`` makes of a conversation."""
    picture = Image.fromarray(ramp(SIDE, SIDE))
    shown = [
        message
        | {
            "content": [
                part | {"image": picture} if part["type"] == "image" else part
                for part in message["content"]
            ]
        }
        for message in messages
    ]
    made = processor.apply_chat_template(shown, tokenize=True, return_dict=True)
    (ids,) = made["input_ids"]
    return list(ids)


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_a_processor_that_writes_words_around_an_image(tmp_path, model):
    processor_of, template, special, _, placeholder = MODELS[model]
    write_model(tmp_path / "model", template, special, LINES)
    processor = processor_of(tmp_path / "model")
    made = chats()

    block = read(
        tmp_path,
        model,
        [{"messages": messages} for messages, _ in made],
        {
            "text": "messages",
            "images": lambda row: images_in(row["messages"]),
            "of": lambda **named: ChatTransform(type="chat", **named),
        },
    )

    assert len(processor.tokenizer.tokenize("\n\n\n")) == 1
    token = processor.tokenizer.convert_tokens_to_ids(placeholder)
    for i, (messages, images) in enumerate(made):
        assert block.tokens[i].tolist() == theirs(processor, messages)
        places = block.others["image_places"][i].reshape(-1, 2)
        assert places[:, 1].tolist() == [TOKENS] * images
        marked = np.zeros(len(block.tokens[i]), np.bool_)
        for first, count in places.tolist():
            marked[first : first + count] = True
        assert np.array_equal(marked, block.tokens[i] == token)
        # What is trained on: the answers, as the template writes them behind the prompt for each.
        shown = processor.tokenizer.decode(block.tokens[i][block.others["loss_mask"][i]].tolist())
        assert "a ramp 0 <b>" in shown
        assert "Look" not in shown


@pytest.mark.parametrize("model", MODELS)
def test_both_sides_of_a_pair_are_those_of_such_a_processor(tmp_path, model):
    processor_of, template, special, _, _ = MODELS[model]
    write_model(tmp_path / "model", template, special, LINES)
    processor = processor_of(tmp_path / "model")
    rows = [
        {
            "prompt": messages[:1],
            "chosen": [{"role": "assistant", "content": [{"type": "text", "text": f"yes {i}"}]}],
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": f"no {i}"}]}],
        }
        for i, (messages, _) in enumerate(chats())
    ]

    block = read(
        tmp_path,
        model,
        rows,
        {
            "text": "chosen",
            "images": lambda row: images_in(row["prompt"]),
            "of": lambda **named: PreferenceTransform(type="preference", **named),
        },
    )

    for i, row in enumerate(rows):
        sides = [theirs(processor, row["prompt"] + row[key]) for key in ("chosen", "rejected")]
        assert block.tokens[i].tolist() == sides[0] + sides[1]
        assert block.others["rejected_at"][i].tolist() == [len(sides[0])]
