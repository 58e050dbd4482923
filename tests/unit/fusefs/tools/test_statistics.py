"""What a mount shows of a file, whatever bytes its name has."""

import json
import os

from fusefs.tools.statistics import layout_json
from tests.support.fusefs.builders import tiny_files


def test_a_name_of_any_bytes_is_shown():
    name = os.fsdecode(b"odd\xff")
    with tiny_files() as files:
        files.write_file(name, b"1")

        shown = json.loads(layout_json(files, name))

    assert (shown["path"], shown["size_bytes"]) == ("odd\\xff", 1)
