"""Shards replaced by others of their name and size between two starts of a run: told by what they hold."""

import gzip
import os
import shutil

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import StateError
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source import tokenize
from tests.support.plane.builders import a_mix

BYTES = {"type": "bytes"}


def parquet_of(seed):
    """Return a shard of documents of one length; shards of other seeds have the same size and the same footer."""
    tokens = np.random.default_rng(seed).integers(0, 100, (200, 9)).astype(np.int32)
    tokens[:2, 0] = 0, 99  # the statistics of every shard
    column = pa.array(list(tokens), pa.list_(pa.int32()))
    out = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"tokens": column}),
        out,
        compression="none",
        use_dictionary=False,
        row_group_size=50,
    )
    return out.getvalue().to_pybytes()


def jsonl_of(seed):
    letters = np.random.default_rng(seed).integers(97, 123, (200, 20)).astype(np.uint8)
    return b"".join(b'{"text": "%s"}\n' % row.tobytes() for row in letters)


def gzip_of(seed):
    """Return stored deflate blocks: equal lines give equal sizes."""
    return gzip.compress(jsonl_of(seed), compresslevel=0, mtime=0)


def text_of(seed):
    return np.random.default_rng(seed).integers(97, 123, 200).astype(np.uint8).tobytes()


KINDS = {
    "parquet": (parquet_of, "parquet", {"type": "parquet", "tokens": "tokens"}),
    "jsonl": (jsonl_of, "jsonl", {"type": "jsonl"}),
    "jsonl.gz": (gzip_of, "jsonl.gz", {"type": "jsonl"}),
    "text": (text_of, "txt", {"type": "text", "files_per_unit": 2}),
}


@pytest.fixture(params=list(KINDS))
def world(request, tmp_path):
    """Return two sources of one format whose shards have the same names and sizes, and a way to open them."""
    content_of, suffix, declared = KINDS[request.param]
    for number, name in enumerate(("web", "code")):
        for shard in range(6):
            file = tmp_path / name / f"{shard}.{suffix}"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content_of(10 * number + shard))
    sources = {name: {**declared, "path": f"{name}/*.{suffix}"} for name in ("web", "code")}
    mix = a_mix(sources=sources, tokenizer=BYTES)
    return tmp_path, mix, content_of, suffix


def resumed(folder, mix, state=None):
    """Start or resume with a kept index; return the state after two steps."""
    spec = PlaneSpec(
        mix=mix,
        base_dir=folder,
        tree=ClientPlaceTree.of(),
        state=state,
        cache_dir=folder / "index",
    )
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        client.next_batch()
        client.next_batch()
        return orjson.loads(orjson.dumps(client.state_dict()))


def replaced(file, content, *, in_place=False):
    """Put other bytes of the same size in the place of a file, with its time."""
    times = file.stat()
    assert len(content) == times.st_size, "the test is of shards of one size"
    assert content != file.read_bytes()
    new = file if in_place else file.with_name("new")
    new.write_bytes(content)
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.replace(file)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shard", [0, 5])
def test_a_shard_replaced_by_one_of_its_size_and_time_is_refused(world, shard, in_place):
    folder, mix, content_of, suffix = world
    state = resumed(folder, mix)

    replaced(folder / "web" / f"{shard}.{suffix}", content_of(99), in_place=in_place)

    with pytest.raises(
        StateError,
        match=r"\(sources\.web\.content: \w+ saved, \w+ now, of source .web. the bytes in files",
    ):
        resumed(folder, mix, state)


def test_two_folders_that_were_swapped_are_refused(world):
    folder, mix, _, _ = world
    state = resumed(folder, mix)

    (folder / "web").rename(folder / "other")
    (folder / "code").rename(folder / "web")
    (folder / "other").rename(folder / "code")

    with pytest.raises(StateError, match=r"sources\.code\.content: .*; sources\.web\.content: "):
        resumed(folder, mix, state)


def test_data_that_was_copied_elsewhere_resumes(world, tmp_path):
    folder, mix, _, _ = world
    state = resumed(folder, mix)
    moved = tmp_path / "moved"
    for name in ("web", "code"):
        shutil.copytree(folder / name, moved / name, copy_function=shutil.copyfile)

    assert resumed(moved, mix, state)["step"] == 4


def test_another_version_of_the_tokenizers_library_is_refused(tmp_path, monkeypatch):
    library = tokenize.tokenizers
    model = library.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    library.Tokenizer(model).save(str(tmp_path / "t.json"))
    (tmp_path / "a.jsonl").write_bytes(jsonl_of(1))
    mix = a_mix(
        sources={"web": {"type": "jsonl", "path": "a.jsonl"}},
        tokenizer={"type": "bpe", "path": "t.json"},
    )
    state = resumed(tmp_path, mix)

    monkeypatch.setattr(tokenize.tokenizers, "__version__", "0.1")

    with pytest.raises(
        StateError, match=r"tokenizer\.library: tokenizers .* saved, tokenizers 0\.1"
    ):
        resumed(tmp_path, mix, state)
