"""Images and text: cut into patches, placed among the tokens, never split; a bad image is reported or skipped."""

import io
import struct
import sys
import tarfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from PIL import Image
from pydantic import TypeAdapter

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.mix.config import BpeTokenizer, ByteTokenizer, SourceConfig
from omniload.mix.schema.transforms import ClampTransform, FilterTransform
from omniload.mix.sources import ArrowSource, ParquetSource, WebDatasetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.transforms.image_patches import patches_of, pixels_of
from tests.support.chats import CHATML, write_model
from tests.support.drawn import (
    END,
    PLACEHOLDER,
    an_images_transform,
    open_pictures,
    png_of,
    ramp,
    shown,
)

BYTES = ByteTokenizer(type="bytes")
IMAGE = an_images_transform()


def written(folder, texts, images, kind=None):
    cells = pa.array(images, kind or pa.list_(pa.binary()))
    pq.write_table(pa.table({"text": texts, "pictures": cells}), folder / "a.parquet")


def a_source(folder, *, transforms=(IMAGE,), **options):
    return open_pictures(folder, *transforms, **options)


def test_an_image_stands_where_its_marker_does_and_is_not_trained_on(tmp_path):
    written(tmp_path, ["a <image>b <image>"], [[png_of(ramp(8, 12)), png_of(ramp(4, 4))]])

    block = a_source(tmp_path).read(0, 1)

    assert shown(block, 0) == "a ######b #$"
    assert block.others[GRIDS][0].tolist() == [2, 3, 1, 1]
    assert block.others[IMAGE_PLACES][0].tolist() == [2, 6, 10, 1]
    trained = block.others[LOSS_MASK][0]
    assert np.flatnonzero(~trained).tolist() == [2, 3, 4, 5, 6, 7, 10]


def test_images_of_a_text_without_a_marker_come_first(tmp_path):
    written(tmp_path, ["two"], [[png_of(ramp(4, 4)), png_of(ramp(4, 8))]])

    assert shown(a_source(tmp_path).read(0, 1), 0) == "###two$"


def test_patches_hold_the_pixels_row_by_row_and_those_of_a_token_lie_together(tmp_path):
    pixels = ramp(16, 16)
    written(tmp_path, ["x"], [[png_of(pixels)]])

    block = a_source(tmp_path, transforms=(an_images_transform(merge=2),)).read(0, 1)

    patches = block.others[IMAGES][0].reshape(16, 4, 4, 3)
    assert shown(block, 0) == "####x$"
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0)]
    for patch, (row, column) in zip(patches, order, strict=False):
        wanted = pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert np.array_equal(patch, wanted)


def test_what_stands_around_an_image_is_part_of_it(tmp_path):
    around = an_images_transform(begin=1, end=2)
    written(tmp_path, ["a<image>b"], [[png_of(ramp(4, 4))]])

    block = a_source(tmp_path, transforms=(around,)).read(0, 1)

    assert block.tokens[0].tolist() == [ord("a"), 1, PLACEHOLDER, 2, ord("b"), END]
    assert block.others[LOSS_MASK][0].tolist() == [True, False, False, False, True, True]
    assert block.others[IMAGE_PLACES][0].tolist() == [2, 1]


