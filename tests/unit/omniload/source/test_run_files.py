"""Files of a run, which no source may take."""

from pathlib import Path

import pytest

from omniload.base.errors import ConfigError
from omniload.source.patterns import FileNames, find_files
from omniload.source.run_files import require_apart

LINES = FileNames(suffixes=frozenset({".jsonl"}))
JOURNAL = '{"version":3,"base":{"version":2,"step":0}}\t0123456789abcdef\n'


def found(folder, pattern):
    return [file.path for file in find_files([pattern], folder, source="web", names=LINES)]


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.aside-2"])
def test_a_journal_is_refused_with_what_it_is(tmp_path, name):
    written(tmp_path / "d/old" / name, JOURNAL)

    with pytest.raises(ConfigError) as error:
        find_files(["d/**/*.jsonl*"], tmp_path, source="web")

    assert str(error.value) == (
        f"sources.web.path: 'd/**/*.jsonl*' takes {tmp_path}/d/old/{name}, the journal of a run of omniload, which is "
        "no data and grows as the run goes on; narrow the pattern, or put run_dir elsewhere"
    )


def test_a_journal_on_a_store_is_refused(tmp_path, memory):
    memory.pipe("/d/a.jsonl", b"{}")
    memory.pipe("/d/run/journal.jsonl", JOURNAL.encode())

    with pytest.raises(ConfigError, match="the journal of a run of omniload"):
        found(tmp_path, "memory://d/**/*.jsonl")


@pytest.mark.parametrize(
    "name", ["losses/rank-0.jsonl", "log.jsonl", "groups.jsonl", "groups.jsonl.aside-1"]
)
def test_what_else_lies_in_the_folder_of_a_run_is_refused(tmp_path, name):
    written(tmp_path / "d/run.json", '{\n  "version": 1,\n  "lives": []}')
    written(tmp_path / "d" / name, "{}")

    with pytest.raises(
        ConfigError, match=rf"/d/{name}, which is no data: .*/d is the folder of a run"
    ):
        find_files(["d/**/*.jsonl*"], tmp_path, source="web")


def test_data_may_be_called_as_files_of_a_run_are_and_lie_below_its_folder(tmp_path):
    names = ["d/journal.jsonl", "d/logs/a.jsonl", "d/log.jsonl", "run/data/a.jsonl"]
    for name in names:
        written(tmp_path / name, '{"text": "version base"}\n')
    written(tmp_path / "run/journal.jsonl", JOURNAL)

    assert found(tmp_path, "d/**/*.jsonl") == [f"{tmp_path}/{name}" for name in sorted(names[:3])]
    assert found(tmp_path, "run/data/*.jsonl") == [f"{tmp_path}/run/data/a.jsonl"]


def is_taken(folder, pattern, run_dir="run", *, has_journal=True):
    try:
        require_apart(
            "web",
            pattern,
            folder,
            Path(folder, run_dir),
            has_journal=has_journal,
            taken=LINES.taken,
        )
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(
    ("pattern", "run_dir"),
    [
        *(("**/*.jsonl", "run"), ("**", "run"), ("**/run/*.jsonl", "run"), ("*.jsonl", "")),
        *(("d", "d/run"), ("link/*/*.jsonl", "d/run"), ("link", "d/run"), ("{d,c}/**/*l", "d/a/b")),
        *(
            ("./d/./**/**/j*", "d/run"),
            ("_*/*.jsonl", "_runs"),
            (".*/*", ".runs"),
            ("d/.r/*", "d/.r"),
        ),
        ("d", "link/run"),
    ],
)
def test_a_pattern_takes_the_journal_of_a_run_that_is_not_there_yet(tmp_path, pattern, run_dir):
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to("d")

    assert is_taken(tmp_path, pattern, run_dir)
    assert is_taken(tmp_path, f"{tmp_path}/{pattern}", run_dir)
    assert is_taken(tmp_path, f"file://{tmp_path}/{pattern}", run_dir)
    (tmp_path / run_dir).mkdir(exist_ok=True, parents=True)
    written(tmp_path / run_dir / "journal.jsonl", JOURNAL)
    with pytest.raises(ConfigError, match="the journal of a run"):  # because the listing has it
        found(tmp_path, pattern)


@pytest.mark.parametrize(
    ("pattern", "run_dir"),
    [
        *(("*.jsonl", "run"), ("*/*.jsonl", "."), ("d/*.jsonl", "d/run"), ("**/*.jsonl", "../run")),
        *(
            ("**/*.jsonl", "_runs"),
            ("**/*.jsonl", ".runs"),
            ("d", "d/_runs"),
            ("d/**/*.txt", "d/run"),
        ),
        *(("d/a.jsonl", "d"), ("*/*/*.jsonl", "run"), ("**/a/*.jsonl", "a/b"), ("{d,e}/{x", "d")),
    ],
)
def test_a_pattern_leaves_the_journal_of_a_run_alone(tmp_path, pattern, run_dir):
    (tmp_path / "d").mkdir()

    assert not is_taken(tmp_path, pattern, run_dir)


def test_a_journal_that_lies_on_a_store_is_taken_by_no_pattern_for_the_run_s_folder(tmp_path):
    assert is_taken(tmp_path, "**/*.jsonl")
    assert not is_taken(tmp_path, "**/*.jsonl", has_journal=False)
    assert is_taken(tmp_path, "**/*.json", has_journal=False)
