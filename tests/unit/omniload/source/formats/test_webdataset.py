"""Samples of archives by their users' names for the members."""

import gzip
import io
import re
import tarfile

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from omniload.mix.config import ByteTokenizer
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import WebDatasetSource
from omniload.source.formats.opening import open_format
from omniload.source.parsing.image_cells import ENCODED_SIZES
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.drawn import png_of, ramp


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_a_sample_is_found_by_the_key_that_it_has_in_its_archive(tmp_path, packed):
    keys = [f"folder/é-{i}" for i in range(9)]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for key in keys:
            for extension, held in (("jpg", b"\0" * 70_000), ("txt", key.encode())):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(held)
                archive.addfile(info, io.BytesIO(held))
    shard = tmp_path / ("a.tar" if packed is bytes else "a.tar.gz")
    shard.write_bytes(packed(out.getvalue()))
    config = WebDatasetSource(type="webdataset", path="a.tar*", text="txt", unit=200_000)
    tokenizer = ByteTokenizer(type="bytes")
    source = open_source(SourceSpec("web", config, seed=0, tokenizer=tokenizer, base_dir=tmp_path))

    samples = source.read(0, 9)

    drawn = [bytes(samples.tokens[i][:-1].tolist()).decode() for i in range(9)]
    found = [source.place_at(position) for position in samples.table.positions_N.tolist()]
    assert sorted(drawn) == keys
    assert drawn != keys
    assert found == [(str(shard), f"sample {key!a}") for key in drawn]


def archive(path, members):
    with tarfile.open(path, "w") as out:
        for name, held in members.items():
            info = tarfile.TarInfo(name)
            if held is None:
                info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
            else:
                info.size = len(held)
            out.addfile(info, io.BytesIO(held or b""))


def records_of(folder, members, **keys):
    archive(folder / "a.tar", members)
    config = WebDatasetSource(type="webdataset", path="a.tar", **keys)
    return open_format(SourceSpec("web", config, base_dir=folder)).format.read_unit(0)


CAPTIONED = {
    "x/0.txt": b"a caption",
    "x/0.json": b'{"similarity": 0.4, "sha256": "s"}',
    "x/1.txt": b"\xff, and left out",
    "x/1.json": b'{"similarity": 0.1, "sha256": "t"}',
    "x/2.txt": b"null",
    "x/2.json": b'{"similarity": null, "sha256": "u"}',
    "x/3.txt": b"without an object",
    "x/4.txt": b"another kind",
    "x/4.json": b'{"similarity": "0.9", "sha256": 7}',
    "x/5.txt": b"a list",
    "x/5.json": b"[]",
    "x/6.txt": b"an integer",
    "x/6.json": b'{"similarity": 1, "sha256": 7}',
    "x/7.txt": b"a link",
    "x/7.json": None,
    "x/8.txt": b"no such key",
    "x/8.json": b'{"similarity": 1}',
}


def test_conditions_and_keys_of_samples_are_read_from_their_object(tmp_path):
    records = records_of(
        tmp_path,
        CAPTIONED,
        where={"similarity": {"at_least": 0.3}},
        known_by="sha256",
        splits={"eval": 0.5},
    )

    assert records.kept_B.tolist() == [True, False, False, *[True] * 6]
    assert records.bad_B.tolist() == [False, False, False, True, True, True, False, True, True]
    assert records.keys_B[[0, 6]].tolist() == [key_of(b"s"), key_of(b"7")]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (3, "has no member .json; it has .txt"),
        (4, "'similarity' is '0.9', not a number, as where.similarity asks for"),
        (5, ".json is a JSON list, not an object"),
        (7, ".json is a symbolic link, whose bytes lie elsewhere; pack it with tar --dereference"),
        (8, "has no key 'sha256'; it has similarity"),
    ],
)
def test_a_sample_whose_object_does_not_fit_is_told_by_its_name(tmp_path, number, said):
    members = {name: held for name, held in CAPTIONED.items() if name.startswith(f"x/{number}.")}
    records = records_of(
        tmp_path,
        members,
        where={"similarity": {"at_least": 0.3}},
        known_by="sha256",
        splits={"eval": 0.5},
    )

    assert records.reason.startswith(f"{tmp_path}/a.tar: sample 'x/{number}' at byte 0: {said}")


