"""Images of conversations: their places in a template, in every stored form, and mismatches."""

import base64
import io
import json
import re
import tarfile

import lance
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.mix.config import BpeTokenizer, ByteTokenizer
from omniload.mix.sources import SourceConfig
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.chats import CHATML, write_model
from tests.support.drawn import PLACEHOLDER, an_images_transform, png_of, ramp

BYTES = ByteTokenizer(type="bytes")
PARTS = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""Takes texts and parts, and writes ``[IMG]`` for an image."""
TEXTS = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PARTS_ALONE = (
    "{% for m in messages %}{{ m.role[0] }}:{% for p in m.content %}{% if p.type == 'image' %}[IMG]{% endif %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ONE, TWO = png_of(ramp(4, 4)), png_of(ramp(8, 8))
PICTURE = an_images_transform().model_dump()
ASKED = {"role": "user", "content": "<image>see"}
SAID = {"role": "assistant", "content": "yes"}


def part(text=None, **others):
    return {"type": "image", **others} if text is None else {"type": "text", "text": text}


def a_source(folder, rows, *, kind="parquet", template=PARTS, policy="raise", **changes):
    (folder / "t.jinja").write_text(template)
    chat = {"type": "chat", "template": "t.jinja", "image": "[IMG]"} | changes.pop("chat", {})
    images = PICTURE | changes.pop("pictures", {})
    named = {"path": f"a.{kind}", "text": "messages"}
    if kind == "parquet":
        # As JSON, because contents are texts and lists; a test of its own covers nested columns.
        table = {
            "messages": [
                said if isinstance(said := row["messages"], str) else json.dumps(said)
                for row in rows
            ],
            "images": pa.array([row.get("images") for row in rows], pa.list_(pa.binary())),
        }
        pq.write_table(pa.table(table), folder / "a.parquet")
        named["images"] = "images"
    else:
        (folder / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    config = {
        "type": kind,
        "transforms": [chat, images],
        "shuffle": {"method": "none"},
        "on_error": {"policy": policy},
        **named,
        **changes.pop("source", {}),
    }
    return opened(folder, config, **changes)


def opened(folder, config, *, name="see", tokenizer=BYTES, **changes):
    source = TypeAdapter(SourceConfig).validate_python(config)
    return open_source(
        SourceSpec(name, source, seed=1, tokenizer=tokenizer, base_dir=folder, **changes)
    )


def shown(block, i):
    """Return a sample's tokens as text, ``#`` for a placeholder."""
    return "".join(
        "#" if token == PLACEHOLDER else chr(token) for token in block.tokens[i].tolist()
    )


def trained(block, i):
    return "".join(
        "^" if token == PLACEHOLDER else chr(token)
        for token in block.tokens[i][block.others[LOSS_MASK][i]].tolist()
    )


FORMS = {
    "parts": [part("x "), part(), part(" y"), part()],
    "a text with markers": "x <image> y<image>",
    "parts by number": [part("x "), part(index=0), part(" y"), part(index=1)],
    "parts with names": [part("x "), part(image="a.png"), part(" y"), part(url="b.png")],
    "urls with names": [
        part("x "),
        {"type": "image_url", "image_url": {"url": "http://x/a.png"}},
        part(" y"),
        {"type": "image_url", "image_url": "b.png"},
    ],
}


@pytest.mark.parametrize("template", [PARTS, TEXTS, PARTS_ALONE], ids=["both", "texts", "parts"])
@pytest.mark.parametrize("form", FORMS)
def test_an_image_stands_where_the_template_puts_it_and_answers_alone_are_trained_on(
    tmp_path, form, template
):
    messages = [{"role": "user", "content": FORMS[form]}, SAID]

    block = a_source(
        tmp_path, [{"messages": messages, "images": [ONE, TWO]}], template=template
    ).read(0, 1)

    assert shown(block, 0) == "u:x # y####;a:yes;"
    assert trained(block, 0) == "yes;"
    assert block.others[GRIDS][0].tolist() == [1, 1, 2, 2]
    assert block.others[IMAGE_PLACES][0].tolist() == [4, 1, 7, 4]
    assert len(block.others[IMAGES][0]) == 5 * 48


