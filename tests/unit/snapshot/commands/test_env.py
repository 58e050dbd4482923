"""What ``show`` tells of a snapshot."""

import json
import re
from dataclasses import replace

from snapshot.commands.env import lines_of, summary_of
from tests.unit.snapshot.env.format.test_manifest import HEAD, MANIFEST

DOCUMENT = {"version": 1, "command": ["pip", "install", "a b"]}


def a_manifest(**document):
    return replace(MANIFEST, head=replace(HEAD, document={**DOCUMENT, **document}))


def test_the_size_of_a_small_snapshot_is_told_in_a_unit_of_which_there_is_one():
    told = "\n".join(lines_of(summary_of(a_manifest()), whole=True))

    assert re.search(r"^size +6 B, .* added to the store$", told, re.MULTILINE)


def test_a_summary_is_json_and_quotes_the_command():
    found = json.loads(json.dumps(summary_of(a_manifest())))

    assert found["command"] == "pip install 'a b'"
    assert (found["files"], found["deleted"], found["raw_bytes"]) == (2, 1, 6)
    assert found["created"] == "1970-01-01T00:00:00+00:00"


def test_all_of_a_snapshot_is_told_in_lines_and_its_outline_in_one():
    found = summary_of(a_manifest())

    assert "numpy==2" in "\n".join(lines_of(found, whole=True))
    (line,) = lines_of(found, whole=False)
    assert line.endswith("2 files  6 B  pip install 'a b'")