def test_a_sample_is_known_by_the_name_that_its_library_gives_it(tmp_path):
    members = {f"a/{i}.{name}": b"t" for i in range(3) for name in ("txt", "cls")}

    records = records_of(tmp_path, members, known_by="__key__", splits={"eval": 0.5})

    assert records.keys_B.tolist() == [key_of(f"a/{i}".encode()) for i in range(3)]


@pytest.mark.parametrize("known_by", ["__key__", "id"])
def test_the_object_that_holds_the_text_is_read_for_conditions_too(tmp_path, known_by):
    members = {
        f"{i}.seg.json": orjson.dumps({"text": f"t{i}", "n": i, "id": f"{i}"}) for i in range(3)
    }

    records = records_of(
        tmp_path, members, text="seg.json", where={"n": [0, 2]}, known_by=known_by, dedupe="key"
    )

    assert records.usable_B.tolist() == [True, False, True]
    assert records.column[2].tobytes() == b"t2"
    assert records.keys_B[[0, 2]].tolist() == [key_of(b"0"), key_of(b"2")]


def npy(value, **options):
    out = io.BytesIO()
    np.save(out, value, **options)
    return out.getvalue()


OWN = {
    "lang": {"column": "lang", "dtype": "text", "of": "samples", "default": "xx"},
    "label": {"column": ".cls", "dtype": "int64", "of": "samples", "default": -1},
    "score": {"column": ".score.npy", "dtype": "float64", "of": "samples", "default": 0},
    "name": {"column": "__key__", "dtype": "text", "of": "samples"},
}
SCORED = {
    "x/0.txt": b"all",
    "x/0.cls": b"7\n",
    "x/0.json": b'{"lang": "en"}',
    "x/0.score.npy": npy(0.5),
    "x/1.txt": b"none",
    "x/2.txt": b"null",
    "x/2.json": b'{"lang": null}',
}


def test_columns_are_read_from_members_an_object_and_the_name(tmp_path):
    records = records_of(tmp_path, SCORED, columns=OWN)

    lang, label, score, name = records.others.values()
    assert not records.bad_B.any()
    assert [lang[i].tobytes() for i in range(3)] == [b"en", b"xx", b"xx"]
    assert label.values_V.tolist() == [7, -1, -1]
    assert score.values_V.tolist() == [0.5, 0, 0]
    assert [name[i].tobytes() for i in range(3)] == [b"x/0", b"x/1", b"x/2"]


@pytest.mark.parametrize(
    ("member", "held", "said"),
    [
        ("cls", b"cat", r"\.cls is 'cat', not an integer of 64 bits"),
        ("cls", b"\xff", r"\.cls is not UTF-8"),
        ("cls", None, r"\.cls is a symbolic link"),
        ("json", b"[]", r"\.json is a JSON list, not an object"),
        ("json", b'{"lang": 7}', "'lang' is 7, not a string"),
        ("score.npy", npy(np.ones(2)), r"\.score\.npy: is an array of float64 of the shape \(2,\)"),
        ("score.npy", npy(np.array({}, object), allow_pickle=True), "is an array of object"),
        ("score.npy", b"0.5", "its header cannot be read"),
    ],
)
def test_a_member_that_is_no_value_of_its_column_is_one_bad_record(tmp_path, member, held, said):
    records = records_of(tmp_path, {"y/9.txt": b"t", f"y/9.{member}": held} | SCORED, columns=OWN)

    assert records.bad_B.tolist() == [True, False, False, False]
    assert re.search(f"a.tar: sample 'y/9' at byte 0: .*{said}", records.reason)


def test_without_a_default_a_sample_that_lacks_an_object_or_a_member_is_bad(tmp_path):
    for name, said in (
        ("lang", "has no member .json; it has .txt"),
        ("label", "has no member .cls"),
    ):
        own = {name: OWN[name] | {"default": None}}
        records = records_of(tmp_path, SCORED, columns=own)
        assert records.bad_B[:2].tolist() == [False, True]
        assert f"sample 'x/1' at byte 4096: {said}" in records.reason or said in records.reason


