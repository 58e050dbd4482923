"""The changelog stays a page that a user reads: one short line for each thing that holds now."""

import re
from collections import Counter

from tests.docs.snippets import ROOT

MOST_LETTERS = 400
"""Of an entry; what it was before, and how it was found, stands in the commit."""

MOST_LINES = 240
"""Of what is not released: entries that say one thing are one entry."""

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
UNRELEASED = TEXT.partition("## [Unreleased]\n")[2].partition("\n## [")[0].splitlines()


def test_what_is_not_released_is_told_in_short_entries():
    entries = [line for line in UNRELEASED if line and not line.startswith("#")]

    assert [line for line in entries if line.startswith(" ")] == []
    assert [line for line in entries if len(line) > MOST_LETTERS] == []
    assert len(UNRELEASED) <= MOST_LINES


def test_no_entry_stands_there_twice():
    counts = Counter(line for line in UNRELEASED if line.startswith("- "))

    assert [line for line, count in counts.items() if count > 1] == []


def test_sections_are_those_of_keep_a_changelog_in_their_order():
    found = [line for line in UNRELEASED if re.match(r"### ", line)]

    named = ["Before you upgrade", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    assert found == [f"### {name}" for name in named if f"### {name}" in found]