@pytest.mark.parametrize("row_length", [None, 12])
def test_what_begins_a_document_moves_its_images_on(tmp_path, row_length):
    write_model(tmp_path / "model", CHATML)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    written(
        tmp_path,
        ["one <image>two <image>three", "", "<image>"],
        [[png_of(ramp(8, 8)), png_of(ramp(4, 8))], [], [png_of(ramp(4, 4))]],
    )
    plain, begun = (
        a_source(
            tmp_path,
            tokenizer=BpeTokenizer(type="bpe", path="model", end_of_document="<eos>", **said),
            row_length=row_length,
        ).read(0, 3)
        for said in ({}, {"begin_of_document": "<bos>"})
    )

    first = library.token_to_id("<bos>")
    if row_length is None:
        assert [begun.tokens[i].tolist() for i in range(2)] == [
            [first, *plain.tokens[i].tolist()] for i in range(2)
        ]
        assert begun.others[IMAGE_PLACES][0][::2].tolist() == [
            at + 1 for at in plain.others[IMAGE_PLACES][0][::2].tolist()
        ]
        assert not begun.others[LOSS_MASK][0][0]
        return
    # Rows are cut between images, so each has the same patches, and its placeholders at the recorded places.
    for block in (plain, begun):
        for i in range(len(block.tokens)):
            tokens, places = block.tokens[i], block.others[IMAGE_PLACES][i].reshape(-1, 2)
            assert len(tokens) <= row_length
            assert sum(places[:, 1]) == np.count_nonzero(tokens == PLACEHOLDER)
            for at, count in places.tolist():
                assert (tokens[at : at + count] == PLACEHOLDER).all()
    assert begun.tokens[0][0] == first
    assert len(begun.others[IMAGES].values_V) == len(plain.others[IMAGES].values_V)


def test_an_image_behind_what_begins_a_document_is_left_out_whole_by_a_clamp(tmp_path):
    write_model(tmp_path / "model", CHATML)
    begun = BpeTokenizer(type="bpe", path="model", begin_of_document="<bos>")
    written(tmp_path, ["x<image>"], [[png_of(ramp(4, 12))]])

    def lengths(tokens):
        clamp = ClampTransform(type="clamp", tokens=tokens)
        block = a_source(tmp_path, transforms=(IMAGE, clamp), tokenizer=begun).read(0, 1)
        return len(block.tokens[0]), block.others[IMAGE_PLACES][0].tolist()

    # The beginning, a letter and three placeholders.
    assert lengths(5) == (5, [2, 3])
    assert lengths(4) == (2, [])


@pytest.mark.parametrize(
    ("size", "grid"),
    [((400, 400), (6, 6)), ((10, 4000), (1, 36)), ((2, 2), (1, 1)), ((300, 600), (4, 8))],
)
def test_an_image_is_shrunk_to_the_most_patches_and_keeps_its_aspect(tmp_path, size, grid):
    written(tmp_path, ["x"], [[png_of(ramp(*size))]])

    assert tuple(a_source(tmp_path).read(0, 1).others[GRIDS][0].tolist()) == grid


def test_cells_may_be_bytes_or_what_hugging_face_writes(tmp_path):
    one = png_of(ramp(4, 4))
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    written(tmp_path, ["x", "y"], [{"bytes": one, "path": "a.png"}, None], struct)
    objects = a_source(tmp_path).read(0, 2)
    written(tmp_path, ["x", "y"], [one, None], pa.binary())
    plain = a_source(tmp_path).read(0, 2)

    assert [shown(objects, i) for i in (0, 1)] == ["#x$", "y$"]
    assert [shown(plain, i) for i in (0, 1)] == ["#x$", "y$"]


def test_an_arrow_file_gives_the_same_samples(tmp_path):
    written(tmp_path, ["a<image>", "b"], [[png_of(ramp(9, 9))], []])
    table = pq.read_table(tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out,
        pa.ipc.new_file(out, table.schema) as writer,
    ):
        writer.write_table(table)
    config = ArrowSource(
        type="arrow", path="a.arrow", text="text", images="pictures", transforms=(IMAGE,)
    )

    block = open_source(SourceSpec("web", config, seed=1, tokenizer=BYTES, base_dir=tmp_path)).read(
        0, 2
    )

    assert sorted(shown(block, i) for i in (0, 1)) == ["a####$", "b$"]


@pytest.mark.parametrize("form", ["parquet", "arrow", "lance"])
def test_images_may_stand_inside_an_object_beside_their_text(tmp_path, form):
    png = png_of(ramp(9, 9))
    rows = [{"page": {"text": "a<image>", "drawn": [png]}}, {"page": None}, {"page": {"text": "b"}}]
    kind = pa.struct([("text", pa.string()), ("drawn", pa.list_(pa.binary()))])
    table = pa.Table.from_pylist(rows, pa.schema([("page", kind)]))
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "arrow":
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    else:
        pytest.importorskip("lance").write_dataset(table, path)
    said = {"type": form, "path": path.name, "text": "page.text", "images": "page.drawn"}
    said |= {"shuffle": {"method": "none"}, "transforms": (IMAGE,)}
    config = TypeAdapter(SourceConfig).validate_python(said | {"on_error": {"policy": "skip"}})

    block = open_source(SourceSpec("web", config, seed=1, tokenizer=BYTES, base_dir=tmp_path)).read(
        0, 3
    )

    assert [shown(block, i) for i in range(len(block.tokens))] == ["a####$", "b$"]


