"""Splits by the names of files: a folder of the Hub has training data next to other data."""

import pytest

from omniload.source.patterns import FileNames, find_files
from omniload.source.run_files import split_of

PARQUET = FileNames(suffixes=frozenset({".parquet"}))


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("/web/data/train-00000-of-00002.parquet", "train"),
        ("/web/data/Validation-00000-of-00001.parquet", "validation"),
        ("hf://datasets/org/web/test.jsonl", "test"),
        ("/web/dev/000.parquet", "validation"),
        ("/web/train/part-0.parquet", "train"),
        ("/web/training_data/part-0.parquet", None),
        ("/web/trains-0.parquet", None),
        ("/test/web/000.parquet", None),
        ("000.parquet", None),
    ],
)
def test_a_split_is_known_by_the_file_or_its_folder(path, split):
    assert split_of(path) == split


def taken(folder, names, patterns, caplog):
    """Return the warnings when patterns are looked for in a folder of such files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    caplog.clear()
    find_files(patterns, folder, source="web", names=PARQUET)
    return caplog.text


HUB = [
    "hub/data/train-00000-of-00002.parquet",
    "hub/data/train-00001-of-00002.parquet",
    "hub/data/validation-00000-of-00001.parquet",
    "hub/data/test-00000-of-00001.parquet",
]


@pytest.mark.parametrize("pattern", ["hub", "hub/**/*.parquet"])
def test_a_pattern_that_takes_what_was_held_out_is_warned_of(pattern, tmp_path, caplog):
    text = taken(tmp_path, HUB, [pattern], caplog)

    assert f"sources.web.path: '{pattern}' takes files of 3 splits, by their names" in text
    assert "(test 1, train 2, validation 1)" in text


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (HUB, ["hub/data/train-*.parquet"]),
        (HUB, ["hub/data/train-*.parquet", "hub/data/test-*.parquet"]),
        (HUB, ["hub/data/{train,test}-*.parquet"]),
        (["a/test.parquet", "a/train.parquet", "a/model.parquet"], ["a"]),
        (["a/test-0.parquet", "a/validation-0.parquet"], ["a"]),
    ],
)
def test_splits_that_are_named_one_by_one_and_other_files_are_not_warned_of(
    names, patterns, tmp_path, caplog
):
    assert not taken(tmp_path, names, patterns, caplog)