WORDS = {"marker": "[IMG]", "before": "<<", "after": ">>"}
"""The text that a processor puts around the placeholders, instead of the template's text."""


@pytest.mark.parametrize("template", [PARTS, TEXTS, PARTS_ALONE], ids=["both", "texts", "parts"])
@pytest.mark.parametrize("words", [WORDS, WORDS | {"before": "[IMG"}, {"marker": "[IMG]"}])
def test_words_of_a_processor_stand_around_an_image_and_are_not_trained_on(
    tmp_path, template, words
):
    messages = [
        {"role": "user", "content": "x <image> y<image>"},
        {"role": "assistant", "content": "it <image> is"},
    ]
    row = {"messages": messages, "images": [ONE, TWO, ONE]}

    block = a_source(tmp_path, [row], template=template, chat={"image": words}).read(0, 1)

    before, after = words.get("before", ""), words.get("after", "")
    one, two = f"{before}#{after}", f"{before}####{after}"
    assert shown(block, 0) == f"u:x {one} y{two};a:it {one} is;"
    assert trained(block, 0) == "it  is;"
    firsts = block.others[IMAGE_PLACES][0][::2].tolist()
    assert firsts == [m.start() for m in re.finditer("(?<!#)#", shown(block, 0))]


def test_words_around_an_image_are_tokenised_with_the_text_beside_them(tmp_path):
    write_model(tmp_path / "model", PARTS, ["<soft>"], "a\n\nb\n\n\nc" * 200)
    messages = [{"role": "user", "content": "x\n<image>\ny"}, SAID]
    words = {"marker": "[IMG]", "before": "\n", "after": "\n\n"}
    bpe = BpeTokenizer(type="bpe", path="model")

    block = a_source(
        tmp_path,
        [{"messages": messages, "images": [ONE]}],
        chat={"image": words},
        pictures={"placeholder": "<soft>"},
        tokenizer=bpe,
    ).read(0, 1)

    library = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    whole = library.encode("u:x\n\n<soft>\n\n\ny;a:yes;", add_special_tokens=False).ids
    assert block.tokens[0].tolist() == whole
    # The last line break of the text and the first of the processor form one token.
    assert len(library.encode("x\n\n").ids) == 2


def test_a_text_that_holds_what_stands_for_the_placeholders_is_told(tmp_path):
    write_model(tmp_path / "model", PARTS, ["<soft>"])
    messages = [{"role": "user", "content": "<image> is <soft>"}, SAID]

    def opened(words, policy="raise"):
        return a_source(
            tmp_path,
            [{"messages": messages, "images": [ONE]}, {"messages": [ASKED, SAID], "images": [ONE]}],
            chat={"image": words},
            pictures={"placeholder": "<soft>"},
            tokenizer=BpeTokenizer(type="bpe", path="model"),
            policy=policy,
        )

    with pytest.raises(IntegrityError, match="a text of it holds '<soft>', which the template"):
        opened(WORDS).read(0, 2)
    assert opened(WORDS, "skip").read(0, 2).table.positions_N.tolist() == [1]
    with pytest.raises(ConfigError, match="before and after of image hold '<soft>'"):
        opened(WORDS | {"after": "<soft>>"})


def test_places_that_name_images_by_number_have_those(tmp_path):
    content = [part(index=1), part("-"), part(index=0), part(image=1)]
    messages = [{"role": "user", "content": content}, SAID]

    block = a_source(tmp_path, [{"messages": messages, "images": [ONE, TWO]}]).read(0, 1)

    assert shown(block, 0) == "u:####-#####;a:yes;"
    assert block.others[GRIDS][0].tolist() == [2, 2, 1, 1, 2, 2]


