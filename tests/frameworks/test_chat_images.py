"""Conversations with images against ``transformers``: token ids, masks, grids and pixels of a whole processor."""

import base64

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor

from omniload.batch.images import PatchArrays
from omniload.mix.config import BpeTokenizer
from omniload.mix.schema.transforms import ChatTransform, ImagesTransform, PreferenceTransform
from omniload.mix.sources import JsonlSource, ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.chats import LLAVA, QWEN, QWEN_MARKED, write_model
from tests.support.drawn import png_of, ramp

PAD = "<|image_pad|>"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>", "<image>")
SIDES = ((28, 56), (84, 28), (56, 56), (28, 28))
"""Whole tokens of 28 pixels: nothing is resized, and pixels are the same whatever the filter."""
COUNT = 30


def chats():
    """Return conversations of parts, and the pixels of their images."""
    made = []
    for i in range(COUNT):
        messages, pixels = [], []
        for turn in range(1 + i % 3):
            parts = [{"type": "text", "text": f"Look {i}: "}] if i % 2 else []
            for k in range((i + turn) % 3):
                pixels.append(ramp(*SIDES[(i + k) % 4]))
                parts += [{"type": "image"}, {"type": "text", "text": f" zażółć 漢字 {k}.\n"}]
            parts.append({"type": "text", "text": "What is it?"})
            messages.append({"role": "user", "content": parts})
            messages.append({"role": "assistant", "content": f"a ramp {turn} <b>"})
        made.append((messages, pixels))
    return made


def processor_of(model, template):
    tokenizer = AutoTokenizer.from_pretrained(model)
    images = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=28 * 28 * 64
    )

    class Alone(Qwen2VLProcessor):
        """Without videos, which ask for torchvision."""

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    return Alone(image_processor=images, tokenizer=tokenizer, chat_template=template)


def theirs(model, messages, pixels, template=QWEN_MARKED):
    """Return what a processor of ``transformers`` makes of a conversation."""
    processor = processor_of(model, template)
    left = iter(pixels)
    shown = [
        message
        if isinstance(message["content"], str)
        else message
        | {
            "content": [
                {"type": "image", "image": Image.fromarray(next(left))}
                if part["type"] == "image"
                else part
                for part in message["content"]
            ]
        }
        for message in messages
    ]
    return processor.apply_chat_template(
        shown,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="np",
    )


def as_parts(messages, pixels):
    return {"messages": messages, "images": [png_of(each) for each in pixels]}


def as_llava(messages, pixels):
    said = {"user": "human", "assistant": "gpt"}
    turns = [
        {
            "from": said[message["role"]],
            "value": message["content"]
            if isinstance(message["content"], str)
            else "".join(part.get("text", "<image>") for part in message["content"]),
        }
        for message in messages
    ]
    held = [{"bytes": png_of(each), "path": "a.png"} for each in pixels]
    return {"messages": turns, "images": held}


def as_urls(messages, pixels):
    """Return a conversation as OpenAI has it: its images lie in the messages."""
    left = iter(pixels)

    def part_of(part):
        if part["type"] == "text":
            return part
        data = base64.b64encode(png_of(next(left))).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    return {
        "messages": [
            message
            if isinstance(message["content"], str)
            else message | {"content": list(map(part_of, message["content"]))}
            for message in messages
        ]
    }


NAMES = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}
FORMS = {
    "parts": (as_parts, "parquet", {}),
    "llava": (as_llava, "parquet", {"messages": NAMES}),
    "urls": (as_urls, "jsonl", {}),
}


def ours(folder, form, made):
    lay, kind, changes = FORMS[form]
    rows = [lay(messages, pixels) for messages, pixels in made]
    common = {
        "path": f"a.{kind}",
        "text": "messages",
        "shuffle": {"method": "none"},
        "transforms": (
            ChatTransform(type="chat", image=PAD, **changes),
            ImagesTransform(type="images", patch=14, merge=2, placeholder=PAD),
        ),
    }
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        config = JsonlSource(type="jsonl", **common)
    else:
        # Contents are texts and lists: such a column is JSON in a table of Arrow's.
        table = {
            "messages": [orjson.dumps(row["messages"]).decode() for row in rows],
            "images": [row["images"] for row in rows],
        }
        pq.write_table(pa.table(table), folder / "a.parquet")
        config = ParquetSource(type="parquet", images="images", **common)
    tokenizer = BpeTokenizer(type="bpe", path="model")
    source = open_source(SourceSpec("see", config, seed=0, tokenizer=tokenizer, base_dir=folder))
    return source.read(0, len(rows))


