"""Processors that cut images into tiles, against ``transformers``: InternVL, Aya Vision, and Idefics 3 for SmolVLM."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import (
    AutoTokenizer,
    AyaVisionProcessor,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLProcessor,
)
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

from omniload.mix.config import BpeTokenizer
from omniload.mix.schema.image_tiles import ImageTiles
from omniload.mix.schema.transforms import ChatTransform, ImagesTransform, PreferenceTransform
from omniload.mix.sources import ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.transforms.image_patches import pixels_of
from omniload.source.transforms.image_tiles import grid_of
from tests.support.chats import SMOLVLM, write_model
from tests.support.drawn import png_of

SIDE, TOKENS = 56, 4
"""Pixels of a tile, and tokens that it gives: 2 x 2 of 28 pixels each."""
SIZES = ((56, 56), (112, 56), (90, 250), (300, 301), (40, 33), (57, 500), (168, 112), (1, 90))
"""Whole tiles and others, larger and smaller than one, higher and wider."""
LINES = "a\n\nb\n\n\nc\n\n\n\n" * 200
"""Lines that stand together become one token: those of a processor with those of a text."""
PARTED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}{{ 'MARKER\n' }}"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As InternVL 3 has it, where content is a list of parts."""


def cropping():
    return GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=6
    )


def internvl(model):
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    named |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = AutoTokenizer.from_pretrained(model, extra_special_tokens=named)

    class Alone(InternVLProcessor):
        """Without videos, which ask for torchvision."""

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    template = (model / "template.jinja").read_text()
    return Alone(cropping(), tokenizer, chat_template=template, image_seq_length=TOKENS)


def aya(model):
    tokenizer = AutoTokenizer.from_pretrained(model, pad_token="<eos>")
    template = (model / "template.jinja").read_text()
    return AyaVisionProcessor(
        cropping(), tokenizer, chat_template=template, patch_size=28, img_size=SIDE
    )