def test_images_lie_in_the_messages_of_a_line(tmp_path):
    url = "data:image/png;base64," + base64.b64encode(TWO).decode()
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, part(image=url)]
    rows = [{"messages": [{"role": "user", "content": parts}, SAID]}, {"messages": [SAID]}]

    block = a_source(tmp_path, rows, kind="jsonl").read(0, 2)

    assert [shown(block, i) for i in (0, 1)] == ["u:########;a:yes;", "a:yes;"]
    assert block.others[GRIDS].lengths_N.tolist() == [4, 0]


def test_an_image_in_an_answer_is_not_trained_on_though_the_answer_is(tmp_path):
    messages = [ASKED, {"role": "assistant", "content": "as <image>here"}]
    row = {"messages": messages, "images": [ONE, ONE]}

    block = a_source(tmp_path, [row]).read(0, 1)
    all_of_it = a_source(tmp_path, [row], chat={"loss": "all"}).read(0, 1)

    assert (shown(block, 0), trained(block, 0)) == ("u:#see;a:as #here;", "as here;")
    assert trained(all_of_it, 0) == "u:see;a:as here;"


def test_what_a_template_writes_around_an_image_may_be_part_of_it(tmp_path):
    template = PARTS.replace("[IMG]", "<v>[IMG]</v>")
    row = {"messages": [ASKED, SAID], "images": [ONE]}
    whole = {"chat": {"image": "<v>[IMG]</v>", "loss": "all"}, "pictures": {"begin": 1, "end": 2}}

    block = a_source(tmp_path, [row], template=template, **whole).read(0, 1)

    assert shown(block, 0) == "u:\x01#\x02see;a:yes;"
    assert trained(block, 0) == "u:see;a:yes;"


def test_a_table_has_every_field_in_every_part(tmp_path):
    content = [part("x "), part(index=0), part(" y")]
    rows = [[{"role": "user", "content": content}], [{"role": "user", "content": [part("z")]}]]
    table = pa.table({"messages": rows, "images": pa.array([[ONE], None], pa.list_(pa.binary()))})
    assert {"type", "text", "index"} == {
        field.name
        for field in table.schema.field("messages").type.value_type.field(1).type.value_type
    }
    source = a_source(tmp_path, [{"messages": [], "images": []}])
    pq.write_table(table, tmp_path / "a.parquet")
    # A template that checks which keys a part has, as Qwen2-VL's does.
    asks = PARTS.replace("p.type == 'image'", "'index' in p or p.type == 'image'")
    source = reopened(tmp_path, asks)

    block = source.read(0, 2)

    assert [shown(block, i) for i in (0, 1)] == ["u:x # y;", "u:z;"]


def reopened(folder, template):
    (folder / "t.jinja").write_text(template)
    config = {
        "type": "parquet",
        "path": "a.parquet",
        "text": "messages",
        "images": "images",
        "shuffle": {"method": "none"},
        "transforms": [{"type": "chat", "template": "t.jinja", "image": "[IMG]"}, PICTURE],
    }
    return opened(folder, config)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "lance"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "tools"])
def test_images_lie_in_the_messages_of_a_table_as_hugging_face_writes_them(tmp_path, kind, beside):
    # The check of Qwen2-VL's template.
    asks = PARTS.replace("p.type == 'image'", "p.type == 'image' or 'image' in p")
    (tmp_path / "t.jinja").write_text(asks)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    parts = pa.list_(pa.struct([("type", pa.string()), ("text", pa.string()), ("image", image)]))
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", parts)]))
    none = {"bytes": None, "path": None}
    content = [part("x ", image=none) | {"type": "text", "text": "x "}, part(image={"bytes": TWO})]
    table = pa.table(
        {
            "messages": pa.array([[{"role": "user", "content": content}]], messages),
            "tools": ["[]"],
        }
    )
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    elif kind == "lance":
        lance.write_dataset(table, str(tmp_path / "a.lance"))
    else:
        with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
            out.write_table(table)
    chat = {"type": "chat", "template": "t.jinja", "image": "[IMG]"}
    config = {
        "type": kind,
        "path": f"a.{kind}",
        "text": "messages",
        "transforms": [chat | ({"tools": "tools"} if beside else {}), PICTURE],
    }

    block = opened(tmp_path, config).read(0, 1)

    assert shown(block, 0) == "u:x ####;"
    assert block.others[GRIDS][0].tolist() == [2, 2]


