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


def test_names_of_any_bytes_can_be_told():
    found = summary_of(a_manifest(), files=True)

    told = "\n".join(lines_of(found, whole=True))
    assert "lib/p/na\\udcffme" in told
    assert "numpy==2" in told
    assert len(json.loads(json.dumps(found))["paths"]) == len(MANIFEST.entries)
    assert "paths" not in summary_of(a_manifest())
