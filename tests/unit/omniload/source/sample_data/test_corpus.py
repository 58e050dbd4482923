"""The sample corpus, from a tiny installation, and the texts of one."""

import errno
import os

import numpy as np
import pytest
from pydantic import TypeAdapter

from omniload.base.errors import ConfigError
from omniload.mix.config import SourceConfig
from omniload.source.record_source import open_source
from omniload.source.sample_data import corpus as sample_corpus
from omniload.source.sample_data.corpus import (
    Installation,
    build_sample_corpus,
    functions_and_docstrings,
    texts_of,
    this_installation,
)
from omniload.source.spec import SourceSpec

SIZE = 200_000


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    root = tmp_path_factory.mktemp("python")
    lib, packages = root / "lib", root / "lib" / "site-packages"
    for folder in (lib / "test", lib / "pydoc_data", packages / "a-1.dist-info"):
        folder.mkdir(parents=True)
    for i in range(12):
        body = "\n\n".join(
            f'def function_{k}(value):\n    """Add {k} to the value, which is a number of module {i}."""\n'
            f"    total = value + {k}\n    return total\n"
            for k in range(20)
        )
        (lib / f"module_{i}.py").write_text(body)
    for i in range(3):
        (lib / "test" / f"test_{i}.py").write_text(f"assert {i} == value\n" * 2000)
    (lib / "pydoc_data" / "topics.py").write_text(
        f"topics = {{'if': {'The if statement. ' * 20!r}}}"
    )
    (packages / "a-1.dist-info" / "METADATA").write_text("Name: a\nSummary: a package\n")
    return Installation(stdlib=lib, site_packages=packages)


@pytest.fixture(scope="module")
def corpus(installation, tmp_path_factory):
    return build_sample_corpus(
        tmp_path_factory.mktemp("corpora") / "c",
        size=SIZE,
        vocab_size=400,
        installation=installation,
    )


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_sources_of_every_format_are_built(corpus):
    kinds = {
        source.name: (source.config["type"], source.config["path"]) for source in corpus.sources
    }

    assert kinds == {
        "modules": ("parquet", "modules/*.parquet"),
        "functions": ("jsonl", "functions/*.jsonl.zst"),
        "docstrings": ("jsonl", "docstrings/*.jsonl"),
        "long_modules": ("parquet", "long_modules/*.parquet"),
        "notices": ("text", "notices/*.txt"),
        "reference": ("jsonl", "reference/*.jsonl.gz"),
    }


@pytest.mark.parametrize(
    "name", ["modules", "functions", "docstrings", "long_modules", "notices", "reference"]
)
def test_every_source_opens_and_holds_what_the_report_says(corpus, name):
    (reported,) = [source for source in corpus.sources if source.name == name]
    config = TypeAdapter(SourceConfig).validate_python(reported.config)

    source = open_source(
        SourceSpec(name, config, seed=1, tokenizer=corpus.tokenizer, base_dir=corpus.folder)
    )
    lengths = source.read(0, source.positions_per_epoch).table.lengths_N

    assert source.positions_per_epoch == reported.records
    assert lengths.sum() == reported.tokens
    assert np.bincount(np.log2(lengths).astype(int)).tolist() == list(reported.lengths_log2)


def test_shards_are_several_where_there_are_records_for_them(corpus):
    assert len(list((corpus.folder / "modules").iterdir())) == 4
    assert len(list((corpus.folder / "functions").iterdir())) == 3
    assert len(list((corpus.folder / "docstrings").iterdir())) == 2


def test_a_second_call_returns_what_is_there(corpus, installation, monkeypatch):
    monkeypatch.setattr(sample_corpus, "_gather", lambda *_: pytest.fail("built again"))

    again = build_sample_corpus(corpus.folder, size=SIZE, installation=installation)

    assert (corpus.built, again.built) == (True, False)
    assert again.sources == corpus.sources
    assert again.vocab_size == corpus.vocab_size
    assert again.folder == corpus.folder


def test_building_twice_gives_the_same_bytes(corpus, installation, tmp_path):
    other = build_sample_corpus(
        tmp_path / "d", size=SIZE, vocab_size=400, installation=installation
    )

    assert files_of(other.folder) == files_of(corpus.folder)


