"""Token ids in files of numpy's."""

import numpy as np
import pytest

from omniload.base.errors import ConfigError
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


@pytest.mark.parametrize("kind", ["uint16", "int16"])
def test_an_end_of_documents_that_no_id_of_the_file_can_be_is_refused(tmp_path, kind):
    np.save(tmp_path / "a.npy", np.array([5, 6, 0], kind))
    files = find_files(["*.npy"], tmp_path, source="web")
    largest = int(np.iinfo(kind).max)

    assert NumpyFormat(
        files, NumpySource(type="numpy", path="*.npy", end_of_document=largest)
    ).units().rows_U.tolist() == [1]
    with pytest.raises(ConfigError, match=rf"ids of {kind}, up to {largest}.* {largest + 1}"):
        NumpyFormat(files, NumpySource(type="numpy", path="*.npy", end_of_document=largest + 1))
