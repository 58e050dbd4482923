"""Lists of shards that lie next to the shards."""

import pytest

from omniload.base.errors import IntegrityError
from omniload.source.files import local_file
from omniload.source.parsing.shard_lists import read_json


@pytest.mark.parametrize("content", ["", "[]", "{", "3"])
def test_a_list_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "list.json").write_text(content)

    with pytest.raises(IntegrityError, match=r"list\.json: is"):
        read_json(local_file(str(tmp_path / "list.json")))