def test_members_of_an_archive_are_the_images_of_its_conversation(tmp_path):
    (tmp_path / "t.jinja").write_text(PARTS)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (
            ("p.1.png", TWO),
            ("p.2.png", ONE),
            ("p.json", json.dumps({"messages": [{"role": "user", "content": "<image>-<image>"}]})),
        ):
            held = data if isinstance(data, bytes) else data.encode()
            member = tarfile.TarInfo(name)
            member.size = len(held)
            tar.addfile(member, io.BytesIO(held))
    config = {
        "type": "webdataset",
        "path": "a.tar",
        "text": "json",
        "key": "messages",
        "images": ["png"],
        "transforms": [{"type": "chat", "template": "t.jinja", "image": "[IMG]"}, PICTURE],
    }

    block = opened(tmp_path, config).read(0, 1)

    assert shown(block, 0) == "u:####-#;"


def test_a_conversation_longer_than_a_row_is_cut_between_images_with_its_mask(tmp_path):
    row = {"messages": [ASKED, SAID] * 3, "images": [TWO] * 3}

    block = a_source(tmp_path, [row], row_length=12).read(0, 1)

    assert "".join(shown(block, i) for i in range(len(block.tokens))) == "u:####see;a:yes;" * 3
    assert "".join(trained(block, i) for i in range(len(block.tokens))) == "yes;" * 3
    assert block.tokens.lengths_N.max() <= 12
    for i in range(len(block.tokens)):
        for first, count in block.others[IMAGE_PLACES][i].reshape(-1, 2).tolist():
            assert shown(block, i)[first : first + count] == "####"


