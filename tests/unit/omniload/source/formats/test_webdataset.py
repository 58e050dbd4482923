"""Samples of archives by what their user calls them."""

import gzip
import io
import tarfile

import orjson
import pytest

from omniload.mix.config import ByteTokenizer
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import WebDatasetSource
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec


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