@pytest.mark.parametrize("template", [QWEN, QWEN_MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_masks_grids_and_pixels_are_those_of_a_processor(tmp_path, form, template):
    write_model(tmp_path / "model", template, SPECIAL)
    made = chats()

    block = ours(tmp_path, form, made)

    masked = 0
    for i, (messages, pixels) in enumerate(made):
        wanted = theirs(tmp_path / "model", messages, pixels)
        assert block.tokens[i].tolist() == wanted["input_ids"][0].tolist()
        mask = block.others["loss_mask"][i].astype(int).tolist()
        # What a processor gives for a template without blocks is nothing: those with them render the same.
        assert mask == np.asarray(wanted["assistant_masks"]).reshape(-1).tolist()
        masked += sum(mask)
        grids = block.others["grids"][i].reshape(-1, 2).tolist()
        assert grids == [each[1:].tolist() for each in wanted.get("image_grid_thw", [])]
        if pixels:
            require_pixels(block.others["images"][i], wanted["pixel_values"])
    assert masked > 0


def require_pixels(patches, values):
    """Hold bytes against the normalised values of a processor, by the lines of the page on images."""
    grids = np.array([[1, len(patches) // 588]])
    images = PatchArrays(patches, grids, lambda array, dtype: torch.as_tensor(array.astype(dtype)))
    pixels = images.floats(
        mean=[0.48145466, 0.4578275, 0.40821073],
        deviation=[0.26862954, 0.26130258, 0.27577711],
    )
    pixels = pixels.view(-1, 14, 14, 3).permute(0, 3, 1, 2)
    pixels = pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)
    np.testing.assert_array_equal(pixels, values)


def test_a_template_that_takes_parts_alone_is_given_parts_and_gives_the_same_tokens(tmp_path):
    write_model(tmp_path / "model", LLAVA, SPECIAL)
    made = chats()
    rows = [as_llava(messages, pixels) for messages, pixels in made]
    table = {
        "messages": [row["messages"] for row in rows],
        "images": [row["images"] for row in rows],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    config = ParquetSource(
        type="parquet",
        path="a.parquet",
        text="messages",
        images="images",
        shuffle={"method": "none"},
        transforms=(
            ChatTransform(type="chat", image="<image>", messages=NAMES),
            ImagesTransform(type="images", patch=14, merge=2, placeholder="<image>"),
        ),
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")

    block = open_source(
        SourceSpec("see", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path)
    ).read(0, COUNT)

    library = AutoTokenizer.from_pretrained(tmp_path / "model")
    token = library.convert_tokens_to_ids("<image>")
    for i, (messages, _) in enumerate(made):
        parts = [
            message | {"content": parts_of(text["value"])}
            for message, text in zip(messages, rows[i]["messages"], strict=True)
        ]
        wanted = library.apply_chat_template(
            parts, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        places = block.others["image_places"][i].reshape(-1, 2)
        # One placeholder for each run of them: so the text is before a processor makes room.
        kept = np.ones(len(block.tokens[i]), np.bool_)
        for first, count in places.tolist():
            kept[first + 1 : first + count] = False
        assert block.tokens[i][kept].tolist() == wanted["input_ids"]
        assert block.others["loss_mask"][i][kept].astype(int).tolist() == wanted["assistant_masks"]
        assert wanted["input_ids"].count(token) == len(places)


def parts_of(text):
    """Return a text with markers as parts, by hand."""
    first, *others = text.split("<image>")
    parts = [{"type": "text", "text": first}]
    for other in others:
        parts += [{"type": "image"}, {"type": "text", "text": other}]
    return [part for part in parts if part.get("text", "image")]


def test_both_sides_of_a_pair_are_conversations_with_the_images_of_the_prompt(tmp_path):
    write_model(tmp_path / "model", QWEN, SPECIAL)
    made = [(messages[:1], pixels) for messages, pixels in chats()]
    made = [(messages, pixels[: count(messages)]) for messages, pixels in made]
    answers = [(f"a ramp {i}", f"no {i} at all") for i in range(COUNT)]
    rows = [
        {
            "prompt": messages,
            "chosen": [{"role": "assistant", "content": [{"type": "text", "text": both[0]}]}],
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": both[1]}]}],
            "images": [png_of(each) for each in pixels],
        }
        for (messages, pixels), both in zip(made, answers, strict=True)
    ]
    # Every field in every part, as a table has them.
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = ParquetSource(
        type="parquet",
        path="a.parquet",
        text="chosen",
        images="images",
        shuffle={"method": "none"},
        transforms=(
            PreferenceTransform(type="preference", image=PAD),
            ImagesTransform(type="images", patch=14, merge=2, placeholder=PAD),
        ),
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")

    block = open_source(
        SourceSpec("see", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path)
    ).read(0, COUNT)

    for i, (messages, pixels) in enumerate(made):
        sides = [
            theirs(tmp_path / "model", [*messages, {"role": "assistant", "content": said}], pixels)
            for said in answers[i]
        ]
        ids = [each["input_ids"][0].tolist() for each in sides]
        assert block.tokens[i].tolist() == ids[0] + ids[1]
        assert block.others["rejected_at"][i].tolist() == [len(ids[0])]
        masks = [np.asarray(each["assistant_masks"]).reshape(-1).tolist() for each in sides]
        assert block.others["loss_mask"][i].astype(int).tolist() == masks[0] + masks[1]
        grids = [g[1:].tolist() for each in sides for g in each.get("image_grid_thw", [])]
        assert block.others["grids"][i].reshape(-1, 2).tolist() == grids
        token = AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids(PAD)
        marked = np.zeros(len(block.tokens[i]), np.bool_)
        for first, length in block.others["image_places"][i].reshape(-1, 2).tolist():
            marked[first : first + length] = True
        assert np.array_equal(marked, block.tokens[i] == token)
        if pixels:
            chosen, rejected = (np.asarray(each["pixel_values"]) for each in sides)
            # Held once; a batch shows them on both sides.
            assert np.array_equal(chosen, rejected)
            require_pixels(block.others["images"][i], chosen)


def count(messages):
    return sum(part["type"] == "image" for part in messages[0]["content"])
