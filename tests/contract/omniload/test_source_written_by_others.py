"""Data sets as other people's libraries write them, kept as they came out of each.

``tests/support/written_by_others.json`` holds twelve documents, each as a text and as ids, written by the
libraries that it names: files by path, deflated, in base64.
"""

import base64
import zlib
from pathlib import Path

import orjson
import pytest

from omniload.base.errors import ConfigError
from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import (
    ArrowSource,
    MdsSource,
    MegatronSource,
    ParquetSource,
    ShuffleConfig,
    WebDatasetSource,
)
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.source_contract import expected_tokens, samples

WRITTEN = orjson.loads(
    Path(__file__).parents[2].joinpath("support/written_by_others.json").read_bytes()
)
TEXTS = [f'document {i} {"é" * i} "quoted"\nline two' for i in range(12)]
IDS = [[(i * 37 + j) % 500 for j in range(3 + i)] for i in range(12)]
PLAIN = ShuffleConfig(method="none")

TEXT_SOURCES = {
    "datasets": ArrowSource(type="arrow", path="saved", text="text", shuffle=PLAIN),
    "datasets by glob": ArrowSource(type="arrow", path="saved/*.arrow", text="text", shuffle=PLAIN),
    "mds plain": MdsSource(type="mds", path="raw", text="text", shuffle=PLAIN),
    "mds zstd": MdsSource(type="mds", path="zstd/index.json", text="text", shuffle=PLAIN),
    # Texts that do not fit the dictionary are written by what they begin with.
    "parquet-rs": ParquetSource(type="parquet", path="*.parquet", text="text", shuffle=PLAIN),
    "webdataset text": WebDatasetSource(
        type="webdataset", path="shard-{000..001}.tar", shuffle=PLAIN
    ),
    "webdataset json": WebDatasetSource(
        type="webdataset", path="*.tar", text="json", shuffle=PLAIN
    ),
}
ID_SOURCES = {
    "datasets": ArrowSource(type="arrow", path="saved", tokens="tokens", shuffle=PLAIN),
    "mds of one dtype": MdsSource(type="mds", path="raw", tokens="tokens", shuffle=PLAIN),
    "mds of any dtype": MdsSource(type="mds", path="zstd", tokens="any", shuffle=PLAIN),
    "mds of bytes": MdsSource(
        type="mds", path="raw", tokens="packed", dtype="uint16", shuffle=PLAIN
    ),
    "megatron uint16": MegatronSource(type="megatron", path="u16", shuffle=PLAIN),
    "megatron int32": MegatronSource(type="megatron", path="i32.idx", shuffle=PLAIN),
}


@pytest.fixture
def folder(tmp_path):
    def unpacked(writer):
        for name, content in WRITTEN[writer.partition(" ")[0]]["files"].items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(zlib.decompress(base64.b64decode(content)))
        return tmp_path

    return unpacked


def read(config, folder, tokenizer=None):
    source = open_source(SourceSpec("web", config, seed=1, tokenizer=tokenizer, base_dir=folder))
    assert source.positions_per_epoch == 12
    return samples(source.read(0, 12))


@pytest.mark.parametrize("writer", TEXT_SOURCES)
def test_texts_come_as_they_were_written(writer, folder):
    tokens = read(TEXT_SOURCES[writer], folder(writer), ByteTokenizer(type="bytes"))

    assert tokens == [expected_tokens(text) for text in TEXTS]


@pytest.mark.parametrize("writer", ID_SOURCES)
def test_ids_come_as_they_were_written(writer, folder):
    assert read(ID_SOURCES[writer], folder(writer)) == [tuple(ids) for ids in IDS]


NUMBER = {"dtype": "int64", "of": "samples"}
NUMBERED = {
    "webdataset json": {"number": {"column": "n"} | NUMBER},
    "webdataset text": {
        "number": {"column": "n"} | NUMBER,
        "label": {"column": ".cls"} | NUMBER,
        "name": {"column": "__key__", "dtype": "text", "of": "samples"},
    },
    "mds plain": {"number": {"column": "n"} | NUMBER},
    "mds zstd": {"number": {"column": "n"} | NUMBER},
}


@pytest.mark.parametrize("writer", NUMBERED)
def test_values_beside_the_texts_are_those_of_their_records(writer, folder):
    base, config = folder(writer), TEXT_SOURCES[writer]
    config = type(config).model_validate(config.model_dump() | {"columns": NUMBERED[writer]})
    spec = SourceSpec("web", config, tokenizer=ByteTokenizer(type="bytes"), base_dir=base)

    block = open_source(spec).read(0, 12)

    found = {name.partition(":")[0]: column for name, column in block.others.items()}
    assert found["number"].values_V.tolist() == [*range(12)]
    if "label" in found:
        assert found["label"].values_V.tolist() == [*range(12)]
        assert found["name"][11].tobytes() == b"sample-0011"


def test_arrays_of_one_shape_come_as_they_were_written(folder):
    config = MdsSource(type="mds", path="zstd", tokens="fixed", shuffle=PLAIN)

    assert read(config, folder("mds")) == [tuple(range(i, i + 4)) for i in range(12)]


def test_a_folder_of_several_splits_names_them(folder):
    config = ArrowSource(type="arrow", path="dict", text="text")

    with pytest.raises(ConfigError, match=r"json: test, train; .*, such as .*dict/train$"):
        read(config, folder("datasets"))


@pytest.mark.parametrize("key", ["_indices_files", "_indices_data_files"])
def test_rows_that_are_chosen_by_an_index_are_refused_by_name(folder, key):
    state = folder("datasets") / "saved/state.json"
    saved = orjson.loads(state.read_bytes()) | {key: [{"filename": "indices.arrow"}]}
    state.write_bytes(orjson.dumps(saved))

    with pytest.raises(ConfigError, match=rf"state\.json: {key} is .*flatten_indices"):
        read(TEXT_SOURCES["datasets"], state.parents[1], ByteTokenizer(type="bytes"))