@pytest.mark.parametrize("ahead", range(9))
def test_what_a_processor_puts_around_an_image_is_in_one_row_with_it(tmp_path, ahead):
    asked = {"role": "user", "content": "x" * ahead + "<image>see<image><image>"}
    row = {"messages": [asked, SAID], "images": [TWO] * 3}
    words = {"marker": "[IMG]", "before": "<i>", "after": "</i>"}

    block = a_source(tmp_path, [row], row_length=14, chat={"image": words}).read(0, 1)

    assert block.tokens.lengths_N.max() <= 14
    texts = [shown(block, i) for i in range(len(block.tokens))]
    assert "".join(texts) == f"u:{'x' * ahead}<i>####</i>see<i>####</i><i>####</i>;a:yes;"
    images = [len(block.others[GRIDS][i]) // 2 for i in range(len(texts))]
    assert [text.count("<i>####</i>") for text in texts] == images
    with pytest.raises(IntegrityError, match=r"image 0 makes 11 tokens, and a row of .* has 10"):
        a_source(tmp_path, [row], row_length=10, chat={"image": words}).read(0, 1)


def a_pair(folder, rows, **changes):
    (folder / "t.jinja").write_text(PARTS)
    held = pa.array([row.pop("images") for row in rows], pa.list_(pa.binary()))
    table = pa.Table.from_pylist(rows).append_column("images", held)
    pq.write_table(table, folder / "a.parquet")
    pairs = {"type": "preference", "template": "t.jinja", "image": "[IMG]"}
    config = {
        "type": "parquet",
        "path": "a.parquet",
        "text": "chosen",
        "images": "images",
        "shuffle": {"method": "none"},
        "transforms": [pairs | changes.pop("pairs", {}), PICTURE | changes.pop("pictures", {})],
        "on_error": {"policy": changes.pop("policy", "raise")},
    }
    return opened(folder, config, name="taste", **changes)


SIDES = {"chosen": [{"role": "assistant", "content": "y"}], "rejected": "nono"}
WHOLE = "u:#-####?;a:y;u:#-####?;a:nono;"


@pytest.mark.parametrize("row_length", [None, 12])
def test_a_pair_with_images_that_is_longer_than_a_row_stays_whole(tmp_path, row_length):
    pair = {"prompt": "<image>-<image>?", "images": [ONE, TWO], **SIDES}
    plain = {"prompt": "why?", "images": [], **SIDES}

    block = a_pair(tmp_path, [plain, pair], row_length=row_length).read(0, 2)

    assert [shown(block, i) for i in (0, 1)] == ["u:why?;a:y;u:why?;a:nono;", WHOLE]
    assert trained(block, 1) == "y;nono;"
    assert block.others["rejected_at"][1].tolist() == [WHOLE.index(";u") + 1]
    assert block.others[GRIDS].lengths_N.tolist() == [0, 8]
    assert block.others[IMAGE_PLACES][1].tolist() == [2, 1, 4, 4, 16, 1, 18, 4]


def test_a_pair_of_whole_conversations_has_the_images_that_both_begin_with(tmp_path):
    asked = {"role": "user", "content": "<image>-<image>?"}
    sides = {
        name: [asked, {"role": "assistant", "content": said}]
        for name, said in (("chosen", "y"), ("rejected", "nono"))
    }

    source = a_pair(tmp_path, [{"images": [ONE, TWO], **sides}], pairs={"prompt": None})

    assert shown(source.read(0, 1), 0) == WHOLE


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"images": [ONE]}, "its messages have 2 places for images, and it has 1 image"),
        ({"rejected": "no <image>"}, "an answer of it has a place for an image"),
        ({"rejected": "no [IMG]"}, r"a text of it holds '\[IMG\]'"),
        ({"images": [ONE, b"none"]}, "image 1 of 4 bytes cannot be decoded"),
        ({"rejected": ""}, "rejected is "),
    ],
)
def test_a_pair_whose_images_do_not_match_is_left_out_with_them(tmp_path, changes, fault):
    good = {"prompt": "<image>-<image>?", "images": [ONE, TWO], **SIDES}
    rows = [good, good | changes, good]

    with pytest.raises(IntegrityError, match=f"record 1, counted from 0: .*{fault}"):
        a_pair(tmp_path, [dict(row) for row in rows]).read(0, 3)
    block = a_pair(tmp_path, [dict(row) for row in rows], policy="skip").read(0, 3)

    assert block.skipped == 1
    assert [shown(block, i) for i in range(len(block.tokens))] == [WHOLE] * 2
    assert block.others[GRIDS].lengths_N.tolist() == [8, 8]


def test_patches_of_both_sides_count_for_what_a_record_may_hold(tmp_path):
    pair = {"prompt": "<image>-<image>?", "images": [ONE, TWO], **SIDES}

    with pytest.raises(IntegrityError, match="make more than max_record_patches 9"):
        a_pair(tmp_path, [dict(pair)], pictures={"max_record_patches": 9}).read(0, 1)
    block = a_pair(tmp_path, [dict(pair)], pictures={"max_record_patches": 10}).read(0, 1)

    assert shown(block, 0) == WHOLE


TEXTS_ALONE = {"form": "text", "template": None, "image": None}
END = chr(256)
"""The end of a document, to a tokenizer of bytes."""


