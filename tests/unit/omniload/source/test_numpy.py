"""Token ids in files of numpy's."""

import numpy as np

from omniload.mix.sources import NumpySource
from omniload.source.formats.numpy import NumpyFormat
from omniload.source.patterns import find_files


def test_first_records_are_those_of_the_first_shard_that_holds_any(tmp_path):
    for name, ids in (("a", []), ("b", [5, 6, 0, 7, 0])):
        np.save(tmp_path / f"{name}.npy", np.array(ids, np.uint16))
    files = find_files(["*.npy"], tmp_path, source="web")
    config = NumpySource(type="numpy", path="*.npy", end_of_document=0)

    first = NumpyFormat(files, config).first_records()

    assert [first.column[i].tolist() for i in range(len(first.column))] == [[5, 6, 0], [7, 0]]
    assert len(NumpyFormat(files[:1], config).first_records().column) == 0