def test_text_stays_near_the_size_asked_for(installation, tmp_path):
    small = build_sample_corpus(
        tmp_path / "s", size=20_000, vocab_size=300, installation=installation
    )

    largest_document = 40_000
    assert sum(source.text_bytes for source in small.sources) < 20_000 + 6 * largest_document
    assert small.vocab_size <= 300


def test_an_empty_folder_is_filled(installation, tmp_path):
    assert build_sample_corpus(
        tmp_path, size=20_000, vocab_size=300, installation=installation
    ).built
    assert (tmp_path / "corpus.json").is_file()


def test_a_build_that_fails_leaves_nothing_behind(installation, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(sample_corpus, "_write_source", fail)

    with pytest.raises(OSError, match="disk full"):
        build_sample_corpus(tmp_path / "c", size=20_000, vocab_size=300, installation=installation)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "why"), [(errno.EBUSY, "a mount point"), (errno.EXDEV, "a mount point")]
)
def test_a_mount_point_is_refused_before_anything_is_read(
    installation, tmp_path, monkeypatch, number, why
):
    target = tmp_path / "c"
    target.mkdir()
    told = []

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("omniload.source.sample_data.kept.os.replace", refuse)

    with pytest.raises(
        ConfigError, match=rf"c: no other folder .* \({why}\).* such as .*/c/corpus"
    ):
        build_sample_corpus(
            target, size=20_000, installation=installation, progress=lambda *said: told.append(said)
        )

    assert told == []
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_to_an_empty_folder_is_refused_before_anything_is_read(installation, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "c").symlink_to("there")
    told = []

    with pytest.raises(
        ConfigError, match=r"c: no other folder can take its place \(Not a directory"
    ):
        build_sample_corpus(
            tmp_path / "c",
            size=20_000,
            installation=installation,
            progress=lambda *said: told.append(said),
        )

    assert told == []
    assert {path.name for path in tmp_path.iterdir()} == {"c", "there"}


def test_the_first_of_two_builders_wins(installation, tmp_path, monkeypatch):
    target = tmp_path / "c"
    train = sample_corpus.train_tokenizer

    def build_meanwhile(*arguments):
        monkeypatch.setattr(sample_corpus, "train_tokenizer", train)
        build_sample_corpus(target, size=20_000, vocab_size=300, installation=installation)
        return train(*arguments)

    monkeypatch.setattr(sample_corpus, "train_tokenizer", build_meanwhile)
    second = build_sample_corpus(target, size=20_000, vocab_size=300, installation=installation)

    assert not second.built
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_progress_rises_to_the_end(installation, tmp_path):
    told = []

    build_sample_corpus(
        tmp_path / "c",
        size=20_000,
        vocab_size=300,
        installation=installation,
        progress=lambda stage, part: told.append((stage, part)),
    )

    parts = [part for _, part in told]
    assert parts == sorted(parts)
    assert told[-1] == ("done", 1.0)


def test_the_running_python_holds_every_kind_of_text():
    installation = this_installation()

    assert len(installation.modules()) > 50
    assert installation.reference()
    assert installation.long_modules()


MODULE = '''"""Says what the module is for, at some length, so that it counts."""


@decorated
def long_enough(x):
    """Says what the function is for, at some length."""
    return x


class Thing:
    def method(self):
        y = 1
        return y

    def short(self): return 1
'''