@pytest.mark.parametrize("row_length", [None, 12])
def test_a_pair_of_texts_has_the_images_of_its_prompt_on_both_sides(tmp_path, row_length):
    said = {"chosen": "y", "rejected": "nono"}
    rows = [
        {"prompt": "why? ", "images": [], **said},
        {"prompt": "<image>-<image>? ", "images": [ONE, TWO], **said},
        {"prompt": "What? ", "images": [TWO], **said},
    ]

    block = a_pair(tmp_path, rows, pairs=TEXTS_ALONE, row_length=row_length).read(0, 3)

    found = [shown(block, i) for i in range(3)]
    assert found == [
        f"why? y{END}why? nono{END}",
        f"#-####? y{END}#-####? nono{END}",
        # In a text without a place images come first.
        f"####What? y{END}####What? nono{END}",
    ]
    assert [trained(block, i) for i in range(3)] == [f"y{END}nono{END}"] * 3
    rejected = block.others["rejected_at"]
    assert [rejected[i].tolist() for i in range(3)] == [[text.index(END) + 1] for text in found]
    assert block.others[GRIDS].lengths_N.tolist() == [0, 8, 4]
    assert block.others[IMAGE_PLACES][1].tolist() == [0, 1, 2, 4, 10, 1, 12, 4]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"images": [ONE]}, "its prompt holds '<image>' 2 times, and it has 1 image"),
        ({"rejected": "no <image>"}, "an answer of it has a place for an image"),
        ({"chosen": "\x07"}, "its text holds token 7, which stands for images"),
        ({"images": [ONE, b"none"]}, "image 1 of 4 bytes cannot be decoded"),
        ({"prompt": ""}, "prompt is "),
    ],
)
def test_a_pair_of_texts_whose_images_do_not_match_is_left_out(tmp_path, changes, fault):
    good = {"prompt": "<image>-<image>?", "images": [ONE, TWO], "chosen": "y", "rejected": "n"}
    rows = [good, good | changes, good]

    with pytest.raises(IntegrityError, match=f"record 1, counted from 0: .*{fault}"):
        a_pair(tmp_path, [dict(row) for row in rows], pairs=TEXTS_ALONE).read(0, 3)
    block = a_pair(tmp_path, [dict(row) for row in rows], pairs=TEXTS_ALONE, policy="skip").read(
        0, 3
    )

    assert block.table.positions_N.tolist() == [0, 2]
    assert block.others[GRIDS].lengths_N.tolist() == [8, 8]


def test_the_marker_of_texts_may_be_a_special_token_of_the_tokenizer(tmp_path):
    write_model(tmp_path / "model", PARTS, ["<image>", "<soft>"])
    rows = [{"prompt": "<image> see? ", "images": [ONE], "chosen": "it is", "rejected": "n"}]
    bpe = BpeTokenizer(type="bpe", path="model")
    pictures = {"placeholder": "<soft>"}

    source = a_pair(tmp_path, rows, pairs=TEXTS_ALONE, pictures=pictures, tokenizer=bpe)

    library = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    sides = [library.encode(f"<soft> see? {said}").ids for said in ("it is", "n")]
    assert source.read(0, 1).tokens[0].tolist() == sides[0] + sides[1]


DATA = "data:image/png;base64,"
BAD = {
    "an image without a place": ("see", [ONE], "have 0 places for images, and it has 1 image"),
    "a place without an image": ("<image>", [], "have 1 place for images, and it has 0 images"),
    "a name without an image": (
        [part(image="a.png")],
        None,
        "it has 0 images beside them; of 'a.png' nothing is read: it is a name",
    ),
    "a text with what the template writes": (
        "<image>[IMG]",
        [ONE, ONE],
        r"a text of it holds '\[IMG\]', which the template writes for an image",
    ),
    "a part with what the template writes": ([part(), part("[IMG]")], [ONE, ONE], "a text of it"),
    "a number that is not there": ([part(index=1)], [ONE], "its places name the images 1, counted"),
    "an image that no place names": ([part(index=1)] * 2, [ONE, ONE], "name each that there is"),
    "some numbers": ([part(index=0), part()], [ONE, ONE], "1 of its 2 places name an image by"),
    "another kind of part": ([{"type": "video"}], [], "part 0 is of type 'video'; texts and"),
    "a part of no type": (["x"], [], 'part 0 is "x", not an object with a type'),
    "a text that is none": ([{"type": "text", "text": 3}], [], "is .*3}, not a text"),
    "a path without bytes": (
        [part(image={"bytes": None, "path": "a.png"})],
        [],
        "of 'a.png' nothing is read: it is a name",
    ),
    "no base64": ([part(image=DATA + "a")], [], "its image is not base64: "),
    "an address of another kind": ([part(image="data:,a")], [], "its image is 'data:,a', not of"),
    "no image at all": ([part(image=DATA + "aGk=")], [], "image 0 of 2 bytes cannot be decoded"),
    "letters that are no ASCII": ([part(image=DATA + "é")], [], "its image is not base64: "),
    "a number that is a text": ([part(index="0")], [ONE], 'its index is "0", not an integer'),
    "a number that is a float": ([part(index=0.0)], [ONE], "its index is 0.0, not an integer"),
    "a number beyond range": ([part(index=1e300)], [ONE], r"its index is 1e\+300, not an integer"),
    "no number at all": ([part(image=True)], [ONE], "its image is true, not a data URL, a name or"),
    "a list for an image": ([part(image=["a"])], [ONE], r'its image is \["a"\], not a data URL'),
    "a list for bytes": (
        [part(image={"bytes": [1]})],
        [ONE],
        r"its image is \[1\], not a data URL",
    ),
    "a token that stands for images": ("\x07", [], "its text holds token 7, which stands for"),
}