def test_members_of_an_archive_are_its_images_in_their_order(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        members = (
            ("p.1.png", png_of(ramp(4, 8))),
            ("p.0.jpg", png_of(ramp(4, 4), "JPEG")),
            ("p.txt", b"<image>-<image>"),
            ("q.txt", b"none"),
        )
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    config = WebDatasetSource(
        type="webdataset",
        path="a.tar",
        images=("jpg", "png"),
        transforms=(IMAGE,),
        shuffle={"method": "none"},
    )

    block = open_source(SourceSpec("web", config, seed=1, tokenizer=BYTES, base_dir=tmp_path)).read(
        0, 2
    )

    assert [shown(block, i) for i in (0, 1)] == ["##-#$", "none$"]


GOOD = png_of(ramp(8, 8))
BOMB = png_of(np.zeros((3000, 3000, 3), np.uint8))
_HEAD = b"IHDR" + struct.pack(">II", 20_000, 20_000) + GOOD[24:29]
# Only its header has this size, because a real one would take a second to write.
LARGEST = GOOD[:12] + _HEAD + struct.pack(">I", zlib.crc32(_HEAD)) + GOOD[33:]


@pytest.mark.parametrize(
    ("text", "images", "changes", "fault"),
    [
        (
            "x",
            [b"no image at all"],
            {},
            "image 0 of 15 bytes cannot be decoded: it begins with b'no image', as no JPEG",
        ),
        ("x", [GOOD, GOOD[: len(GOOD) // 2]], {}, "image 1 of .* cannot be decoded"),
        ("x", [GOOD[:30]], {}, "image 0 of 30 bytes cannot be decoded"),
        ("x", [png_of(ramp(8, 8), "TIFF")], {}, "cannot be decoded: it begins with "),
        ("x", [BOMB], {"max_pixels": 8_000_000}, "has 3000 x 3000 pixels, more than max_pixels"),
        (
            "x",
            [LARGEST],
            {},
            "has too many pixels for Pillow itself, more than max_pixels 67108864",
        ),
        ("<image><image>", [GOOD], {}, "holds '<image>' 2 times, and it has 1 image"),
        ("<image>", [], {}, "holds '<image>' once, and it has 0 images"),
        ("a\x07b<image>", [GOOD], {}, "its text holds token 7, which stands for images"),
        ("a\x07b", [], {}, "its text holds token 7, which stands for images"),
        ("<image>\x01", [GOOD], {"begin": 1, "end": 2}, "its text holds token 1, which stands"),
        ("\x02<image>", [GOOD], {"begin": 1, "end": 2}, "its text holds token 2, which stands"),
    ],
)
def test_what_is_no_image_is_told_with_its_file_or_skipped_and_counted(
    tmp_path, text, images, changes, fault
):
    written(tmp_path, ["one", text, "three"], [[GOOD], images, []])
    transforms = (an_images_transform(**changes),)

    with pytest.raises(IntegrityError, match=rf"a\.parquet: record 1, counted from 0: .*{fault}"):
        a_source(tmp_path, transforms=transforms).read(0, 3)
    block = a_source(tmp_path, transforms=transforms, policy="skip").read(0, 3)

    assert block.skipped == 1
    assert block.table.positions_N.tolist() == [0, 2]
    assert block.others[GRIDS].lengths_N.tolist() == [2, 0]


def test_the_first_bad_record_of_a_read_is_told_with_its_own_fault(tmp_path):
    written(tmp_path, ["a\x07", "x"], [[], [b"none"]])

    with pytest.raises(IntegrityError, match="record 0, counted from 0: its text holds token 7"):
        a_source(tmp_path).read(0, 2)


def test_the_name_of_a_special_token_in_a_text_is_refused(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    library.add_special_tokens(["<|image_pad|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, ["a<|image_pad|>a"], [[]])
    transform = an_images_transform(placeholder="<|image_pad|>")
    config = ParquetSource(
        type="parquet", path="a.parquet", text="text", images="pictures", transforms=(transform,)
    )
    bpe = BpeTokenizer(type="bpe", path="tokenizer.json")

    with pytest.raises(IntegrityError, match="its text holds token 2, which stands for images"):
        open_source(SourceSpec("web", config, seed=1, tokenizer=bpe, base_dir=tmp_path)).read(0, 1)


def test_a_record_longer_than_a_row_becomes_samples_cut_between_images(tmp_path):
    images = [png_of(ramp(8, 8)), png_of(ramp(8, 12)), png_of(ramp(4, 4))]
    written(tmp_path, ["ab", "ab<image>cd<image>ef<image>ghijklm"], [[], images])

    block = a_source(tmp_path, row_length=10).read(0, 2)

    assert [shown(block, i) for i in range(4)] == ["ab$", "ab####cd", "######ef#g", "hijklm$"]
    assert block.table.positions_N.tolist() == [0, 1, 1, 1]
    assert block.table.subs_N.tolist() == [0, 0, 1, 2]
    assert [block.others[IMAGE_PLACES][i].tolist() for i in range(4)] == [
        *([], [2, 4], [0, 6, 8, 1], [])
    ]
    whole = a_source(tmp_path).read(0, 2).others[IMAGES][1]
    parts = np.concatenate([block.others[IMAGES][i] for i in range(4)])
    assert np.array_equal(parts, whole)


def test_an_image_that_no_row_holds_is_refused_with_what_to_lower(tmp_path):
    written(tmp_path, ["x"], [[png_of(ramp(24, 24))]])

    with pytest.raises(IntegrityError, match=r"makes 36 tokens, and a row of pack\.length has 20"):
        a_source(tmp_path, row_length=20).read(0, 1)


def test_a_clamp_leaves_an_image_out_whole_and_a_filter_all_of_a_sample(tmp_path):
    images = [png_of(ramp(4, 4)), png_of(ramp(8, 8))]
    written(tmp_path, ["a<image>b<image>", "c"], [images, []])
    clamp = ClampTransform(type="clamp", tokens=5)
    long = FilterTransform(type="filter", min_tokens=3)

    block = a_source(tmp_path, transforms=(IMAGE, clamp, long)).read(0, 2)

    assert [shown(block, i) for i in range(len(block.tokens))] == ["a#b"]
    assert block.others[GRIDS].values_V.tolist() == [1, 1]
    assert len(block.others[IMAGES].values_V) == 48


@pytest.mark.parametrize(
    ("most", "kept", "images"),
    [
        (1, "a", 0),
        (2, "ab", 0),
        (3, "ab", 0),
        (4, "ab", 0),
        (5, "ab\x01#\x02", 1),
        (6, "ab\x01#\x02c", 1),
    ],
)
def test_a_clamp_leaves_out_what_stands_around_an_image_with_it(tmp_path, most, kept, images):
    written(tmp_path, ["ab<image>cd"], [[png_of(ramp(4, 4))]])
    around = an_images_transform(begin=1, end=2)
    clamp = ClampTransform(type="clamp", tokens=most)

    block = a_source(tmp_path, transforms=(around, clamp)).read(0, 1)

    assert shown(block, 0) == kept
    assert len(block.others[GRIDS][0]) == 2 * images


def test_a_record_of_too_many_patches_is_bad_before_all_are_decoded(tmp_path):
    small, many = png_of(ramp(8, 8)), png_of(ramp(4, 4))
    written(tmp_path, ["a", "b"], [[small] * 3, [many]])
    few = an_images_transform(max_record_patches=8)

    with pytest.raises(
        IntegrityError, match="its first 3 of 3 images make more than max_record_patches 8"
    ):
        a_source(tmp_path, transforms=(few,)).read(0, 2)
    block = a_source(tmp_path, transforms=(few,), policy="skip").read(0, 2)

    assert [len(block.others[GRIDS][i]) // 2 for i in range(len(block.tokens))][-1] == 1


@pytest.mark.parametrize("kind", [np.uint16, np.uint8])
def test_grey_of_16_bits_is_its_upper_8(tmp_path, kind):
    grey = (np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024).astype(np.uint16)
    out = io.BytesIO()
    Image.fromarray((grey >> (0 if kind is np.uint16 else 8)).astype(kind)).save(out, "PNG")
    written(tmp_path, ["a"], [[out.getvalue()]])

    block = a_source(tmp_path).read(0, 1)

    (grid,) = block.others[GRIDS][0].reshape(-1, 2).tolist()
    pixels = pixels_of(block.others[IMAGES][0].reshape(-1, 4 * 4 * 3), grid, 4, 1)
    assert (pixels == (grey >> 8)[..., None]).all()


@pytest.mark.parametrize("transparency", [bytes(range(16)), 3])
def test_colours_beneath_transparency_show_without_a_warning(tmp_path, transparency):
    image, out = Image.fromarray(ramp(8, 8)).quantize(16), io.BytesIO()
    image.save(out, "PNG", transparency=transparency)
    written(tmp_path, ["a"], [[out.getvalue()]])

    block = a_source(tmp_path).read(0, 1)

    pixels = pixels_of(block.others[IMAGES][0].reshape(-1, 4 * 4 * 3), (2, 2), 4, 1)
    assert (pixels == np.asarray(image.convert("RGB"))).all()


def test_a_row_that_names_the_path_of_an_image_and_not_its_bytes_is_bad(tmp_path):
    objects = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = [{"bytes": png_of(ramp(4, 4)), "path": None}, {"bytes": None, "path": "b.png"}]
    written(tmp_path, ["a", "b"], cells, objects)

    with pytest.raises(IntegrityError, match="row 1: an image has a path and no bytes"):
        a_source(tmp_path).read(0, 2)
    skipping = a_source(tmp_path, policy="skip").read(0, 2)

    assert [shown(skipping, i) for i in range(len(skipping.tokens))] == ["#a$"]


def test_a_picture_is_turned_upright(tmp_path):
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.fromarray(ramp(4, 12)).save(out, "PNG", exif=exif)
    written(tmp_path, ["x"], [[out.getvalue()]])

    assert a_source(tmp_path).read(0, 1).others[GRIDS][0].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"placeholder": 257}, "placeholder is 257, and the tokenizer has 257 tokens"),
        ({"begin": "<vision>"}, "begin is '<vision>', not in the vocabulary"),
    ],
)
def test_a_token_that_the_tokenizer_has_not_is_refused(tmp_path, changes, fault):
    written(tmp_path, ["x"], [[]])

    with pytest.raises(ConfigError, match=fault):
        a_source(tmp_path, transforms=(an_images_transform(**changes),))


def test_without_pillow_the_message_says_what_to_install(tmp_path, monkeypatch):
    written(tmp_path, ["x"], [[]])
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "omniload.source.transforms.image_decoding", raising=False)

    with pytest.raises(ConfigError, match=r"needs the package PIL.*omniload-data\[images\]"):
        a_source(tmp_path)


def test_a_column_that_holds_no_images_is_refused(tmp_path):
    written(tmp_path, ["x"], [[1]], pa.list_(pa.int64()))

    with pytest.raises(
        ConfigError, match=r"'pictures' is list<.*int64>, not images.*write their bytes"
    ):
        a_source(tmp_path)


@pytest.mark.parametrize(("patch", "merge"), [(4, 1), (4, 2), (2, 3)])
def test_an_image_comes_together_again_from_its_patches(patch, merge):
    side = patch * merge
    pixels = ramp(2 * side, 3 * side)

    patches = patches_of(pixels, patch, merge)

    assert np.array_equal(pixels_of(patches, (2 * merge, 3 * merge), patch, merge), pixels)
