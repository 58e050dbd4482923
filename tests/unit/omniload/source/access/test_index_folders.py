"""Indexes of other mix files: when they are looked for."""

import numpy as np
import pytest

from omniload.source import index
from omniload.source.access.index_folders import index_folder, indexes_beside
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.patterns import find_files


def units_of(_):
    numbers = np.arange(3)
    return FileUnits(rows=np.ones(3, np.int64), starts=numbers, stops=numbers + 1, content="x")


@pytest.fixture
def looked_for(tmp_path, monkeypatch):
    """Open the source of a mix file; return how often folders of other mix files were looked into."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "a.x").write_bytes(bytes(3))

    def opened(mix):
        looked = []

        def counted(own):
            looked.append(own)
            yield from indexes_beside(own)

        monkeypatch.setattr(index, "indexes_beside", counted)
        cache = IndexCache(folder=index_folder(tmp_path / mix), source="web")
        index_of(find_files(["*.x"], tmp_path, source="web"), units_of, kind="k", cache=cache)
        return len(looked)

    return opened


def test_no_folder_of_another_mix_file_is_looked_into_once_the_own_index_has_every_file(looked_for):
    assert [looked_for("one.yaml"), looked_for("two.yaml")] == [1, 1]

    assert [looked_for("one.yaml"), looked_for("two.yaml")] == [0, 0]