@pytest.mark.parametrize("why", BAD)
def test_what_does_not_match_is_told_with_its_file_or_skipped_and_counted(tmp_path, why):
    content, images, fault = BAD[why]
    good = {"messages": [ASKED, SAID], "images": [ONE]}
    rows = [good, {"messages": [{"role": "user", "content": content}], "images": images}, good]

    with pytest.raises(IntegrityError, match=rf"a\.parquet: record 1, counted from 0: .*{fault}"):
        a_source(tmp_path, rows).read(0, 3)
    block = a_source(tmp_path, rows, policy="skip").read(0, 3)

    assert block.skipped == 1
    assert block.table.positions_N.tolist() == [0, 2]
    assert [shown(block, i) for i in (0, 1)] == ["u:#see;a:yes;"] * 2


DEEP = "[" * 1000 + "]" * 1000
"""JSON that is read, and that Python neither writes nor goes through by calls."""
TOO_DEEP = [
    DEEP,
    f'[{{"content": {DEEP}}}]',
    f'[{{"role": "user", "content": {DEEP}}}]',
    f'[{{"role": "user", "content": [{{"type": "image", "index": {DEEP}}}]}}]',
]


@pytest.mark.parametrize("messages", TOO_DEEP, ids=["messages", "no role", "a part", "a number"])
def test_messages_that_nest_deeper_than_python_calls_are_bad_ones(tmp_path, messages):
    source = a_source(tmp_path, [{"messages": messages}], policy="skip")

    assert source.read(0, 1).skipped == 1


def test_what_lies_deep_beside_a_text_is_looked_through_for_what_the_template_writes(tmp_path):
    deep = "[" * 900 + '"[IMG]"' + "]" * 900
    messages = f'[{{"role": "user", "content": "x", "more": {deep}}}]'

    with pytest.raises(IntegrityError, match="a text of it holds"):
        a_source(tmp_path, [{"messages": messages}]).read(0, 1)


def test_an_image_that_the_template_leaves_out_is_told(tmp_path):
    silent = PARTS.replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}")
    answered = [ASKED, {"role": "assistant", "content": "<image>"}]

    with pytest.raises(
        IntegrityError, match=r"writes '\[IMG\]' once, and its messages have 2 images"
    ):
        a_source(
            tmp_path,
            [{"messages": answered, "images": [ONE, ONE]}],
            template=silent,
            chat={"loss": "all"},
        ).read(0, 1)


def test_tools_that_hold_what_the_template_writes_are_told(tmp_path):
    row = {"messages": {"messages": [ASKED], "tools": [{"name": "[IMG]"}]}, "images": [ONE]}

    with pytest.raises(IntegrityError, match="a text of it holds"):
        a_source(tmp_path, [row]).read(0, 1)


