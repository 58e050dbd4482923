"""What ``show`` tells of a snapshot."""

import json
from dataclasses import replace

import pytest

from snapshot.env.showing import format_bytes, show_difference, show_one, summary_of
from tests.unit.test_snapshot_env_manifest import HEAD, MANIFEST

DOCUMENT = {"version": 1, "command": ["pip", "install", "a b"]}


def a_manifest(**document):
    return replace(MANIFEST, head=replace(HEAD, document={**DOCUMENT, **document}))


@pytest.mark.parametrize(
    ("size_bytes", "told"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_345, "12.3 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_540_000, "1.5 MB"),
        (52_000_000_000, "52.0 GB"),
        (3_100_000_000_000, "3.1 TB"),
        (9_999_000_000_000_000, "9999.0 TB"),
    ],
)
def test_sizes_are_told_in_the_largest_unit_of_which_there_is_one(size_bytes, told):
    assert format_bytes(size_bytes) == told


def test_a_summary_is_json_and_quotes_the_command():
    found = json.loads(json.dumps(summary_of(a_manifest())))

    assert found["command"] == "pip install 'a b'"
    assert (found["files"], found["deleted"], found["raw_bytes"]) == (2, 1, 6)
    assert found["created"] == "1970-01-01T00:00:00+00:00"


def test_names_of_any_bytes_can_be_told(capsys):
    show_one(a_manifest(), files=True, as_json=False)
    told = capsys.readouterr().out

    assert "lib/p/na\\udcffme" in told
    assert "numpy==2" in told
    show_one(a_manifest(), files=True, as_json=True)
    assert len(json.loads(capsys.readouterr().out)["paths"]) == len(MANIFEST.entries)


def test_a_difference_names_what_only_one_has(capsys):
    show_difference(a_manifest(), a_manifest(prefix="/x"), as_json=False)

    assert capsys.readouterr().out == 'prefix: (absent) -> "/x"\n'
