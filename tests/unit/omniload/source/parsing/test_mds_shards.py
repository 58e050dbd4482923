"""Files with the name of an MDS index that are none."""

from types import SimpleNamespace

import pytest

from omniload.base.errors import ConfigError
from omniload.source.parsing.mds_shards import shards_in


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"chunks": [], "config": {}}, "an index of litdata, whose chunks are not read; name the"),
        ({"version": 1, "shards": []}, "is of version 1, with list as shards; an index of MDS"),
    ],
    ids=["litdata", "another version"],
)
def test_another_index_is_told_as_what_it_is(content, said):
    with pytest.raises(ConfigError, match=rf"^data/index\.json: .*{said}"):
        shards_in(SimpleNamespace(path="data/index.json"), content)
