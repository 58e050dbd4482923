"""Samples of archives by what their user calls them."""

import gzip
import io
import tarfile

import pytest

from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import WebDatasetSource
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
