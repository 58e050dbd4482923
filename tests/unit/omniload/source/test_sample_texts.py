"""Texts of a Python installation."""

import pytest

from omniload.source.sample_texts import Installation, functions_and_docstrings, texts_of

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