@pytest.mark.parametrize(
    ("template", "image", "fault"),
    [
        (PARTS, "<pad>", r"t\.jinja: image is '<pad>', but for an image and a text the template"),
        (PARTS.replace("[IMG]", "[IMG][IMG]"), "[IMG]", "for an image, once, or use a template"),
        ("{{ bos_token }}", "[IMG]", "writes nothing for a message of a user"),
    ],
)
def test_a_template_that_writes_no_such_marker_is_refused(tmp_path, template, image, fault):
    with pytest.raises(ConfigError, match=fault) as told:
        a_source(
            tmp_path,
            [{"messages": [ASKED], "images": [ONE]}],
            template=template,
            chat={"image": image},
        )

    assert told.value.__notes__ == ["transforms of sources.see"]


def test_a_template_that_writes_what_stands_around_an_image_itself_is_refused(tmp_path):
    template = PARTS.replace("[IMG]", "\x01[IMG]\x02")

    with pytest.raises(ConfigError, match="the template itself writes token 1"):
        a_source(
            tmp_path,
            [{"messages": [SAID]}],
            template=template,
            pictures={"begin": 1, "end": 2},
        )


def test_a_special_token_is_one_wherever_it_stands_and_texts_around_it_stay_whole(tmp_path):
    write_model(tmp_path / "model", CHATML, ("<image>", "<pad>"))
    row = {"messages": [{"role": "user", "content": "a<image> b"}, SAID], "images": [ONE]}
    bpe = BpeTokenizer(type="bpe", path="model")
    common = {
        "template": CHATML,
        "tokenizer": bpe,
        "pictures": {"placeholder": "<pad>"},
    }

    block = a_source(tmp_path, [row], chat={"image": "<image>"}, **common).read(0, 1)
    # In words that are no token of it, texts are taken apart at them.
    apart = a_source(tmp_path, [row], chat={"image": "[IMG]"}, **common).read(0, 1)

    assert block.tokens[0].tolist() == apart.tokens[0].tolist()
    assert np.array_equal(block.others[LOSS_MASK][0], apart.others[LOSS_MASK][0])


def a_table(*transforms, **changes):
    config = {"type": "parquet", "path": "a", "text": "t", "images": "pictures"} | changes
    return TypeAdapter(SourceConfig).validate_python(config | {"transforms": list(transforms)})


CHAT = {"type": "chat", "image": "[IMG]"}


@pytest.mark.parametrize(
    ("transforms", "changes", "fault"),
    [
        (
            [{"type": "chat"}, PICTURE],
            {},
            "chat is followed by images but has no image; give the text",
        ),
        ([CHAT], {"images": None}, r"image is '\[IMG\]', and no transform makes patches of images"),
        ([CHAT], {}, r"image is '\[IMG\]', and no transform makes patches"),
        ([PICTURE, CHAT], {}, "chat comes after images, which go into its messages; put images"),
        ([CHAT, PICTURE, PICTURE], {}, "images comes after another"),
        (
            [CHAT, {"type": "filter"}, PICTURE],
            {},
            "images comes after another, chat, and one transform makes tokens",
        ),
        (
            [{"type": "preference", "form": "text", "image": "x"}, PICTURE],
            {},
            "form is text, so no template writes anything for an image; leave image out",
        ),
        ([CHAT, PICTURE, {"type": "concat", "tokens": 8}], {}, "and the source has images"),
        (
            [CHAT, PICTURE, {"type": "concat", "tokens": 8}],
            {"images": None},
            "and the source has images",
        ),
    ],
)
def test_transforms_that_do_not_fit_are_refused(transforms, changes, fault):
    with pytest.raises(ValidationError, match=fault):
        a_table(*transforms, **changes)


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_a_transform_without_images_is_written_as_before_there_were_any(kind):
    (written,) = a_table({"type": kind}, images=None).model_dump(mode="json")["transforms"]

    assert "image" not in written


def test_a_map_of_text_may_come_before():
    mapped = {"type": "map", "function": "f"}

    source = a_table(mapped, CHAT, PICTURE)

    assert source.images_transform is not None
    assert source.is_nested