def smolvlm(model):
    images = Idefics3ImageProcessorPil(
        do_image_splitting=True,
        size={"longest_edge": 3 * SIDE},
        max_image_size={"longest_edge": SIDE},
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    return Idefics3Processor(images, tokenizer, image_seq_len=TOKENS, chat_template=SMOLVLM)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A processor of ``transformers``, and what a mix says to have its tokens."""

    processor: object
    template: str
    special: tuple
    image: dict
    placeholder: str
    tiles: dict = field(default_factory=dict)
    apart: int = 0
    """Most that a colour of a pixel is apart, of 255: by another filter."""


MODELS = {
    "internvl": Model(
        processor=internvl,
        template=PARTED.replace("MARKER", "<IMG_CONTEXT>"),
        special=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        image={"marker": "<IMG_CONTEXT>", "before": "<img>", "after": "</img>"},
        placeholder="<IMG_CONTEXT>",
        tiles={"max_tiles": 6},
    ),
    "aya": Model(
        processor=aya,
        template=PARTED.replace("MARKER", "<image>"),
        special=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"),
        image={"marker": "<image>", "before": "<|START_OF_IMG|>", "after": "<|END_OF_IMG|>"},
        placeholder="<|IMG_PATCH|>",
        tiles={
            "max_tiles": 6,
            "before_tile": "TILE_{number}",
            "before_thumbnail": "TILE_GLOBAL",
            "before_alone": "TILE_GLOBAL",
        },
    ),
    "smolvlm": Model(
        processor=smolvlm,
        template=SMOLVLM,
        special=(
            *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
            *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2)),
        ),
        image={"marker": "<image>", "after": "<fake_token_around_image>"},
        placeholder="<image>",
        tiles={
            "longest_edge": 3 * SIDE,
            "before_tile": "<fake_token_around_image><row_{row}_col_{column}>",
            "after_row": "\n",
            "before_thumbnail": "\n<fake_token_around_image><global-img>",
            "before_alone": "<fake_token_around_image><global-img>",
        },
        apart=4,
    ),
}


def soft(height, width):
    """Return an image without edges, which filters of images agree on."""
    y, x = np.mgrid[0:height, 0:width]
    waves = (np.sin(y / 23) * 90 + 128, np.cos(x / 31) * 90 + 128, np.sin((x + y) / 40) * 90 + 128)
    return np.stack(waves, -1).astype(np.uint8)


def chats():
    """Return conversations of parts, with new lines where a processor writes some too; and their images."""
    made = []
    for i, size in enumerate(SIZES * 2):
        messages, images = [], []
        for turn in range(1 + i % 3):
            parts = [{"type": "text", "text": f"Look {i}:\n" if i % 2 else f"{i}. "}]
            for k in range((i + turn + 1) % 3):
                images.append(soft(*(size if not k else SIZES[(i + k) % len(SIZES)])))
                parts += [{"type": "image"}, {"type": "text", "text": f"\n zażółć 漢字 {k}\n\n"}]
            parts.append({"type": "text", "text": "What is it?"})
            said = [{"type": "text", "text": f"a wave {turn} <b>"}]
            messages.append({"role": "user", "content": parts})
            messages.append({"role": "assistant", "content": said})
        made.append((messages, images))
    return made


def read(folder, model, rows, images, text, transform=None, **pictures):
    table = pa.Table.from_pylist(rows)
    held = [[png_of(each) for each in own] for own in images]
    table = table.append_column("images", pa.array(held, pa.list_(pa.binary())))
    pq.write_table(table, folder / "a.parquet")
    tiles = ImagesTransform(
        type="images",
        patch=14,
        merge=2,
        placeholder=model.placeholder,
        tiles={"size": SIDE, **model.tiles},
        **pictures,
    )
    config = ParquetSource(
        type="parquet",
        path="a.parquet",
        text=text,
        images="images",
        shuffle={"method": "none"},
        transforms=(tiles,) if transform is None else (transform(image=model.image), tiles),
    )
    tokenizer = BpeTokenizer(type="bpe", path="model")
    source = open_source(SourceSpec("see", config, seed=0, tokenizer=tokenizer, base_dir=folder))
    return source.read(0, len(rows))


def theirs(processor, messages, images):
    """Return what a processor of ``transformers`` makes of a conversation: tokens, and pixels as bytes."""
    left = iter(images)
    shown = [
        message
        | {
            "content": [
                part | {"image": Image.fromarray(next(left))} if part["type"] == "image" else part
                for part in message["content"]
            ]
        }
        for message in messages
    ]
    made = processor.apply_chat_template(
        shown, tokenize=True, return_dict=True, return_tensors="np"
    )
    if not images:
        return made["input_ids"][0].tolist(), np.empty((0, SIDE, SIDE, 3), np.uint8)
    kind = processor.image_processor
    values = np.asarray(made["pixel_values"]).reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    values = (values * np.array(kind.image_std) + np.array(kind.image_mean)) * 255
    return made["input_ids"][0].tolist(), values.round().astype(np.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_tiles_are_those_of_a_processor_that_cuts_images(tmp_path, name):
    model = MODELS[name]
    write_model(tmp_path / "model", model.template, model.special, LINES)
    (tmp_path / "model/template.jinja").write_text(model.template)
    processor = model.processor(tmp_path / "model")
    made = chats()

    block = read(
        tmp_path,
        model,
        [{"messages": messages} for messages, _ in made],
        [images for _, images in made],
        "messages",
        lambda **named: ChatTransform(type="chat", **named),
    )

    token = processor.tokenizer.convert_tokens_to_ids(model.placeholder)
    counts = set()
    for i, (messages, images) in enumerate(made):
        ids, pixels = theirs(processor, messages, images)
        assert block.tokens[i].tolist() == ids
        places = block.others["image_places"][i].reshape(-1, 2)
        assert places[:, 1].tolist() == [TOKENS] * len(pixels)
        assert block.others["grids"][i].tolist() == [4, 4] * len(pixels)
        marked = np.zeros(len(ids), np.bool_)
        for first, count in places.tolist():
            marked[first : first + count] = True
        assert np.array_equal(marked, block.tokens[i] == token)
        shown = processor.tokenizer.decode(block.tokens[i][block.others["loss_mask"][i]].tolist())
        assert "a wave 0 <b>" in shown
        assert "Look" not in shown
        patches = block.others["images"][i].reshape(len(pixels), 16, -1)
        for own, wanted in zip(patches, pixels, strict=True):
            apart = pixels_of(own, (4, 4), 14, 2).astype(int) - wanted
            assert abs(apart).max() <= model.apart
        counts.add(len(pixels) / max(1, len(images)))
    # Some images were cut, into different grids, and each tile is held once.
    assert len(counts) > 3


@pytest.mark.parametrize("name", MODELS)
def test_both_sides_of_a_pair_have_the_tiles_of_such_a_processor(tmp_path, name):
    model = MODELS[name]
    write_model(tmp_path / "model", model.template, model.special, LINES)
    (tmp_path / "model/template.jinja").write_text(model.template)
    processor = model.processor(tmp_path / "model")
    made = [(messages[:1], images) for messages, images in chats() if len(messages) == 2]
    rows = [
        {
            "prompt": messages,
            "chosen": [{"role": "assistant", "content": [{"type": "text", "text": f"yes {i}"}]}],
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": f"no {i}"}]}],
        }
        for i, (messages, _) in enumerate(made)
    ]

    block = read(
        tmp_path,
        model,
        rows,
        [images for _, images in made],
        "chosen",
        lambda **named: PreferenceTransform(type="preference", **named),
    )

    for i, (row, (_, images)) in enumerate(zip(rows, made, strict=True)):
        sides = [
            theirs(processor, row["prompt"] + row[key], images) for key in ("chosen", "rejected")
        ]
        assert block.tokens[i].tolist() == sides[0][0] + sides[1][0]
        assert block.others["rejected_at"][i].tolist() == [len(sides[0][0])]
        count = sum(len(pixels) for _, pixels in sides)
        assert block.others["grids"][i].tolist() == [4, 4] * count
        token = processor.tokenizer.convert_tokens_to_ids(model.placeholder)
        for first, length in block.others["image_places"][i].reshape(-1, 2).tolist():
            assert (block.tokens[i][first : first + length] == token).all()


@pytest.mark.parametrize("name", MODELS)
def test_pages_have_the_tokens_and_tiles_of_such_a_processor(tmp_path, name):
    model = MODELS[name]
    write_model(tmp_path / "model", model.template, model.special, LINES)
    (tmp_path / "model/template.jinja").write_text(model.template)
    processor = model.processor(tmp_path / "model")
    marker = model.image["marker"]
    pages = [f"one\n{marker}\n\ntwo {i} {marker}" for i in range(len(SIZES))]
    images = [[soft(*size), soft(*SIZES[i - 1])] for i, size in enumerate(SIZES)]
    around = {"begin": model.image.get("before"), "end": model.image["after"], "marker": marker}

    rows = [{"text": page} for page in pages]
    block = read(tmp_path, model, rows, images, "text", **around)

    for i, page in enumerate(pages):
        pictures = [Image.fromarray(each) for each in images[i]]
        made = processor(text=page, images=pictures, return_tensors="np")
        assert block.tokens[i].tolist() == made["input_ids"].reshape(-1).tolist()
        count = made["pixel_values"].size // (3 * SIDE**2)
        assert block.others["grids"][i].tolist() == [4, 4] * count
        token = processor.tokenizer.convert_tokens_to_ids(model.placeholder)
        assert block.others["image_places"][i][1::2].sum() == (block.tokens[i] == token).sum()


def test_every_size_is_cut_as_the_processors_cut_it():
    class Sizes(Idefics3ImageProcessorPil):
        """Resizes nothing: its sizes are looked at."""

        def resize(self, _image, size, **_):
            return np.broadcast_to(np.uint8(0), (3, size.height, size.width))

    theirs_of = Sizes(do_image_splitting=True)
    aspect = ImageTiles(size=448, max_tiles=12)
    few = ImageTiles(size=384, max_tiles=7, min_tiles=2)
    edge = ImageTiles(size=364, longest_edge=1456)
    odd = ImageTiles(size=64, longest_edge=321)
    rng = np.random.default_rng(1)
    sizes = np.exp(rng.uniform(0, np.log(6000), (4000, 2))).astype(int) + 1
    # Squares, and whole tiles: where grids are as near as each other.
    sizes = [*sizes.tolist(), *([s, s] for s in range(1, 1400, 7)), [448, 1344], [896, 448]]
    for height, width in sizes:
        for tiles in (aspect, few):
            columns, rows = get_optimal_tiled_canvas(
                (height, width), (tiles.size, tiles.size), tiles.min_tiles, tiles.max_tiles
            )
            assert grid_of(height, width, tiles) == (rows, columns)
        for tiles in (edge, odd):
            assert grid_of(height, width, tiles) == split_of(theirs_of, height, width, tiles)


def split_of(processor, height, width, tiles):
    """Return the rows and columns of ``Idefics3ImageProcessor``, by its own methods."""
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    size = get_resize_output_image_size(image, tiles.longest_edge)
    resized = processor.resize(image, SizeDict(height=size[0], width=size[1]))
    whole = processor.resize_for_vision_encoder(resized, tiles.size)
    _, rows, columns = processor.split_images(whole, {"longest_edge": tiles.size})
    return rows or 1, columns or 1