@pytest.fixture
def folder(tmp_path):
    def write(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


def an_installation(folder):
    return Installation(stdlib=folder / "lib", site_packages=folder / "lib" / "site-packages")


def names(paths):
    return sorted(path.name for path in paths)


def test_modules_are_the_library_s_own_without_tests_and_packages(folder):
    found = an_installation(
        folder(
            {
                "lib/a.py": "a",
                "lib/sub/b.py": "b",
                "lib/test/t.py": "t",
                "lib/sub/tests/u.py": "u",
                "lib/site-packages/p.py": "p",
                "lib/__pycache__/c.py": "c",
                "lib/d.txt": "d",
            }
        )
    ).modules()

    assert names(found) == ["a.py", "b.py"]


def test_the_order_of_modules_is_that_of_a_digest_and_does_not_depend_on_the_place(
    folder, tmp_path
):
    installation = an_installation(folder({f"lib/m{i}.py": "x" for i in range(20)}))
    here = [path.name for path in installation.modules()]
    (tmp_path / "lib").rename(tmp_path / "elsewhere")
    moved = Installation(stdlib=tmp_path / "elsewhere", site_packages=tmp_path)

    assert [path.name for path in moved.modules()] == here
    assert here != sorted(here)


def test_long_modules_are_tests_where_there_are_any(folder):
    installation = an_installation(
        folder(
            {
                "lib/test/big.py": "x" * 40_000,
                "lib/test/small.py": "x",
                "lib/site-packages/huge.py": "x" * 50_000,
            }
        )
    )

    assert names(installation.long_modules()) == ["big.py"]


def test_long_modules_are_packages_where_tests_are_shipped_apart(folder):
    installation = an_installation(folder({"lib/site-packages/p/huge.py": "x" * 50_000}))

    assert names(installation.long_modules()) == ["huge.py"]


def test_long_modules_are_the_library_s_own_where_there_is_nothing_else(folder):
    installation = an_installation(folder({"lib/big.py": "x" * 40_000}))

    assert names(installation.long_modules()) == ["big.py"]


def test_notices_are_metadata_and_licences(folder):
    installation = an_installation(
        folder(
            {
                "lib/LICENSE.txt": "the library's",
                "lib/site-packages/a-1.dist-info/METADATA": "Name: a",
                "lib/site-packages/a-1.dist-info/licenses/LICENSE.MIT": "mit",
                "lib/site-packages/a-1.dist-info/LICENCE": "mit",
                "lib/site-packages/a-1.dist-info/RECORD": "no notice",
            }
        )
    )

    assert names(installation.notices()) == ["LICENCE", "LICENSE.MIT", "LICENSE.txt", "METADATA"]


def test_the_reference_is_read_without_running_it(folder):
    installation = an_installation(
        folder({"lib/pydoc_data/topics.py": "raise SystemExit\ntopics = {'b': 'two', 'a': 'one'}"})
    )

    assert [(t.name, t.text) for t in installation.reference()] == [("a", "one"), ("b", "two")]


@pytest.mark.parametrize("content", ["x = 1", ""])
def test_a_reference_of_another_form_is_none(folder, content):
    assert an_installation(folder({"lib/pydoc_data/topics.py": content})).reference() == []


def test_an_installation_without_reference_has_none(tmp_path):
    assert an_installation(tmp_path).reference() == []


def test_files_are_read_up_to_the_budget_and_undecodable_ones_passed_over(folder):
    root = folder({"a": "aaaa", "b": b"\xff", "c": "  \n", "d": "nul\0", "e": "eeee", "f": "ffff"})

    texts = texts_of([root / name for name in "abcdef"] + [root / "gone"], 6)

    assert [text.name for text in texts] == ["a", "e"]


def test_functions_come_whole_with_decorators_and_without_indent(folder):
    root = folder({"m.py": MODULE})

    functions, docstrings = functions_and_docstrings(
        [root / "m.py"], function_bytes=1000, docstring_bytes=1000
    )

    assert [f.name for f in functions] == ["m.long_enough", "m.method"]
    assert functions[0].text.startswith("@decorated\ndef long_enough(x):\n")
    assert functions[1].text == "def method(self):\n    y = 1\n    return y\n"
    assert [d.name for d in docstrings] == ["m.", "m.long_enough"]


def test_cutting_stops_at_each_budget(folder):
    root = folder({"m.py": MODULE})

    functions, docstrings = functions_and_docstrings(
        [root / "m.py"] * 50, function_bytes=1, docstring_bytes=200
    )

    assert len(functions) == 1
    assert 3 <= len(docstrings) <= 5


def test_modules_that_are_no_python_are_passed_over(folder):
    root = folder({"old.py": "print 'x'", "odd.py": '"' + "\\d" * 30 + '"\n', "nul.py": "\0"})

    found = functions_and_docstrings(
        [root / "old.py", root / "odd.py", root / "nul.py"], function_bytes=9, docstring_bytes=9
    )

    assert [len(texts) for texts in found] == [0, 1]


def test_a_docstring_with_a_lone_surrogate_is_passed_over(folder):
    root = folder({"m.py": '"' + "\\ud800" * 50 + '"\n'})

    assert functions_and_docstrings([root / "m.py"], function_bytes=9, docstring_bytes=9) == (
        [],
        [],
    )
