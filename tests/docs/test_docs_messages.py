"""Messages that pages quote, for a reader to find by what is seen, are messages that the code can give."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.docs.snippets import documents
from tests.house.modules import source_files, tree_of

OTHERS = {
    "strftime_now is undefined",
    "SecurityError",
    "Gloo connectFullMesh failed",
    "'DataLoader' object is not subscriptable",
}
"""What jinja says, of a template that it refuses; torch, of ranks that are gone; and Python, of what is no dataset."""

HOLE = "\0"
"""Where a message takes a value."""

_ROW = re.compile(r"^\| (.+?) \|")
_HEADS = {"you see", "message"}
_QUOTE = re.compile(r"`([^`]+)`")
_VALUE = re.compile(r"\[[^\]]*\]|'[^']*'|\S*[\d=/_]\S*|[^\s]+\.[^\s]+\w|\.\.\.")
"""What stands in a quote for a value of that day: lists, quoted names, numbers, paths, keys, and what is left out."""


def quotes() -> Iterator[tuple[str, str]]:
    """Yield each page with each message of its tables of what is seen."""
    for path in documents():
        inside = False
        for line in path.read_text(encoding="utf-8").splitlines():
            row = _ROW.match(line)
            if not row:
                inside = False
            elif row[1] in _HEADS:
                inside = True
            elif inside:
                yield from ((path.name, quote) for quote in _QUOTE.findall(row[1]))


def text_of(node: ast.AST) -> str | None:
    """Return a string of the code with its holes, or None for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or HOLE for part in node.values)
    return None


@functools.cache
def strings() -> str:
    """Return every string of the packages, a hole before and after each."""
    found = {
        text
        for path in source_files()
        for node in ast.walk(tree_of(path))
        if (text := text_of(node))
    }
    return HOLE + HOLE.join(sorted(found)) + HOLE


def is_said(words: str, code: str) -> bool:
    """Return whether words stand in the code: in one string, where a word may be a value, or in two that are joined."""
    if words in code:
        return True
    each = list(re.finditer(r"\w+", words))
    named = (words[: word.start()] + HOLE + words[word.end() :] for word in each)
    joined = ((words[: word.start()] + HOLE, HOLE + words[word.start() :]) for word in each[1:])
    return any(form in code for form in named) or any(
        before in code and after in code for before, after in joined
    )


def unsaid(quote: str, code: str) -> list[str]:
    """Return the parts of a quoted message that no string of the code holds."""
    parts = (part.strip(" :") for part in _VALUE.split(quote))
    return [part for part in parts if part and not is_said(part, code)]


def test_every_message_of_a_page_is_one_of_the_code():
    found = [(page, quote) for page, quote in quotes() if " " in quote and quote not in OTHERS]
    missing = [(page, quote, gone) for page, quote in found if (gone := unsaid(quote, strings()))]

    assert len(found) > 25
    assert missing == []


@pytest.mark.parametrize(
    ("quote", "gone"),
    [
        ("ranks [8] are on ['node2'], other hosts than rank 0's", []),
        ("rank dp=0 has waited 10 s for the batch of step 7: ... reads /data/web/3.parquet", []),
        ("planner state has version", []),
        ("planner state has a version", ["planner state has a version"]),
        (
            "ranks [8] have not come to the node of their host",
            ["have not come to the node of their host"],
        ),
    ],
)
def test_values_of_a_quote_may_be_any_and_its_words_may_not(quote, gone):
    assert unsaid(quote, strings()) == gone
