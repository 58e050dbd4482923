"""A gzip layer is read in parts whoever wrote it: zlib, GNU gzip, pigz, Go."""

import gzip
import hashlib

import pytest

from snapshot.image.layer.index_making import index_gzip
from snapshot.oci.digest import digest_of
from tests.support.snapshot.gzip_writers import WRITERS, mixed_files, mixed_tar
from tests.support.snapshot.image_builders import read_stream


class Held:
    """Blocks of a blob in memory, each decoded from its own bytes alone."""

    def __init__(self, blob):
        self.blob = blob

    def block(self, index, number):
        offset, size = index.blob_range(number)
        return index.decode(number, self.blob[offset : offset + size])


@pytest.mark.parametrize("writer", WRITERS)
def test_every_file_of_a_gzip_layer_is_read_from_its_spans(tmp_path, writer):
    tar, files = mixed_tar(), mixed_files()
    blob = WRITERS[writer](tar)
    path = tmp_path / "layer.gz"
    path.write_bytes(blob)

    index = index_gzip(path, digest_of(blob))

    assert gzip.decompress(blob) == tar
    assert len(index.blocks_B) > 1
    source = Held(blob)
    read = {
        entry.path: b"".join(
            read_stream(index, source, e.stream_offset, e.size_bytes) for e in entry.extents
        )
        for entry in index.entries
    }
    assert {name: hashlib.sha256(data).hexdigest() for name, data in read.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    # Entered anywhere: a read of a few bytes decodes the span that holds them and no other.
    for offset in range(0, len(tar) - 7, 97_003):
        assert read_stream(index, source, offset, 7) == tar[offset : offset + 7]