def test_a_text_that_is_too_long_is_told_by_the_name_of_its_sample(tmp_path):
    own = {"lang": {"column": ".txt", "dtype": "text", "of": "samples"}}

    records = records_of(tmp_path, {"x/0.txt": b"s", "x/1.txt": b"t" * 4097}, columns=own)

    said = "sample 'x/1' at byte 1024: lang has 4,097 bytes of UTF-8, more than 4,096"
    assert said in records.reason


PATCHES = {"type": "images", "patch": 4, "max_patches": 36, "placeholder": 7}


@pytest.mark.parametrize("text", ["TXT", "Txt"])
def test_a_text_and_images_are_found_in_whichever_letters_a_mix_and_an_archive_have_them(
    tmp_path, text
):
    members = {"0.TXT": b"a", "0.jpg": b"b", "1.txt": b"c", "1.JPG": b"d"}

    records = records_of(tmp_path, members, text=text, images=["JPG"], transforms=[PATCHES])

    assert not records.bad_B.any()
    assert records.others[ENCODED_SIZES].lengths_N.tolist() == [1, 1]
    in_json = records_of(tmp_path, {"0.SEG.json": b'{"t": "a"}'}, text="seg.JSON", key="t")
    assert not in_json.bad_B.any()


def test_an_extension_in_capitals_is_that_in_small_letters_of_member_and_column_alike(tmp_path):
    own = {"label": OWN["label"] | {"column": ".CLS"}, "score": OWN["score"] | {"column": ".S.Npy"}}
    members = {"0.TXT": b"a", "0.cls": b"3", "0.s.NPY": npy(0.5), "1.txt": b"b", "1.Cls": b"4"}

    label, score = records_of(tmp_path, members, columns=own).others.values()

    assert label.values_V.tolist() == [3, 4]
    assert score.values_V.tolist() == [0.5, 0]


@pytest.mark.parametrize("column", [".", "..", "..cls", ".a/cls", "./cls", "." + "c" * 65])
def test_a_column_that_names_no_member_is_refused(column):
    with pytest.raises(ValidationError, match=r"named by a dot and its extension, such as \.cls"):
        WebDatasetSource(
            type="webdataset", path="a.tar", columns={"a": OWN["label"] | {"column": column}}
        )


def test_an_array_holds_no_text():
    said = {"column": ".a.npy", "dtype": "text", "of": "samples"}

    with pytest.raises(ValidationError, match="is an array of one number; say int64"):
        WebDatasetSource(type="webdataset", path="a.tar", columns={"a": said})


def test_a_sample_of_text_has_no_values_for_each_token():
    with pytest.raises(ValidationError, match="write token ids to a source of type parquet"):
        WebDatasetSource(type="webdataset", path="a.tar", columns={"w": {"column": "w"}})


def test_a_sample_with_images_has_its_columns_too(tmp_path):
    members = {}
    for i in range(6):
        members |= {f"{i}.jpg": png_of(ramp(8, 8 + 4 * (i % 2)), "JPEG")}
        members |= {f"{i}.txt": f"caption {i}".encode(), f"{i}.cls": f"{i}".encode()}
    archive(tmp_path / "a.tar", members)
    config = WebDatasetSource.model_validate(
        {
            "type": "webdataset",
            "path": "a.tar",
            "images": ["jpg"],
            "transforms": [PATCHES],
            "columns": {"label": OWN["label"]},
        }
    )
    spec = SourceSpec("web", config, tokenizer=ByteTokenizer(type="bytes"), base_dir=tmp_path)

    block = open_source(spec).read(0, 6)

    labels = block.others["label:int64:samples:-1"].values_V.tolist()
    texts = [bytes(t for t in block.tokens[i].tolist() if 31 < t < 256) for i in range(6)]
    assert sorted(labels) == [*range(6)]
    assert [text.decode() for text in texts] == [f"caption {label}" for label in labels]
    assert [len(block.others["grids"][i]) for i in range(6)] == [2] * 6
